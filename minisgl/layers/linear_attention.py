"""Linear attention with the gated delta rule, and its projections. This module owns the layer's states.

Promise: only the states of the step's rows are written; a row that begins at position 0 reads none.

T new tokens, N of them that leave the layer, M model width, B lines of the states, K key heads, V value
heads, D and E elements of a key head and a value head, C = 2 * K * D + V * E channels.
"""

import torch
from torch import Tensor, nn

from minisgl.attention.interface import AttentionInputs
from minisgl.layers.linear import FusedLinear, Linear
from minisgl.layers.weight import Input, InputFormat, PlainWeight
from minisgl.model_config.kv_groups import StateShape
from minisgl.model_config.quantization import Scheme
from triton_kernels.gated_delta import TAPS, DeltaSaves, DeltaStates, DeltaWeights
from triton_kernels.gated_delta_decode import gated_delta_decode
from triton_kernels.gated_delta_prefill import gated_delta_prefill


class LinearAttention(nn.Module):
    """One layer. Buffers: conv_state [B, 4, C] and recurrent_state, float32 [B, V, D, E].

    They are empty until `use_states`. A row's states lie in the line of its row id; the last line is for
    padding rows. Snapshots of such states have buffers of their own.

    Args:
        eps: of the norm.
        scheme: of the projections, but for those of the gates b and a, which are never quantized.
        by_key_head: the checkpoint's projections have the rows of one key head together (Qwen3-Next).
    """

    conv_state: Tensor
    recurrent_state: Tensor
    saved_conv_state: Tensor
    saved_recurrent_state: Tensor

    def __init__(
        self,
        hidden_size: int,
        shape: StateShape,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        *,
        in_scheme: Scheme | None = None,
        out_scheme: Scheme | None = None,
        by_key_head: bool = False,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.eps = eps
        self.by_key_head = by_key_head
        value_size = shape.num_heads * shape.value_dim
        projections, gates = _projections(shape, by_key_head)
        self.projected_size = sum(projections.values())
        self.gates_proj = None
        if in_scheme is None:
            # One product instead of two.
            self.in_proj = FusedLinear(hidden_size, projections | gates, dtype, device)
        else:
            self.in_proj = FusedLinear(hidden_size, projections, dtype, device, scheme=in_scheme)
            self.gates_proj = FusedLinear(hidden_size, gates, dtype, device)
        self.out_proj = Linear(value_size, hidden_size, dtype, device, scheme=out_scheme)

        def weight(*sizes: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(*sizes, dtype=dtype, device=device), requires_grad=False)

        self.conv = weight(shape.conv_channels, TAPS)
        self.a_log = weight(shape.num_heads, dtype=torch.float32)
        self.dt_bias = weight(shape.num_heads, dtype=torch.float32)
        self.norm = weight(shape.value_dim)
        for name in ("conv_state", "recurrent_state", "saved_conv_state", "saved_recurrent_state"):
            self.register_buffer(name, torch.empty(0), persistent=False)

    @property
    def input_format(self) -> InputFormat:
        """What `forward` takes beside plain rows."""
        return self.in_proj.input_format if self.gates_proj is None else InputFormat.PLAIN

    def use_states(self, states: DeltaStates, snapshots: DeltaStates) -> None:
        """Take these as the buffers."""
        self.conv_state, self.recurrent_state = states
        self.saved_conv_state, self.saved_recurrent_state = snapshots

    def forward(self, x: Input, positions: Tensor, cos_sin: Tensor, inputs: AttentionInputs) -> Tensor:
        """[T, M] -> [N, M]. It has no use for positions and angles, which attention takes."""
        projected = self.in_proj(x)
        qkvz = projected[:, : self.projected_size]
        ba = projected[:, self.projected_size :] if self.gates_proj is None else self.gates_proj(x)
        layer = (
            DeltaWeights(self.conv, self.a_log, self.dt_bias, self.norm),
            DeltaStates(self.conv_state, self.recurrent_state),
        )
        if inputs.is_decode:
            out = gated_delta_decode(qkvz, ba, *layer, inputs.row_ids, inputs.context_len, self.eps)
        else:
            rows = (inputs.row_ids, inputs.context_len, inputs.row_start)
            saves = None
            if inputs.state_saves is not None and len(self.saved_conv_state):
                snapshots = DeltaStates(self.saved_conv_state, self.saved_recurrent_state)
                saves = DeltaSaves(*inputs.state_saves, snapshots)
            out = gated_delta_prefill(qkvz, ba, *layer, *rows, self.eps, saves)
            if inputs.decodes is not None:
                rows, is_real = inputs.decodes
                first = slice(len(is_real))
                where = (rows.row_ids, rows.context_len, self.eps)
                decoded = gated_delta_decode(qkvz[first], ba[first], *layer, *where)
                torch.where(is_real[:, None], decoded, out[first], out=out[first])
        return self.out_proj(inputs.select_outputs(out))

    def part_tensors(self) -> dict[str, Tensor]:
        """Views of this module's own parameters, by name in the checkpoint; the projections have theirs."""
        return {
            "conv1d.weight": self.conv.detach().unsqueeze(1),
            "A_log": self.a_log.detach(),
            "dt_bias": self.dt_bias.detach(),
            "norm.weight": self.norm.detach(),
        }

    def finish_loading(self) -> None:
        """Called once, after the checkpoint is loaded: rows by key head become q, k, v, z, b, a."""
        if self.by_key_head:
            assert isinstance(self.in_proj.weight, PlainWeight)
            values = self.in_proj.weight.values
            values.copy_(values[_order_by_part(self.shape).to(values.device)])


def _projections(shape: StateShape, by_key_head: bool) -> tuple[dict[str, int], dict[str, int]]:
    """The checkpoint's names and sizes of the projections to q, k, v and z, and of those to b and a."""
    values, heads = shape.num_heads * shape.value_dim, shape.num_heads
    if by_key_head:
        return {"in_proj_qkvz": shape.conv_channels + values}, {"in_proj_ba": 2 * heads}
    return {"in_proj_qkv": shape.conv_channels, "in_proj_z": values}, {"in_proj_b": heads, "in_proj_a": heads}


def num_key_heads(shape: StateShape) -> int:
    """K."""
    return (shape.conv_channels - shape.num_heads * shape.value_dim) // (2 * shape.key_dim)


def _order_by_part(shape: StateShape) -> Tensor:
    """int64 [C + V * E + 2V]: the place of each row of q, k, v, z, b, a where key heads come one by one."""
    heads, group_size = num_key_heads(shape), shape.num_heads // num_key_heads(shape)
    sizes = (shape.key_dim, shape.key_dim, group_size * shape.value_dim, group_size * shape.value_dim)
    places = torch.arange(heads * sum(sizes), device="cpu").view(heads, -1)
    gates = torch.arange(2 * shape.num_heads, device="cpu").view(heads, -1) + places.numel()
    parts = (*places.split(sizes, dim=1), *gates.split(group_size, dim=1))
    return torch.cat([part.flatten() for part in parts])
