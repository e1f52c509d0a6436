"""The mixture of experts. T tokens, M model width, E experts, F width of one expert."""

from typing import Protocol

import torch
from torch import Tensor, nn

from minisgl.errors import ModelError
from minisgl.layers.experts.make import make_experts
from minisgl.layers.experts.weights import ExpertSizes, PlainExperts, expert_sizes
from minisgl.layers.linear import Linear
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.model_config.config import ExpertsConfig, ExpertStorage
from minisgl.model_config.quantization import Quantization, layer_scheme
from triton_kernels.moe_choice import Choice, choose_experts
from triton_kernels.moe_gate import SILU
from triton_kernels.norm_router import add_rms_norm_router, masked_logits, router_logits
from triton_kernels.registry import KERNELS

ROUTER_ROWS_OF_SHARED = 16
"""The gate of a shared expert that is one of the experts, and zeros, so that rows of logits are aligned."""


class AddingNorm(Protocol):
    """An `RMSNorm`, or a norm that first sums x over the ranks."""

    def forward_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), each [T, M]."""
        ...


class MoeMLP(nn.Module):
    """Mixture of experts: for each token, the weighted sum of the gated MLPs that the router picks.

    A shared expert, if there is one, is added for every token, times the sigmoid of its gate if it has one.
    With a gate, and as wide as the others, it is the last of `experts`, and its gate is a row of the router.

    The router is [E, M], or longer with such a gate, and never quantized. Everything is allocated, not
    initialised.

    Args:
        name: of the module in the checkpoint.
        eps: of the router's own norm.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
        name: str = "",
        eps: float = 0.0,
    ) -> None:
        super().__init__()
        self.config = config
        self.kernels = KERNELS

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

        sizes = expert_sizes(config, hidden_size)
        sizes = sizes._replace(shared=quantization is None and _shared_is_like_the_others(config, sizes))
        self.router = weight(config.num_experts + (ROUTER_ROWS_OF_SHARED if sizes.shared else 0), hidden_size)
        self.router_bias = weight(config.num_experts) if config.router_bias else None
        self.router_scale = weight(hidden_size) if config.router_scale else None
        self.eps = eps
        self.expert_scale = weight(config.num_experts) if config.expert_scales else None
        self.choice_bias = None
        if config.choice_bias:
            bias = torch.empty(config.num_experts, dtype=torch.float32, device=device)
            self.choice_bias = nn.Parameter(bias, requires_grad=False)
        # One expert stands for all: that another differs is found when its tensors do not fit.
        scheme = layer_scheme(quantization, f"{name}.experts.0.gate_up_down", config.gate_up_down_names)
        self.experts = make_experts(sizes, scheme, dtype, device)
        self.choice = _choice_of(config, has_scales=config.expert_scales and not self._experts_take_scales)
        self.has_shared_among_experts = sizes.shared
        self.shared_expert = self.shared_expert_gate = self.shared_experts = None
        if config.shared_intermediate_size and not sizes.shared:
            shared_name = f"{name}.{'shared_expert' if config.shared_gate else 'shared_experts'}"
            width = config.shared_intermediate_size
            shared = GatedMLP(hidden_size, width, dtype, device, quantization, shared_name)
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
        if isinstance(norm, RMSNorm) and self.norm_and_router_are_ours():
            router = (self.router, slot_mapping, self.router_bias, self.config.router_in_float32)
            x, residual, logits = add_rms_norm_router(x, residual, norm.weight, norm.eps, *router)
        else:
            x, residual = norm.forward_add(x, residual)
            logits = self._router_logits(x, slot_mapping)
        return self._add_shared(x, self._mix(x, logits)), residual

    def mix_beside(self, x: Tensor, stream: Tensor, slot_mapping: Tensor) -> Tensor:
        """The mixture of x [T, M], where the router looks at the residual stream [T, M] by its own norm."""
        assert self.router_scale is not None
        normed = self.kernels.rms_norm(stream, self.router_scale, self.eps)
        logits = self._router_logits(normed, slot_mapping) * self.router_factor
        return self._add_shared(x, self._mix(x, logits))

    @property
    def _experts_take_scales(self) -> bool:
        """Whether those of the experts are for `experts`; else they are part of the choice."""
        return isinstance(self.experts, PlainExperts)

    @property
    def router_factor(self) -> float:
        """On the logits of a router with a norm of its own."""
        return self.router.shape[1] ** -0.5

    def _router_logits(self, x: Tensor, slot_mapping: Tensor) -> Tensor:
        if self.kernels.linear == KERNELS.linear or self.config.router_in_float32:
            return router_logits(
                x, self.router, slot_mapping, self.router_bias, self.config.router_in_float32
            )
        return masked_logits(self.kernels.linear(x, self.router, self.router_bias), slot_mapping)

    def _mix(self, x: Tensor, logits: Tensor) -> Tensor:
        """The weighted sum [T, M] of what the experts make of x [T, M]; logits [T, E]."""
        y, factors = self.mix_unscaled(x, logits)
        return y if factors is None else y * factors

    def mix_unscaled(self, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """What `experts` makes of x, [T, M], and its factors, float32 [T, 1]; None = 1."""
        top_k, renormalize, factors = self.config.experts_per_token, self.config.renormalize, None
        scales = (self.expert_scale,) if self._experts_take_scales and self.expert_scale is not None else ()
        if self.choice is not None:
            of_choice = None if scales else self.expert_scale
            logits, factors = choose_experts(logits, self.choice, self.choice_bias, of_choice)
            renormalize = True
        return self.experts(x, logits, top_k, renormalize, *scales), factors

    def _add_shared(self, x: Tensor, y: Tensor) -> Tensor:
        """y [T, M] with the shared expert's output for x [T, M], in x's dtype."""
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            y = y + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        elif self.shared_experts is not None:
            y = y + self.shared_experts(x)
        return y.to(x.dtype)

    def norm_and_router_are_ours(self) -> bool:
        """Whether the norm before and the router may be fused: a user's op replaces neither."""
        return (self.kernels.add_rms_norm, self.kernels.linear) == (KERNELS.add_rms_norm, KERNELS.linear)

    def part_tensors(self) -> dict[str, Tensor]:
        """The router and each expert's tensors, by the checkpoint's name in a layer: views."""
        module = f"{self.config.module_name}." if self.config.module_name else ""
        router = f"{module}{self.config.router_name}"
        num_experts = self.config.num_experts
        views = {f"{router}.weight": self.router.detach()[:num_experts]}
        if self.has_shared_among_experts:
            views[f"{module}shared_expert_gate.weight"] = self.router.detach()[num_experts : num_experts + 1]
        if self.router_scale is not None:
            views[f"{router.removesuffix('.proj')}.scale"] = self.router_scale.detach()
        if self.expert_scale is not None:
            views[f"{router.removesuffix('.proj')}.per_expert_scale"] = self.expert_scale.detach()
        if self.router_bias is not None:
            views[f"{router}.bias"] = self.router_bias.detach()
        if self.choice_bias is not None:
            views[f"{router}.e_score_correction_bias"] = self.choice_bias.detach()
        views |= {f"{module}{name}": tensor for name, tensor in self.experts.part_tensors().items()}
        return views

    def finish_loading(self) -> None:
        """Called once, after a checkpoint is loaded: rows of the router that nobody reads become zeros.

        Raises:
            ModelError: a scale of an expert is negative, which the choice of experts does not express.
        """
        if self.has_shared_among_experts:
            self.router[self.config.num_experts + 1 :] = 0
        if self.expert_scale is not None and not self._experts_take_scales and (self.expert_scale < 0).any():
            raise ModelError(
                "per_expert_scale: quantized experts need scales of at least 0, got negative ones; "
                "load the unquantized checkpoint instead"
            )


def _shared_is_like_the_others(config: ExpertsConfig, sizes: ExpertSizes) -> bool:
    """Whether `fused_moe` can compute the shared expert: the router's logits are what it is given."""
    return (
        config.shared_gate
        and config.shared_intermediate_size == config.intermediate_size
        and sizes.gate == SILU
        and sizes.stored is ExpertStorage.EACH
        and not (config.router_bias or config.router_in_float32 or config.router_scale)
        and _choice_of(config, has_scales=config.expert_scales) is None
    )


def _choice_of(config: ExpertsConfig, *, has_scales: bool) -> Choice | None:
    """How experts are chosen and weighted, if not by the largest logits of a softmax."""
    if not (
        config.sigmoid_scores
        or config.choice_bias
        or config.num_groups > 1
        or config.weight_factor != 1
        or has_scales
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
