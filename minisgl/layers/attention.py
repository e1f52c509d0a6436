"""The attention of one layer. This module owns the layer's keys and values in the paged pool.

Promise: only the slots that the step's inputs name are written. T new tokens, H query heads, K KV heads, D
head dim, P pages, S page size.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from minisgl.attention.interface import Attend, AttentionInputs, decodes_with_triton
from minisgl.layers.norm import RMSNorm
from minisgl.layers.zeroed import zeroed
from triton_kernels.e4m3 import FP8
from triton_kernels.paged_decode import Rope, rope_paged_decode
from triton_kernels.registry import KERNELS


class Attention(nn.Module):
    """Rotates q and k, stores k and v in the pool, attends. Buffers: k_cache and v_cache [P, S, K, D], and
    kv_scales, float32 [2], the scales of keys and values in a pool of FP8: 1 unless they are loaded.

    The pool is empty (P = 0) until `allocate_kv`: the engine profiles memory before it chooses the size.

    Args:
        window: tokens that each token sees, itself included; 0 = all up to itself.
        scale: factor on the scores; None = 1 / sqrt(D).
        softcap: scores become softcap * tanh(scores / softcap); 0 = no soft cap.
        scale_names: the checkpoint's names of the two scales; None = it has none.
        has_sinks: each head has a score, float32 [H], that takes its share of the softmax and has no value.
        device: of the scales and sinks.
    """

    k_cache: Tensor
    v_cache: Tensor
    kv_scales: Tensor

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        attend: Attend,
        *,
        window: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        scale_names: tuple[str, str] | None = None,
        has_sinks: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.softcap = softcap
        self.attend = attend
        self.decodes_with_triton = decodes_with_triton(attend)
        self.kernels = KERNELS
        self.source: tuple[Attention, ...] = ()
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.empty(0, 1, num_kv_heads, head_dim), persistent=False)
        self.scale_names = scale_names
        self.register_buffer("kv_scales", torch.ones(2, device=device), persistent=False)
        self.sinks = None
        if has_sinks:
            sinks = torch.empty(num_heads, dtype=torch.float32, device=device)
            self.sinks = nn.Parameter(sinks, requires_grad=False)

    def allocate_kv(
        self, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Replace the pool by a zeroed one, or by the new one of the layer that this one reads from."""
        if self.source:
            self.k_cache, self.v_cache = self.source[0].k_cache, self.source[0].v_cache
            return
        shape = (num_pages, page_size, self.num_kv_heads, self.head_dim)
        self.k_cache = zeroed(shape, dtype, torch.device(device))
        self.v_cache = zeroed(shape, dtype, torch.device(device))

    def read_from(self, source: "Attention") -> None:
        """Attend over the keys and values of another layer, whose pool is allocated before this one's."""
        self.source = (source,)  # a tuple, so that it is no module of this one
        self.kv_scales, self.scale_names = source.kv_scales, None

    def own_tensors(self) -> dict[str, Tensor]:
        """Views of the scales [1] and sinks [H] to load, by what the checkpoint calls them."""
        found = dict(zip(self.scale_names or (), self.kv_scales.split(1), strict=False))
        return found if self.sinks is None else found | {"sinks": self.sinks.detach()}

    def forward(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        inputs: AttentionInputs,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        normed_values: Literal["values", "keys"] | None = None,
    ) -> Tensor:
        """qkv [T, (H + 2K) * D], positions int32 [T], cos_sin float32 [max_position, D] -> [T, H * D].

        Args:
            q_norm, k_norm: both or neither; normalise each head's D elements before the rotation.
            normed_values: as `rope_store` takes it; only with these norms. With "keys", qkv has no values.
        """
        norms: tuple[Any, ...] = ()
        if q_norm is not None and k_norm is not None:
            norms = (q_norm.weight, k_norm.weight, q_norm.eps)
        values = {} if normed_values is None else {"normed_values": normed_values}
        if inputs.is_decode and self._uses_fused_decode():
            out = rope_paged_decode(
                qkv,
                Rope(cos_sin, positions, inputs.slot_mapping, *norms, **values),
                self.k_cache,
                self.v_cache,
                page_table=inputs.page_table,
                row_ids=inputs.row_ids,
                context_len=inputs.context_len,
                scale=self.scale,
                window=self.window,
                softcap=self.softcap,
                arrivals=inputs.arrivals,
                **self._scales(),
                **self._sinks(),
            )
        else:
            places = (positions, inputs.slot_mapping, self.k_cache, self.v_cache)
            q = self.kernels.rope_store(qkv, cos_sin, *places, *norms, **self._scales(), **values)
            out = self.attend_pool(q, inputs)
        return out.view(-1, self.num_heads * self.head_dim)

    def attend_pool(self, q: Tensor, inputs: AttentionInputs) -> Tensor:
        """Attention of q [T, H, D] over the pool -> [T, H, D], including rows that decode beside prompts."""
        pools, options = (self.k_cache, self.v_cache), (self.scale, self.window, self.softcap)
        more = self._scales() | self._sinks()
        out = self.attend(q, *pools, inputs, *options, **more)
        if inputs.decodes is not None:
            decodes, is_real = inputs.decodes
            q, first = q[: len(is_real)], out[: len(is_real)]
            decoded = self.attend(q, *pools, decodes, *options, **more)
            torch.where(is_real[:, None, None], decoded, first, out=first)
        return out

    def _scales(self) -> dict[str, Tensor]:
        """The further argument of the ops and of `attend` for a pool of FP8."""
        return {"kv_scales": self.kv_scales} if self.k_cache.dtype == FP8 else {}

    def _sinks(self) -> dict[str, Tensor]:
        """The further argument of the ops and of `attend` for heads with sinks."""
        return {} if self.sinks is None else {"sinks": self.sinks}

    def _uses_fused_decode(self) -> bool:
        """Whether `rope_paged_decode` does the work of rope_store and paged_decode.

        It must not if `--kernel` replaced one of these two by a user's function, which `self.kernels` then
        has in place of the one in KERNELS.
        """
        chosen = self.kernels.rope_store, self.kernels.paged_decode
        both_are_ours = chosen == (KERNELS.rope_store, KERNELS.paged_decode)
        return both_are_ours and self.decodes_with_triton
