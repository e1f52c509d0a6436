"""Linear layers, alone and fused with others of the same input; a `Weight` does the work.

N rows of input, `in` and `out` features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minisgl.layers.fp8_weight import Fp8Weight
from minisgl.layers.int4_weight import Int4Weight
from minisgl.layers.weight import Input, InputFormat, PlainWeight
from minisgl.model_config.quantization import Int4Scheme, Scheme
from triton_kernels.silu_mul import gelu_tanh_mul

AnyWeight = PlainWeight | Fp8Weight | Int4Weight


def make_weight(
    in_features: int,
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    bias: bool,
    scheme: Scheme | None,
) -> AnyWeight:
    """A weight of the kind that `scheme` says (None = unquantized) with parts of these output features."""
    if scheme is None:
        return PlainWeight(in_features, sizes, dtype, device, bias=bias)
    if isinstance(scheme, Int4Scheme):
        return Int4Weight(in_features, sizes, scheme, dtype, device, bias=bias)
    return Fp8Weight(in_features, sizes, scheme, dtype, device, bias=bias)


class Linear(nn.Module):
    """`y = x @ weight.T (+ bias)`; both are allocated, not initialised."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool = False,
        scheme: Scheme | None = None,
    ) -> None:
        super().__init__()
        self.weight = make_weight(in_features, [out_features], dtype, device, bias=bias, scheme=scheme)

    @property
    def input_format(self) -> InputFormat:
        """What `forward` takes beside plain rows."""
        return self.weight.input_format

    def forward(self, x: Input) -> Tensor:
        """[N, in] -> [N, out]."""
        return self.weight.multiply(x)

    def part_tensors(self) -> dict[str, Tensor]:
        """Views of the tensors to load, by name in the checkpoint."""
        (tensors,) = self.weight.part_tensors()
        return tensors


class FusedLinear(nn.Module):
    """Several linear layers with the same input, fused into one matrix product; their rows are concatenated.

    Args:
        parts: the checkpoint's name of each part and its output features, in order.
        bias: every part has a bias.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool = False,
        scheme: Scheme | None = None,
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        sizes = list(parts.values())
        self.weight = make_weight(in_features, sizes, dtype, device, bias=bias, scheme=scheme)

    @property
    def input_format(self) -> InputFormat:
        """What `forward` and `gated` take beside plain rows."""
        return self.weight.input_format

    def forward(self, x: Input) -> Tensor:
        """[N, in] -> [N, sum of the parts]."""
        return self.weight.multiply(x)

    def gated(self, x: Input, wanted: InputFormat = InputFormat.PLAIN) -> Input:
        """silu(first part) * second part, two of one size: [N, in] -> [N, out / 2]. See `Weight`."""
        return self.weight.gated(x, wanted)

    def gelu_gated(self, x: Tensor) -> Tensor:
        """gelu_tanh(first part) * second part, two of one size: [N, in] -> [N, out / 2]."""
        if isinstance(self.weight, PlainWeight):
            return self.weight.gelu_gated(x)
        return gelu_tanh_mul(self.forward(x))

    def part_tensors(self) -> dict[str, Tensor]:
        """Views of the fused tensors, by name in the checkpoint: each part's weight [out, in], bias [out]."""
        return {
            f"{part}.{kind}": tensor
            for part, tensors in zip(self.parts, self.weight.part_tensors(), strict=True)
            for kind, tensor in tensors.items()
        }
