"""Hand-written Triton kernels for LLM inference: one op per file, each with its plain-torch reference.

Depends on torch and triton alone. `from triton_kernels.rms_norm import rms_norm`, and so on: the README's
table names the ops. On CPU tensors every op runs its reference.
"""
