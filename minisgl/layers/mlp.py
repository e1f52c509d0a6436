"""The gated MLP. T tokens, M model width, F MLP width."""

import torch
from torch import Tensor, nn

from minisgl.layers.linear import FusedLinear, Linear
from minisgl.layers.weight import Input, InputFormat
from minisgl.model_config.quantization import Quantization, layer_scheme


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, with gate and up in one matrix product.

    Args:
        name: of the module in the checkpoint.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
        name: str = "",
    ) -> None:
        super().__init__()
        sizes = (hidden_size, intermediate_size)
        self.gate_up_proj, self.down_proj = _projections(*sizes, dtype, device, quantization, name)

    @property
    def input_format(self) -> InputFormat:
        """What `forward` takes beside plain rows."""
        return self.gate_up_proj.input_format

    def forward(self, x: Input) -> Tensor:
        """[T, M] -> [T, M]."""
        return self.down_proj(self.gate_up_proj.gated(x, self.down_proj.input_format))


class GeluMLP(nn.Module):
    """`down(gelu_tanh(gate(x)) * up(x))`, with gate and up in one matrix product (Gemma).

    Args:
        name: of the module in the checkpoint.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
        name: str = "",
    ) -> None:
        super().__init__()
        sizes = (hidden_size, intermediate_size)
        self.gate_up_proj, self.down_proj = _projections(*sizes, dtype, device, quantization, name)

    def forward(self, x: Tensor) -> Tensor:
        """[T, M] -> [T, M]."""
        return self.down_proj(self.gate_up_proj.gelu_gated(x))


def _projections(
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None,
    name: str,
) -> tuple[FusedLinear, Linear]:
    parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
    scheme = layer_scheme(quantization, f"{name}.gate_up_proj", tuple(parts))
    gate_up = FusedLinear(hidden_size, parts, dtype, device, scheme=scheme)
    scheme = layer_scheme(quantization, f"{name}.down_proj")
    return gate_up, Linear(intermediate_size, hidden_size, dtype, device, scheme=scheme)
