"""Decode steps on a CPU: the parts of a block that a child process compiles while uncompiled ones serve."""
