"""CUDA graphs and compiled code: what is recorded, when it is recorded, and which graph a step uses."""
