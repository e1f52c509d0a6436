"""What our kernels are compared with: plain torch compiled by inductor, and flashinfer where it is installed.

Promise: a baseline gets the same arguments and computes the same; it is timed, never trusted. None = there
is no such baseline for the op.
"""

import importlib.util
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.benchmark.attention_problems import AttentionShape
from minisgl.benchmark.kernel_timing import Problem
from triton_kernels.linear import gated_linear_reference, linear_reference
from triton_kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from triton_kernels.silu_mul import silu_mul_reference

MOST_GATHERED_BYTES = 4 << 30
"""Of keys: where rows are very unequal, a gather to the longest would not fit."""


def inductor_calls(problem: Problem, shape: AttentionShape | None) -> list[Callable[[], Any]] | None:
    """The problem's calls in plain torch under torch.compile; the first call compiles."""
    plain = PLAIN_TORCH.get(problem.op)
    if plain is None:
        return None
    if shape is not None:  # it gathers what the page table can hold: no more than the longest row needs
        pages = math.ceil(max(shape.contexts) / shape.page_size)
        gathered = len(shape.contexts) * pages * problem.arguments[0][1][0].nbytes
        if gathered > MOST_GATHERED_BYTES:
            return None
        cut = [(*given[:3], given[3][:, :pages].contiguous(), *given[4:]) for given in problem.arguments]
        problem = problem._replace(arguments=cut)
    torch.compiler.reset()  # each shape gets code of its own, however many there are
    return problem.calls(torch.compile(plain, dynamic=False))


def _rope_store(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Without padding tokens."""
    _, _, kv_heads, head_dim = k_cache.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=1)
    if q_norm_weight is not None and k_norm_weight is not None:
        q = rms_norm_reference(q, q_norm_weight, eps)
        k = rms_norm_reference(k, k_norm_weight, eps)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)

    def rotated(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    k_cache.flatten(0, 1)[slots] = rotated(k)
    v_cache.flatten(0, 1)[slots] = v
    return rotated(q)


def _paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_ids: Tensor,
    context_len: Tensor,
    scale: float,
    *_: Any,
) -> Tensor:
    """Gathers every row's pages, as many as the page table is wide, and attends to them."""
    pages = page_table[row_ids]
    keys = k_cache[pages].flatten(1, 2).transpose(1, 2)
    values = v_cache[pages].flatten(1, 2).transpose(1, 2)
    seen = torch.arange(keys.shape[2], device=q.device)[None, :] < context_len[:, None]
    values = values.masked_fill(~seen[:, None, :, None], 0)
    keys = keys.masked_fill(~seen[:, None, :, None], 0)
    mask = seen[:, None, None, :]
    out = F.scaled_dot_product_attention(q[:, :, None], keys, values, mask, scale=scale, enable_gqa=True)
    return out[:, :, 0]


def _sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """By sorting, as engines without a kernel do; random numbers from torch's generator."""
    vocab = logits.shape[1]
    values, ids = logits.float().sort(dim=1, descending=True)
    weights = (values / temperature.clamp(min=1e-10)[:, None]).softmax(1)
    before = weights.cumsum(1) - weights
    kept = before < top_p[:, None]
    limit = torch.where(top_k > 0, top_k, vocab)[:, None]
    kept &= torch.arange(vocab, device=logits.device)[None, :] < limit
    kept &= weights >= min_p[:, None] * weights[:, :1]
    noise = torch.empty_like(weights).exponential_()
    place = (weights * kept / noise).argmax(1, keepdim=True)
    drawn = ids.gather(1, place)[:, 0]
    return torch.where(temperature > 0, drawn, ids[:, 0]).int()


PLAIN_TORCH: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm_reference,
    "add_rms_norm": add_rms_norm_reference,
    "linear": linear_reference,
    "gated_linear": gated_linear_reference,
    "linear_many": linear_reference,
    "gated_linear_many": gated_linear_reference,
    "silu_mul": silu_mul_reference,
    "rope_store": _rope_store,
    "paged_decode": _paged_decode,
    "sample": _sample,
}


def has_flashinfer() -> bool:
    """Whether flashinfer can be compared with."""
    return importlib.util.find_spec("flashinfer") is not None


def flashinfer_calls(problem: Problem, shape: AttentionShape | None) -> list[Callable[[], Any]] | None:
    """The problem's calls by flashinfer's functions; planning is not timed."""
    import flashinfer  # pyright: ignore[reportMissingImports]  (there only if somebody installed it)

    if problem.op == "rms_norm":
        return problem.calls(flashinfer.norm.rmsnorm)
    if problem.op == "add_rms_norm":  # in place
        return problem.calls(flashinfer.norm.fused_add_rmsnorm)
    if problem.op == "silu_mul":
        return problem.calls(flashinfer.activation.silu_and_mul)
    if shape is None:
        return None
    calls = []
    for arguments in problem.arguments:
        q, k_cache, v_cache, page_table, row_ids, context_len = arguments[:6]
        pages = [math.ceil(n / shape.page_size) for n in shape.contexts]
        indices = torch.cat([page_table[row, :n] for row, n in zip(row_ids.tolist(), pages, strict=True)])
        indptr = torch.tensor([0, *itertools.accumulate(pages)], dtype=torch.int32, device=q.device)
        last = ((context_len - 1) % shape.page_size + 1).int()
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
        common = (shape.heads, shape.kv_heads, shape.head_dim, shape.page_size)
        if problem.op == "paged_decode":
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            wrapper.plan(indptr, indices, last, *common, q_data_type=q.dtype, kv_data_type=q.dtype)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
            wrapper.plan(arguments[6], indptr, indices, last, *common, causal=True, q_data_type=q.dtype)
        calls.append(lambda wrapper=wrapper, q=q, pools=(k_cache, v_cache): wrapper.run(q, pools))
    return calls
