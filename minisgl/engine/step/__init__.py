"""One step on the device: its inputs, the tables that it reads and writes, the model, sampling."""
