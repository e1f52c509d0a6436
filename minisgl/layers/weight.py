"""What a linear layer multiplies by: a weight with the tensors of its checkpoint.

Promise: a layer knows nothing of numbers and scales; unquantized is one kind among others (fp8_weight.py and
int4_weight.py have others). A weight may consist of parts, layers with the same input whose output features
lie side by side.

N rows of input, `in` and `out` features.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from triton_kernels.linear import gelu_linear
from triton_kernels.packed_weights import (
    can_halve,
    can_pack,
    halve_weight,
    is_packed,
    pack_weight,
    unpack_weight,
)
from triton_kernels.registry import KERNELS
from triton_kernels.silu_mul import gelu_tanh_mul


class InputFormat(Enum):
    """What a weight can take beside plain rows, so that the op before it may emit it."""

    PLAIN = "nothing else"
    FP8_ROWS = "FP8 with a scale for each row"
    FP8_GROUPS = "FP8 with a scale for each 128 columns of a row"


class Fp8Rows(NamedTuple):
    """Rows of FP8 numbers, as `quantize_fp8` gives them."""

    values: Tensor
    """e4m3 [N, in]."""
    scales: Tensor
    """float32 [scales of a row, N]."""


Input = Tensor | Fp8Rows


class Weight(Protocol):
    """The kinds of weights are modules with these methods."""

    @property
    def input_format(self) -> InputFormat:
        """What `multiply` and `gated` take beside plain rows."""
        ...

    def multiply(self, x: Input) -> Tensor:
        """[N, in] -> [N, out], with the bias if there is one."""
        ...

    def gated(self, x: Input, wanted: InputFormat = InputFormat.PLAIN) -> Input:
        """silu(first half of the product) * second half: [N, in] -> [N, out / 2]. Without a bias.

        Args:
            wanted: what the next layer takes; the weight may return plain rows all the same.
        """
        ...

    def part_tensors(self) -> list[dict[str, Tensor]]:
        """Each part's views of the tensors to load, by what the checkpoint calls them ("weight", "bias")."""
        ...

    def finish_loading(self) -> None:
        """Called once, after these tensors are filled."""
        ...


class PlainWeight(nn.Module):
    """Unquantized: `values` [out, in] and `bias` [out] or None, allocated, not initialised.

    Args:
        sizes: output features of each part.
    """

    input_format = InputFormat.PLAIN

    def __init__(
        self,
        in_features: int,
        sizes: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        self.sizes = tuple(sizes)
        self.values = nn.Parameter(
            torch.empty(sum(sizes), in_features, dtype=dtype, device=device), requires_grad=False
        )
        self.bias = make_bias(sum(sizes), dtype, device) if bias else None
        self._shared: tuple[nn.Parameter, ...] = ()  # a tuple, so that it is no parameter of this module
        self.kernels = KERNELS

    def multiply(self, x: Input) -> Tensor:
        """See `Weight`."""
        return self.kernels.linear(x, self.values, self.bias)

    def gated(self, x: Input, wanted: InputFormat = InputFormat.PLAIN) -> Tensor:
        """See `Weight`."""
        return self.kernels.gated_linear(x, self.values)

    def gelu_gated(self, x: Tensor) -> Tensor:
        """As `gated`, with gelu_tanh."""
        if self.kernels.linear is KERNELS.linear:
            return gelu_linear(x, self.values)
        return gelu_tanh_mul(self.multiply(x))

    def pack(self, *, is_shared: bool = False) -> None:
        """On a CPU, bring bfloat16 into a layout that our `linear` is faster with, if there is one.

        Args:
            is_shared: `values` is also a parameter of another module, so it is kept for `unpack`.
        """
        if self._is_ours and self.values.device.type == "cpu" and can_pack(self.values):
            self._replace(pack_weight(self.values.detach()), is_shared)

    def halve(self, goes_on: Callable[[], bool], *, is_shared: bool = False) -> None:
        """On a CPU, keep float32 that float16 holds as float16. It takes seconds for a large weight.

        Another thread may multiply meanwhile.

        Args:
            goes_on: is asked now and then; False = leave the weight as it is.
            is_shared: as of `pack`.
        """
        if self._is_ours and can_halve(self.values):
            halved = halve_weight(self.values.detach(), goes_on)
            if halved is not None:
                self._replace(halved, is_shared)

    @property
    def _is_ours(self) -> bool:
        return (self.kernels.linear, self.kernels.gated_linear) == (KERNELS.linear, KERNELS.gated_linear)

    def _replace(self, packed: Tensor, is_shared: bool) -> None:
        self._shared = (self.values,) if is_shared else ()
        self.values = nn.Parameter(packed, requires_grad=False)

    def unpack(self) -> None:
        """Undo `pack` or `halve`."""
        if is_packed(self.values):
            dense = nn.Parameter(unpack_weight(self.values), requires_grad=False)
            self.values = self._shared[0] if self._shared else dense

    def part_tensors(self) -> list[dict[str, Tensor]]:
        """See `Weight`. Packed values are unpacked, and stay so until `pack`."""
        self.unpack()
        parts = [{"weight": rows} for rows in self.values.detach().split(self.sizes)]
        return with_biases(parts, self.bias, self.sizes)

    def finish_loading(self) -> None:
        """See `Weight`."""


def make_bias(size: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A bias, not initialised."""
    return nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)


def with_biases(
    parts: list[dict[str, Tensor]], bias: Tensor | None, sizes: Sequence[int]
) -> list[dict[str, Tensor]]:
    """The parts' tensors, with views of the bias if there is one."""
    if bias is None:
        return parts
    biases = bias.detach().split(list(sizes))
    return [part | {"bias": rows} for part, rows in zip(parts, biases, strict=True)]
