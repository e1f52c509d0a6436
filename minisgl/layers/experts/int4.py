"""Experts of 4-bit weights in groups that share a scale; their activations stay as they are.

Promise: as layers/int4_weight.py: whatever the checkpoint's format, the kernels get one layout, in the memory
that the checkpoint's numbers were read into.

T tokens, M model width, E experts, F width of one expert.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minisgl.layers.experts.weights import ExpertSizes
from minisgl.layers.int4_weight import Int4Weight, empty_int4
from minisgl.model_config.quantization import Int4Scheme
from triton_kernels.moe_int4 import PackedExperts, fused_moe_int4
from triton_kernels.quantize_int4 import Int4Weight as PackedInt4


class Int4Experts(nn.Module):
    """All experts' 4-bit matrices; allocated, not initialised.

    Tensors: `packed`, `scales` and perhaps `zeros` of gate_up and of down, as `PackedExperts` says. Until
    loaded, each expert's `packed` has the checkpoint's own layout.

    Args:
        dtype: of activations and scales.

    Raises:
        ModelError: the experts' sizes do not suit the format.
    """

    def __init__(
        self, sizes: ExpertSizes, scheme: Int4Scheme, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.scheme = scheme
        self.dtype = dtype
        gate_up = empty_int4((sizes.experts, 2 * sizes.half, sizes.width), scheme, dtype, device)
        down = empty_int4((sizes.experts, sizes.width, sizes.half), scheme, dtype, device)

        def parameter(tensor: Tensor) -> nn.Parameter:
            return nn.Parameter(tensor, requires_grad=False)

        self.gate_up_packed, self.gate_up_scales = parameter(gate_up.packed), parameter(gate_up.scales)
        self.down_packed, self.down_scales = parameter(down.packed), parameter(down.scales)
        self.gate_up_zeros = None if gate_up.zeros is None else parameter(gate_up.zeros)
        self.down_zeros = None if down.zeros is None else parameter(down.zeros)
        # While they load, each expert's matrices convert themselves. Not submodules: they own nothing.
        self.loading: list[tuple[Int4Weight, Int4Weight]] | None = self._matrices()

    def _matrices(self) -> list[tuple[Int4Weight, Int4Weight]]:
        """Gate_up and down of each expert, in the memory of all."""
        sizes, (gate_up, down) = self.sizes, self.tensors()

        def one(stacked: PackedExperts, expert: int, inputs: int, parts: list[int]) -> Int4Weight:
            zeros = None if stacked.zeros is None else stacked.zeros.detach()[expert]
            memory = PackedInt4(stacked.packed.detach()[expert], stacked.scales.detach()[expert], zeros)
            device = memory.packed.device
            return Int4Weight(inputs, parts, self.scheme, self.dtype, device, bias=False, memory=memory)

        return [
            (
                one(gate_up, expert, sizes.width, [sizes.half] * 2),
                one(down, expert, sizes.half, [sizes.width]),
            )
            for expert in range(sizes.experts)
        ]

    def forward(self, x: Tensor, logits: Tensor, top_k: int, renormalize: bool) -> Tensor:
        """See `ExpertWeights`."""
        return fused_moe_int4(x, logits, *self.tensors(), top_k, renormalize)

    def tensors(self) -> tuple[PackedExperts, PackedExperts]:
        """What the kernels read: gate_up and down."""
        return (
            PackedExperts(self.gate_up_packed, self.gate_up_scales, self.gate_up_zeros),
            PackedExperts(self.down_packed, self.down_scales, self.down_zeros),
        )

    def part_tensors(self) -> dict[str, Tensor]:
        """See `ExpertWeights`. The tensors that are filled before they are converted are gone afterwards."""
        return {
            f"experts.{expert}.{part}.{kind}": tensor
            for expert, (gate_up, down) in enumerate(self.loading or self._matrices())
            for part, tensors in zip(
                self.sizes.part_names, (*gate_up.part_tensors(), *down.part_tensors()), strict=True
            )
            for kind, tensor in tensors.items()
        }

    def finish_loading(self) -> None:
        """See `ExpertWeights`.

        Raises:
            ModelError: the checkpoint's zero points or groups are not what its config says.
        """
        if self.loading is None:
            return
        for matrices in self.loading:
            for matrix in matrices:
                matrix.finish_loading()
        self.loading = None

    def fill_dummy(self, normal: Callable[[Tensor], None]) -> None:
        """See `ExpertWeights`."""
        matrices, device = self.loading or self._matrices(), self.tensors()[0].packed.device
        for place in range(2):
            first = matrices[0][place]
            shape = (self.sizes.experts, sum(first.sizes), first.in_features)
            values = torch.empty(shape, dtype=self.dtype, device=device)
            normal(values)
            for both, one in zip(matrices, values, strict=True):
                both[place].quantize(one)
        self.loading = None
