"""The engine's own times: batches, single steps, starts, and the scheduler in simulation."""
