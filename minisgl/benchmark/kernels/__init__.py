"""Kernels one by one: checked, timed and tuned over a model's shapes."""
