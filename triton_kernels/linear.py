"""A linear layer, plain and as a gated MLP's first half.

    linear:        y[m, n] = sum over k of x[m, k] * w[n, k]  (+ bias[n])
    gated_linear:  y[m, f] = silu(g) * u,   g, u = round of the above at n = f and n = F + f;   N = 2 * F
    gelu_linear:   the same with gelu_tanh instead of silu

M rows, N outputs, K inputs, F = N / 2. Sums in float32, `round` being that to the dtype of x, so that
gated_linear is what linear followed by silu_mul yields, and gelu_linear with gelu_tanh_mul. Rows of x may be
strided, w is [N, K], contiguous.

linear_few.py serves up to MAX_ROWS rows (decode steps of small batches), linear_many.py or torch serve more;
torch serves float32. A row's result is the same to the last bit in all batches of up to MAX_ROWS rows.
"""

from torch import Tensor
from torch.nn import functional as F

from triton_kernels.linear_few import MAX_ROWS, gated_linear_triton, linear_triton
from triton_kernels.linear_many import gated_linear_many, is_for_many, linear_many
from triton_kernels.on_cpu import linear_cpu, silu_mul_cpu
from triton_kernels.silu_mul import gelu_tanh_mul, silu_mul, silu_mul_reference


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same as linear, in plain torch."""
    return F.linear(x, weight, bias)


def gated_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """The same as gated_linear, in plain torch."""
    return silu_mul_reference(F.linear(x, weight))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N], all of one dtype."""
    if x.device.type == "cpu":
        return linear_cpu(x, weight, bias)
    if _suits_the_kernel(x):
        return linear_triton(x, weight, bias)
    if is_for_many(x, weight, "linear_many"):
        return linear_many(x, weight, bias)
    return F.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K], weight [2F, K] (the gate's rows first) -> silu(gate) * up, [M, F], all of one dtype."""
    if x.device.type == "cpu":
        return silu_mul_cpu(linear_cpu(x, weight))
    if _suits_the_kernel(x):
        return gated_linear_triton(x, weight)
    if is_for_many(x, weight, "gated_linear_many"):
        return gated_linear_many(x, weight)
    return silu_mul(F.linear(x, weight))


def gelu_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K], weight [2F, K] (the gate's rows first) -> gelu_tanh(gate) * up, [M, F], all of one dtype."""
    if _suits_the_kernel(x):
        return gated_linear_triton(x, weight, gelu=True)
    return gelu_tanh_mul(linear(x, weight))


def _suits_the_kernel(x: Tensor) -> bool:
    return x.shape[0] <= MAX_ROWS and x.device.type == "cuda" and x.element_size() == 2
