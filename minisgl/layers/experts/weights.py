"""What a mixture of experts multiplies by: all experts' matrices, with the tensors of their checkpoint.

Promise: as layers/weight.py has it for a linear layer: the mixture knows nothing of numbers and scales, and
unquantized is one kind among others.

T tokens, M model width, E experts, F width of one expert.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from minisgl.model_config.config import ExpertsConfig, ExpertStorage
from triton_kernels.moe_gate import SILU, Gate, GateKind
from triton_kernels.registry import KERNELS


class ExpertSizes(NamedTuple):
    """What the weights of a mixture are made from."""

    experts: int
    width: int  # M
    half: int  # F; gate and up together have twice as many rows
    part_names: tuple[str, str, str]  # the checkpoint's names of gate, up and down
    stored: ExpertStorage = ExpertStorage.EACH
    gate: Gate = SILU
    shared: bool = False
    """One expert more, which all tokens go to; the logits have its gate's behind the others."""


def expert_sizes(config: ExpertsConfig, hidden_size: int) -> ExpertSizes:
    """The sizes of a model's mixtures."""
    return ExpertSizes(
        config.num_experts,
        hidden_size,
        config.intermediate_size,
        config.gate_up_down_names,
        config.storage,
        Gate(GateKind[config.activation.name], config.alpha, config.limit),
    )


class ExpertWeights(Protocol):
    """The kinds are modules with these methods."""

    def forward(self, x: Tensor, logits: Tensor, top_k: int, renormalize: bool) -> Tensor:
        """The weighted sum over each token's experts: x [T, M], logits [T, E] -> [T, M]."""
        ...

    def part_tensors(self) -> dict[str, Tensor]:
        """Views of the tensors to load, by name within the mixture ("experts.0.up_proj.weight")."""
        ...

    def finish_loading(self) -> None:
        """Called once, after these tensors are filled."""
        ...

    def fill_dummy(self, normal: Callable[[Tensor], None]) -> None:
        """Set the weights to those that `normal` fills a tensor with, quantized."""
        ...


class PlainExperts(nn.Module):
    """Unquantized: gate_up [E, 2F, M], the gate in the upper F rows, and down [E, M, F]; not initialised.

    A shared expert is the last one, E counts it here.
    """

    def __init__(self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.sizes = sizes
        self.kernels = KERNELS

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

        num_experts = sizes.experts + sizes.shared
        self.gate_up = weight(num_experts, 2 * sizes.half, sizes.width)
        self.down = weight(num_experts, sizes.width, sizes.half)

    def forward(
        self, x: Tensor, logits: Tensor, top_k: int, renormalize: bool, scales: Tensor | None = None
    ) -> Tensor:
        """See `ExpertWeights`; scales [E] are factors of the weights of the experts."""
        # Only what a user's own op has to know.
        more: dict[str, Any] = {} if self.sizes.gate == SILU else {"gate": self.sizes.gate}
        more |= {"shared": True} if self.sizes.shared else {}
        more |= {} if scales is None else {"scales": scales}
        return self.kernels.fused_moe(x, logits, self.gate_up, self.down, top_k, renormalize, **more)

    def part_tensors(self) -> dict[str, Tensor]:
        """See `ExpertWeights`."""
        gate_up, down = self.gate_up.detach(), self.down.detach()
        if self.sizes.stored is ExpertStorage.STACKED:
            return {"experts.gate_up_proj": gate_up, "experts.down_proj": down}
        views = views_of_parts(self.sizes, gate_up, down, "weight")
        if self.sizes.shared:
            parts = zip(self.sizes.part_names, (*gate_up[-1].chunk(2), down[-1]), strict=True)
            views |= {f"shared_expert.{name}.weight": rows for name, rows in parts}
        return views

    def finish_loading(self) -> None:
        """See `ExpertWeights`."""

    def fill_dummy(self, normal: Callable[[Tensor], None]) -> None:
        """See `ExpertWeights`."""
        normal(self.gate_up)
        normal(self.down)


def views_of_parts(sizes: ExpertSizes, gate_up: Tensor, down: Tensor, kind: str) -> dict[str, Tensor]:
    """Each expert's own rows of stacked tensors, by name within the mixture.

    Args:
        gate_up: [E, 2 * n, ...], of the gate before those of up.
        down: [E, ...].
        kind: what the checkpoint calls them, behind the part's name.
    """
    gate, up, last = (f"{part}.{kind}" for part in sizes.part_names)
    gate_up, down = gate_up.detach(), down.detach()
    views = {}
    for expert in range(sizes.experts):
        upper, lower = gate_up[expert].chunk(2)
        prefix = f"experts.{expert}"
        views |= {f"{prefix}.{gate}": upper, f"{prefix}.{up}": lower, f"{prefix}.{last}": down[expert]}
    return views
