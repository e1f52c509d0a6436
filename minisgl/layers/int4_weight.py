"""Weights of 4-bit numbers in groups that share a scale; their inputs stay as they are.

Promise: whatever the checkpoint's format, the kernels get one layout, and beside it no second copy is kept.

N rows of input, `in` and `out` features, G groups. Widths are padded to the kernels' blocks of 128 inputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minisgl.errors import ModelError
from minisgl.layers.int4_layouts import (
    GPTQ,
    GROUP_OF_INPUTS,
    IN_WORD,
    MIDDLE,
    NUMBERS,
    SCALES,
    SYMMETRIC_WORDS,
    ZEROS,
    numbers_view,
    unpacked_numbers,
    unpacked_zeros,
    zeros_shape,
)
from minisgl.layers.weight import Fp8Rows, Input, InputFormat, make_bias, with_biases
from minisgl.model_config.quantization import Int4Layout, Int4Scheme
from triton_kernels.int4_linear import int4_gated_linear, int4_linear
from triton_kernels.int4_packing import BLOCK, BLOCK_BYTES, pack_int4
from triton_kernels.quantize_int4 import Int4Weight as PackedInt4
from triton_kernels.quantize_int4 import round_weight_int4
from triton_kernels.registry import KERNELS


class Int4Weight(nn.Module):
    """A weight of one or more parts; allocated, not initialised.

    Tensors: `packed` uint8 [padded in / 128, out, 64]; `scales` [G, out] of `dtype`; `zeros` the same, or
    None without zero points; `order` int64 [in], the inputs in the order of their groups, or None;
    `bias` [out] of `dtype`, or None. Until loaded, `packed` has the checkpoint's own layout.

    Args:
        sizes: output features of each part.
        dtype: of inputs and outputs.
        memory: contiguous tensors to take instead of new ones for `packed`, `scales` and `zeros`.

    Raises:
        ModelError: the layer's sizes do not suit the format.
    """

    input_format = InputFormat.PLAIN
    order: Tensor | None

    def __init__(
        self,
        in_features: int,
        sizes: Sequence[int],
        scheme: Int4Scheme,
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool,
        memory: PackedInt4 | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(in_features, sizes, scheme)
        self.in_features = in_features
        self.sizes = tuple(sizes)
        self.scheme = scheme
        self.dtype = dtype
        self.kernels = KERNELS
        self.padding = -in_features % BLOCK
        self.group = scheme.group or BLOCK
        self.stored_groups = in_features // scheme.group if scheme.group else 1
        out_features = sum(sizes)
        if memory is None:
            memory = empty_int4((out_features, in_features), scheme, dtype, device)

        def parameter(tensor: Tensor) -> nn.Parameter:
            return nn.Parameter(tensor, requires_grad=False)

        self.packed, self.scales = parameter(memory.packed), parameter(memory.scales)
        self.zeros = None if memory.zeros is None else parameter(memory.zeros)
        self.bias = make_bias(out_features, dtype, device) if bias else None
        order = torch.arange(in_features, device=device) if scheme.in_any_order else None
        self.register_buffer("order", order, persistent=False)
        self.only_while_loading = self._tensors_to_convert(device)

    def _tensors_to_convert(self, device: torch.device) -> list[dict[str, Tensor]]:
        """Each part's tensors that the kernels do not read: packed zero points, and the inputs' groups."""
        layout, parts = self.scheme.layout, []
        for size in self.sizes:
            tensors = {}
            if self._stores_zeros:
                shape = zeros_shape(layout, size, self.stored_groups)
                tensors[ZEROS[layout]] = torch.empty(shape, dtype=torch.int32, device=device)
            if self.scheme.in_any_order or layout in GPTQ:
                places = torch.arange(self.in_features, dtype=torch.int32, device=device)
                # Some writers leave it away, if groups are in order.
                tensors[GROUP_OF_INPUTS[layout]] = places // (self.scheme.group or self.in_features)
            parts.append(tensors)
        return parts

    @property
    def _stores_zeros(self) -> bool:
        """Whether the checkpoint has zero points, even if they are all 8."""
        return self.scheme.zero_points or self.scheme.layout in GPTQ

    def multiply(self, x: Input) -> Tensor:
        """See `Weight`."""
        return int4_linear(self._ordered(x), self._tensors(), self.bias)

    def gated(self, x: Input, wanted: InputFormat = InputFormat.PLAIN) -> Tensor:
        """See `Weight`."""
        if self.kernels.silu_mul is not KERNELS.silu_mul:  # the user has replaced the op
            return self.kernels.silu_mul(self.multiply(x))
        return int4_gated_linear(self._ordered(x), self._tensors())

    def _tensors(self) -> PackedInt4:
        return PackedInt4(self.packed, self.scales, self.zeros)

    def _ordered(self, x: Input) -> Tensor:
        """The inputs in the order of their groups, padded."""
        assert not isinstance(x, Fp8Rows)
        if self.order is not None:
            x = x.index_select(1, self.order)
        return F.pad(x, (0, self.padding)) if self.padding else x

    def part_tensors(self) -> list[dict[str, Tensor]]:
        """See `Weight`. The tensors that are filled before they are converted are gone afterwards."""
        layout = self.scheme.layout
        scales = self.scales.detach()[: self.stored_groups]
        if SCALES[layout] == "weight_scale":
            scales = scales.t()
        out_dim = 0 if SCALES[layout] == "weight_scale" else 1
        parts = [
            {NUMBERS[layout]: numbers, SCALES[layout]: some} | more
            for numbers, some, more in zip(
                self._stored_numbers(),
                scales.split(self.sizes, out_dim),
                self.only_while_loading,
                strict=True,
            )
        ]
        if layout is Int4Layout.COMPUTED:
            # What the checkpoint has: a shape without memory, because the loader computes the others from it.
            none = self.scales.detach()[:1, :1]
            parts = [
                part | {"weight": none.expand(size, self.in_features)}
                for part, size in zip(parts, self.sizes, strict=True)
            ]
        return with_biases(parts, self.bias, self.sizes)

    def _stored_numbers(self) -> list[Tensor]:
        """Each part's numbers as the checkpoint has them, in the memory of `packed`."""
        flat, begin, views = self.packed.detach().view(-1), 0, []
        for size in self.sizes:
            num_bytes = size * self.in_features // 2
            memory = flat[begin : begin + num_bytes]
            views.append(numbers_view(memory, self.scheme.layout, size, self.in_features))
            begin += num_bytes
        return views

    def finish_loading(self) -> None:
        """See `Weight`: convert the tensors to what the kernels read.

        Raises:
            ModelError: the checkpoint's zero points or groups are not what its config says.
        """
        layout, scheme = self.scheme.layout, self.scheme
        numbers = torch.cat([unpacked_numbers(stored, layout) for stored in self._stored_numbers()])
        if self._stores_zeros:
            self._set_zeros([tensors[ZEROS[layout]] for tensors in self.only_while_loading])
        groups = [tensors[name] for tensors in self.only_while_loading for name in tensors if "g_idx" in name]
        if groups:
            self._set_order(groups)
        if self.order is not None:
            numbers = numbers[:, self.order]
        self.only_while_loading = [{} for _ in self.sizes]
        self._finish(numbers, scheme.group is None)

    def _set_zeros(self, stored: list[Tensor]) -> None:
        """Set `zeros` from the packed zero points of each part."""
        layout = self.scheme.layout
        if self.zeros is not None:
            parts = zip(stored, self.sizes, strict=True)
            zeros = torch.cat([unpacked_zeros(words, layout, size) for words, size in parts], 1)
            self.zeros[: self.stored_groups].copy_(zeros)
        elif not any(all((words == one).all() for words in stored) for one in SYMMETRIC_WORDS):
            raise ModelError(
                f"quantization_config says that 4-bit weights are symmetric (sym), and their {ZEROS[layout]} "
                f"are others than {MIDDLE}; config.json or the weights are of another model"
            )

    def _set_order(self, groups: list[Tensor]) -> None:
        """Set `order` from the group of each input, of each part."""
        first, name = groups[0], GROUP_OF_INPUTS[self.scheme.layout]
        if any(not torch.equal(first, other) for other in groups[1:]):
            raise ModelError(
                f"{name} differs between layers with the same input, which this engine multiplies together; "
                "quantize the model without desc_act"
            )
        order = first.long().argsort(stable=True)
        size = self.scheme.group or self.in_features
        places = torch.arange(self.in_features, device=first.device)
        if not torch.equal(first.long()[order] - first.min(), places // size):
            raise ModelError(f"{name} has groups that do not have {size} inputs each")
        if self.order is not None:
            self.order.copy_(order)
        elif not torch.equal(order, places):
            raise ModelError(f"{name} has inputs in another order, and quantization_config has no desc_act")

    def _finish(self, numbers: Tensor, one_group: bool) -> None:
        """Set `packed` from numbers [out, in], and the values of groups that no checkpoint has."""
        self.packed.copy_(pack_int4(F.pad(numbers, (0, self.padding), value=MIDDLE)))
        for values in (self.scales, self.zeros):
            if values is not None and one_group:
                values.copy_(values[:1].expand_as(values).clone())
            elif values is not None:
                values[self.stored_groups :].zero_()  # of padding

    def quantize(self, values: Tensor) -> None:
        """Set the numbers and scales from unquantized `values` [out, in]."""
        self.only_while_loading = [{} for _ in self.sizes]
        group = self.scheme.group or self.in_features
        numbers, scales, zeros = round_weight_int4(values, group, self.scheme.zero_points, self.dtype)
        self.scales[: self.stored_groups].copy_(scales.t())
        if self.zeros is not None and zeros is not None:
            self.zeros[: self.stored_groups].copy_(zeros.t())
        self._finish(numbers, self.scheme.group is None)


def empty_int4(
    shape: tuple[int, ...], scheme: Int4Scheme, dtype: torch.dtype, device: torch.device
) -> PackedInt4:
    """Uninitialised tensors of a weight [out, in], or of several of them [..., out, in]."""
    *outer, out_features, in_features = shape
    width = in_features + -in_features % BLOCK
    groups = width // (scheme.group or BLOCK)

    def empty(*sizes: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty((*outer, *sizes), dtype=kind, device=device)

    return PackedInt4(
        empty(width // BLOCK, out_features, BLOCK_BYTES, kind=torch.uint8),
        empty(groups, out_features),
        empty(groups, out_features) if scheme.zero_points else None,
    )


def _check_sizes(in_features: int, sizes: Sequence[int], scheme: Int4Scheme) -> None:
    """Whether the format has whole words and groups of such a layer.

    Raises:
        ModelError: it has not.
    """
    unit = scheme.group or IN_WORD
    if in_features % unit:
        raise ModelError(f"{scheme.describe()} need layers of a multiple of {unit} inputs, got {in_features}")
    if scheme.packs_outputs and any(size % IN_WORD for size in sizes):
        uneven = next(size for size in sizes if size % IN_WORD)
        raise ModelError(
            f"{scheme.describe()} of {scheme.layout.value} need layers of a multiple of {IN_WORD} outputs, "
            f"got {uneven}"
        )
