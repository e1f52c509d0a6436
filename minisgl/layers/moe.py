"""The mixture of experts. T tokens, M model width, E experts, F width of one expert."""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minisgl.layers.experts.make import make_experts
from minisgl.layers.experts.weights import expert_sizes
from minisgl.layers.linear import Linear
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.model_config.config import ExpertsConfig
from minisgl.model_config.quantization import Quantization, layer_scheme
from triton_kernels.moe_choice import Choice, choose_experts
from triton_kernels.norm_router import add_rms_norm_router, masked_logits
from triton_kernels.registry import KERNELS


class AddingNorm(Protocol):
    """An `RMSNorm`, or a norm that first sums x over the ranks."""

    def forward_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), each [T, M]."""
        ...


class MoeMLP(nn.Module):
    """Mixture of experts: for each token, the weighted sum of the gated MLPs that the router picks.

    A shared expert, if there is one, is added for every token, times the sigmoid of its gate if it has one.

    The router is [E, M], never quantized. Everything is allocated, not initialised.

    Args:
        name: of the module in the checkpoint.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
        name: str = "",
    ) -> None:
        super().__init__()
        self.config = config
        self.kernels = KERNELS
        router = torch.empty(config.num_experts, hidden_size, dtype=dtype, device=device)
        self.router = nn.Parameter(router, requires_grad=False)
        self.choice = _choice_of(config)
        self.choice_bias = None
        if config.choice_bias:
            bias = torch.empty(config.num_experts, dtype=torch.float32, device=device)
            self.choice_bias = nn.Parameter(bias, requires_grad=False)
        # One expert stands for all: that another differs is found when its tensors do not fit.
        scheme = layer_scheme(quantization, f"{name}.experts.0.gate_up_down", config.gate_up_down_names)
        self.experts = make_experts(expert_sizes(config, hidden_size), scheme, dtype, device)
        self.shared_expert = self.shared_expert_gate = self.shared_experts = None
        if config.shared_intermediate_size:
            shared_name = f"{name}.{'shared_expert' if config.shared_gate else 'shared_experts'}"
            sizes = (hidden_size, config.shared_intermediate_size)
            shared = GatedMLP(*sizes, dtype, device, quantization, shared_name)
            if config.shared_gate:
                self.shared_expert = shared
                scheme = layer_scheme(quantization, f"{name}.shared_expert_gate")
                self.shared_expert_gate = Linear(hidden_size, 1, dtype, device, scheme=scheme)
            else:
                self.shared_experts = shared

    def forward_add(
        self, x: Tensor, residual: Tensor, norm: AddingNorm, slot_mapping: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(mixture of norm(x + residual), x + residual), each [T, M].

        Padding tokens (slot_mapping int32 [T] is -1) go to no expert and yield zeros, so that no expert is
        read for padding alone.
        """
        if isinstance(norm, RMSNorm) and self._norm_and_router_are_ours():
            x, residual, logits = add_rms_norm_router(
                x, residual, norm.weight, norm.eps, self.router, slot_mapping
            )
        else:
            x, residual = norm.forward_add(x, residual)
            logits = masked_logits(self._router_logits(x), slot_mapping)
        return self._add_shared(x, self._mix(x, logits)), residual

    def _router_logits(self, x: Tensor) -> Tensor:
        if self.config.router_in_float32:
            return F.linear(x.float(), self.router.float())
        return self.kernels.linear(x, self.router)

    def _mix(self, x: Tensor, logits: Tensor) -> Tensor:
        """The weighted sum [T, M] of what the experts make of x [T, M]; logits [T, E]."""
        top_k, renormalize, factors = self.config.experts_per_token, self.config.renormalize, None
        if self.choice is not None:
            logits, factors = choose_experts(logits, self.choice, self.choice_bias)
            renormalize = True
        y = self.experts(x, logits, top_k, renormalize)
        return y if factors is None else y * factors

    def _add_shared(self, x: Tensor, y: Tensor) -> Tensor:
        """y [T, M] with the shared expert's output for x [T, M], in x's dtype."""
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            y = y + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        elif self.shared_experts is not None:
            y = y + self.shared_experts(x)
        return y.to(x.dtype)

    def _norm_and_router_are_ours(self) -> bool:
        return (self.kernels.add_rms_norm, self.kernels.linear) == (KERNELS.add_rms_norm, KERNELS.linear)

    def part_tensors(self) -> dict[str, Tensor]:
        """The router and each expert's tensors, by the checkpoint's name in a layer: views."""
        module = self.config.module_name
        views = {f"{module}.gate.weight": self.router.detach()}
        if self.choice_bias is not None:
            views[f"{module}.gate.e_score_correction_bias"] = self.choice_bias.detach()
        views |= {f"{module}.{name}": tensor for name, tensor in self.experts.part_tensors().items()}
        return views


def _choice_of(config: ExpertsConfig) -> Choice | None:
    """How experts are chosen, if not by the largest logits of a softmax."""
    if not (
        config.sigmoid_scores or config.choice_bias or config.num_groups > 1 or config.weight_factor != 1
    ):
        return None
    return Choice(
        config.experts_per_token,
        sigmoid=config.sigmoid_scores,
        renormalize=config.renormalize,
        factor=config.weight_factor,
        num_groups=config.num_groups,
        kept_groups=config.kept_groups,
    )
