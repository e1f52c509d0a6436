"""Building an engine: devices, memory, weights, stages of the start."""
