"""The launches of every kernel at models' shapes, on meta tensors: nothing is computed, nothing needs a GPU.

Promise: the launchers themselves choose grid, configuration and arguments, as `triton_kernels.gpu` says of
the GPU. So what these launches compile is what that GPU would compile.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minisgl.benchmark.kernels.model_shapes import read_model_shape
from minisgl.benchmark.kernels.ops.all_ops import TUNABLE
from minisgl.benchmark.kernels.ops.linear_ops import Matrix, many_rows_candidates
from minisgl.benchmark.kernels.ops.quantized_moe_ops import QUANTIZED_MOE
from minisgl.benchmark.kernels.ops.quantized_tunings import QUANTIZED
from triton_kernels import (
    advance_rows,
    all_reduce,
    fused_moe,
    gated_delta,
    gated_delta_decode,
    gated_delta_decode_hopper,
    gated_delta_prefill,
    linear_few,
    linear_many,
    logit_rules,
    mixture_norms,
    moe_choice,
    moe_gate,
    norm_router,
    paged_decode,
    paged_prefill,
    paged_prefill_hopper,
    read_rows,
    rms_norm,
    rope_store,
    sample,
    silu_mul,
    token_mask,
)
from triton_kernels.gated_delta_chunks import Chunks
from triton_kernels.gpu import Gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Launch(NamedTuple):
    """A call of one launcher, which may launch several kernels."""

    name: str
    call: Callable[[], Any]
    every: bool = True
    """Compiled for every GPU; the others are compiled for Hopper only, because compiling takes time."""


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A meta tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    """A meta tensor of int32."""
    return empty(*shape, dtype=torch.int32)


def launches(gpu: Gpu) -> Iterator[Launch]:
    """Every launch for this GPU."""
    yield from _norms_and_rows()
    yield from _sums_over_ranks()
    yield from _linear_layers(gpu)
    yield from _rope_and_decode()
    yield from _prefill(gpu)
    yield from _experts()
    yield from _linear_attention(gpu)
    for dtype in (BF16, F32):
        columns = (empty(64, dtype=F32), ints(64), empty(64, dtype=F32), empty(64, dtype=F32))
        arguments = (empty(64, 128256, dtype=dtype), *columns, empty(64, dtype=torch.int64), ints(64))
        yield Launch(f"sample {dtype}", functools.partial(sample.sample_triton, *arguments), dtype == BF16)


def _norms_and_rows() -> Iterator[Launch]:
    weight, row, rows = empty(4096), empty(64, 4096), ints(64)
    yield Launch("rms_norm 4096", lambda: rms_norm.rms_norm_triton(row, weight, 1e-5))
    yield Launch("rms_norm 128", lambda: rms_norm.rms_norm_triton(empty(640, 128), empty(128), 1e-5))
    yield Launch("add_rms_norm 4096", lambda: rms_norm.add_rms_norm_triton(row, row, weight, 1e-5), False)
    x = empty(64, 576)
    yield Launch("add_rms_norm 576", lambda: rms_norm.add_rms_norm_triton(x, x, empty(576), 1e-5))
    for tokens, width, experts in ((2, 2048, 128), (64, 2880, 128), (16, 4096, 8)):
        x = empty(tokens, width)
        arguments = (x, x, empty(width), 1e-6, empty(experts, width), ints(tokens))
        call = functools.partial(norm_router.add_rms_norm_router_triton, *arguments)
        yield Launch(f"norm_router {tokens}x{width} to {experts}", call)
    for tokens in (16, 256):
        x = empty(tokens, 4096)
        arguments = (x, x, empty(4096), 1e-6, empty(32, 4096), ints(tokens), empty(32))
        call = functools.partial(norm_router.add_rms_norm_router_triton, *arguments)
        yield Launch(f"norm_router {tokens}x4096 with a bias", call, False)
    x, w = empty(2, 2816), empty(2816)
    entry = (mixture_norms.EntryNorms(w, w, w, w), 1e-6, empty(128, 2816), 0.02, ints(2))
    yield Launch("enter_mixture 2x2816 to 128", lambda: mixture_norms.enter_mixture(x, x, *entry))
    leaving = (empty(2, 1, dtype=F32), x, mixture_norms.ExitNorms(w, w, w), 1e-6, empty(1))
    yield Launch("leave_mixture 2x2816", lambda: mixture_norms.leave_mixture(x, x, *leaving))
    yield Launch("silu_mul 14336", lambda: silu_mul.silu_mul_triton(empty(64, 2 * 14336)))
    yield Launch("gelu_tanh_mul 14336", lambda: silu_mul.gelu_tanh_mul_triton(empty(64, 2 * 14336)))
    floats = empty(257, dtype=F32)
    tables = (ints(257), ints(257), ints(257, 512), floats, ints(257), floats, floats)
    seeds = empty(257, dtype=torch.int64)
    yield Launch("read_rows", lambda: read_rows.read_rows_triton(rows, *tables, seeds, 16))
    advance = functools.partial(advance_rows.advance_rows_triton, rows, rows, rows, ints(257), ints(257), 256)
    yield Launch("advance_rows", advance)
    for dtype in (BF16, F32):
        masked = (empty(64, 151936, dtype=dtype), rows, ints(40, 4748))
        call = functools.partial(token_mask.token_mask_triton, *masked)
        yield Launch(f"token_mask {dtype}", call, dtype == BF16)
    yield from _rules()


def _rules() -> Iterator[Launch]:
    rows, floats, whether = ints(64), empty(257, dtype=F32), empty(257, dtype=torch.bool)
    tables = logit_rules.RuleTables(
        *(whether, ints(257), floats, floats, floats, ints(257, 512), empty(257, 512, dtype=F32)),
        *(ints(257, 128, 8), ints(257, 128), ints(257, 8), ints(257, 151936)),
    )
    for dtype in (BF16, F32):
        arguments = (empty(64, 151936, dtype=dtype), rows, rows)
        call = functools.partial(logit_rules.logit_rules_triton, *arguments, tables=tables)
        yield Launch(f"logit_rules {dtype}", call, dtype == BF16)
    arguments = (rows, rows, empty(64, dtype=torch.bool))
    count = functools.partial(
        logit_rules.count_tokens_triton, *arguments, recent=tables.recent, marks=tables.marks
    )
    yield Launch("count_tokens", count)


def _sums_over_ranks() -> Iterator[Launch]:
    x = empty(64, 5120)
    for num_ranks, shots in ((2, 1), (4, 2)):
        regions = all_reduce.Regions(empty(num_ranks, dtype=torch.int64), 1, 8 << 20)
        config = all_reduce.AllReduceConfig(shots, 8)
        call = functools.partial(all_reduce.all_reduce_norm, x, x, empty(5120), 1e-5, regions, config)
        yield Launch(f"all_reduce {num_ranks} ranks", call)


def _linear_layers(gpu: Gpu) -> Iterator[Launch]:
    """One matrix for each default configuration, and of the larger batches' kernel one that tuning offers."""
    plain = ((1024, 3072), (2048, 1024), (4096, 1024), (3072, 3072), (4096, 14336), (6144, 4096))
    for outputs, width in (*plain, (128256, 4096)):
        for rows in (16, 32):
            arguments = (empty(rows, width), empty(outputs, width))
            call = functools.partial(linear_few.linear_triton, *arguments)
            yield Launch(f"linear {rows} to {outputs}x{width}", call, rows == 16 or outputs == 6144)
    for outputs, width in ((6144, 1024), (7168, 4096), (28672, 4096)):
        for rows in (16, 32):
            arguments = (empty(rows, width), empty(outputs, width))
            call = functools.partial(linear_few.gated_linear_triton, *arguments)
            yield Launch(f"gated_linear {rows} to {outputs}x{width}", call, rows == 16 or outputs == 28672)
    call = functools.partial(linear_few.gated_linear_triton, empty(1, 2816), empty(4224, 2816), gelu=True)
    yield Launch("gated_linear with gelu 1 to 4224x2816", call)
    for rows, outputs, gated in ((64, 4096, False), (256, 6144, False), (64, 28672, True)):
        offered = many_rows_candidates(Matrix("", outputs, 4096), rows, gpu, gated=gated)
        split = [config for config in offered if config.splits > 1]
        tall = [config for config in offered if config.rows_tall]
        for config in dict.fromkeys([*offered[-1:], *split[:1], *tall[:1]]):
            function = linear_many.gated_linear_many_with if gated else linear_many.linear_many_with
            call = functools.partial(function, empty(rows, 4096), empty(outputs, 4096), config=config)
            yield Launch(f"{'gated_' * gated}linear_many {rows}x4096 to {outputs}, {config}", call)


def attention_arguments(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page: int,
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """The arguments that decode and prefill attention share, for pools of kv_dtype (None: of dtype)."""
    pool = empty(4096, page, kv_heads, head_dim, dtype=kv_dtype or dtype)
    qkv = empty(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    q = qkv[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    return q, pool, torch.empty_like(pool), ints(257, 2048), ints(tokens), ints(tokens)


def _rope_and_decode() -> Iterator[Launch]:
    def store(
        tokens: int, heads: int, kv_heads: int, normed: bool, dim: int = 128, values: Any = None
    ) -> Callable[[], Any]:
        pool = empty(4096, 16, kv_heads, dim)
        num_heads = heads + kv_heads * (1 if values == "keys" else 2)
        qkv, table = empty(tokens, num_heads * dim), empty(8192, dim, dtype=F32)
        arguments = (qkv, table, ints(tokens), ints(tokens), pool, pool)
        weights = (empty(dim), empty(dim)) if normed else ()
        return functools.partial(rope_store.rope_store_triton, *arguments, *weights, normed_values=values)

    def decode(*shape: int, dtype: torch.dtype = BF16, **options: Any) -> Callable[[], Any]:
        return functools.partial(
            paged_decode.paged_decode_triton, *attention_arguments(64, *shape, dtype=dtype), 0.1, **options
        )

    def rope_decode(
        heads: int, kv_heads: int, head_dim: int, rows: int, normed: bool, values: Any = None
    ) -> Callable[[], Any]:
        _, k_cache, v_cache, *where = attention_arguments(rows, heads, kv_heads, head_dim, 16)
        norm = empty(head_dim) if normed else None
        num_heads = heads + kv_heads * (1 if values == "keys" else 2)
        table, qkv = empty(8192, head_dim, dtype=F32), empty(rows, num_heads * head_dim)
        rope = paged_decode.Rope(table, ints(rows), ints(rows), norm, norm, 1e-6, values)
        arguments = (qkv, k_cache, v_cache, *where)
        return functools.partial(paged_decode.paged_decode_triton, *arguments, scale=0.1, rope=rope)

    yield Launch("rope_store 32/8/128", store(64, 32, 8, False))
    yield Launch("rope_store normed 32/4/128, 2 tokens", store(2, 32, 4, True))
    yield Launch("rope_store normed 32/4/128, 64 tokens", store(64, 32, 4, True), False)
    yield Launch("rope_store 16/8/256, values", store(64, 16, 8, True, 256, "values"), False)
    yield Launch("rope_store 16/2/512, values of keys", store(64, 16, 2, True, 512, "keys"))
    yield Launch("decode 32/8/128 page 16", decode(32, 8, 128, 16), False)
    yield Launch("decode 9/3/64 page 16 fp16", decode(9, 3, 64, 16, dtype=F16), False)
    yield Launch("decode 28/4/80 page 1", decode(28, 4, 80, 1, window=1024, softcap=30.0), False)
    yield Launch("decode 16/8/256 window softcap", decode(16, 8, 256, 16, window=4096, softcap=50.0))
    yield Launch("decode 16/1/256 page 256", decode(16, 1, 256, 256), False)
    yield Launch("decode 32/8/128 float32", decode(32, 8, 128, 16, dtype=F32), False)
    yield Launch("decode 16/2/512", decode(16, 2, 512, 16))
    heads_64: Any = {"sinks": empty(64, dtype=F32)}
    yield Launch("decode 64/8/64 sinks", decode(64, 8, 64, 16, window=128, **heads_64))
    yield Launch("rope_decode 32/8/128", rope_decode(32, 8, 128, 64, normed=False))
    yield Launch("rope_decode 32/4/128 normed", rope_decode(32, 4, 128, 64, normed=True), False)
    yield Launch("rope_decode 32/4/128 normed, few rows", rope_decode(32, 4, 128, 2, normed=True))
    for heads, values in (((16, 8, 256), "values"), ((16, 2, 512), "keys"), ((64, 8, 64), None)):
        name = "/".join(map(str, heads))
        call = rope_decode(*heads, 2, normed=heads[2] != 64, values=values)
        yield Launch(f"rope_decode {name}, few rows", call, False)
    yield Launch("rope_decode 9/3/64", rope_decode(9, 3, 64, 64, normed=False))


def _prefill(gpu: Gpu) -> Iterator[Launch]:
    def prefill(launcher: Callable, *shape: int, dtype: torch.dtype = BF16, **options: Any):
        inputs = attention_arguments(4096, *shape, dtype=dtype)
        return functools.partial(launcher, *inputs, ints(65), 512, 0.1, **options)

    portable = functools.partial(prefill, paged_prefill.paged_prefill_triton)
    yield Launch("prefill 32/8/128 page 16", portable(32, 8, 128, 16))
    yield Launch("prefill 9/3/64 page 16", portable(9, 3, 64, 16))
    yield Launch("prefill 28/4/80 page 1", portable(28, 4, 80, 1, window=1024, softcap=30.0), False)
    yield Launch("prefill 16/8/256 window softcap", portable(16, 8, 256, 16, window=4096, softcap=50.0))
    yield Launch("prefill 16/1/256 page 256", portable(16, 1, 256, 256), False)
    yield Launch("prefill 16/2/512 page 16", portable(16, 2, 512, 16))
    sinks = empty(64, dtype=F32)
    yield Launch("prefill 64/8/64 sinks", portable(64, 8, 64, 16, window=128, sinks=sinks))
    yield Launch("prefill 32/8/128 float32", portable(32, 8, 128, 16, dtype=F32), False)
    if not gpu.has_wgmma:
        return
    hopper = functools.partial(prefill, paged_prefill_hopper.paged_prefill_hopper)
    one_head = paged_prefill_hopper.HopperPrefillConfig(128, 2, 1)
    yield Launch("prefill hopper 32/8/128 page 16", hopper(32, 8, 128, 16))
    yield Launch("prefill hopper 32/8/128, a head a program", hopper(32, 8, 128, 16, config=one_head))
    yield Launch("prefill hopper 9/3/64 page 64 fp16", hopper(9, 3, 64, 64, dtype=F16))
    yield Launch("prefill hopper 28/4/128", hopper(28, 4, 128, 16, window=1024, softcap=30.0))
    yield Launch("prefill hopper 16/1/256 page 256", hopper(16, 1, 256, 256))


def _experts() -> Iterator[Launch]:
    def moe(
        tokens: int, experts: int = 128, top_k: int = 8, width: int = 2048, expert_width: int = 768,
        dtype: torch.dtype = BF16, **options: Any,
    ) -> Callable[[], Any]:  # fmt: skip
        experts += options.get("shared", False)
        x, logits = empty(tokens, width, dtype=dtype), empty(tokens, experts, dtype=dtype)
        gate_up = empty(experts, 2 * expert_width, width, dtype=dtype)
        down = empty(experts, width, expert_width, dtype=dtype)
        return functools.partial(fused_moe.fused_moe_triton, x, logits, gate_up, down, top_k, **options)

    biases = (empty(32, 2 * 2880), empty(32, 2880))
    clamped = {"biases": biases, "gate": moe_gate.Gate(moe_gate.GateKind.CLAMPED, 1.702, 7.0)}
    for tokens in (1, 64):
        yield Launch(f"moe {tokens} tokens gpt-oss", moe(tokens, 32, 4, 2880, 2880, **clamped), tokens == 1)
    for tokens in (1, 64, 256, 512, 8192):
        yield Launch(f"moe {tokens} tokens", moe(tokens))
    yield Launch("moe odd fp16", moe(64, 60, 4, 720, 208, dtype=F16), False)
    for tokens in (1, 5, 40):
        yield Launch(f"moe {tokens} tokens 2 experts", moe(tokens, 2, 1, 48, 16), False)
    yield Launch("moe 512 tokens float32", moe(512, dtype=F32), False)
    scaled = {"gate": moe_gate.Gate(moe_gate.GateKind.GELU), "scales": empty(128)}
    for tokens in (1, 16):
        yield Launch(f"moe {tokens} tokens gemma 4", moe(tokens, 128, 8, 2816, 704, **scaled), tokens == 1)
        call = moe(tokens, 256, 8, 2048, 512, shared=True)
        yield Launch(f"moe {tokens} tokens and a shared expert", call, tokens == 1)
    for experts, top_k, *groups in ((128, 8, 1, 1), (256, 8, 8, 4)):
        choice = moe_choice.Choice(top_k, num_groups=groups[0], kept_groups=groups[1])
        arguments = (empty(64, experts, dtype=F32), choice, empty(experts, dtype=F32))
        call = functools.partial(moe_choice.choose_experts_triton, *arguments)
        yield Launch(f"choice of {top_k} of {experts} in {groups[0]} groups", call)
    arguments: Any = (empty(64, 128), moe_choice.Choice(8, sigmoid=False), None, empty(128))
    call = functools.partial(moe_choice.choose_experts_triton, *arguments)
    yield Launch("choice of 8 of 128 with scales", call, False)


def delta_arguments(
    tokens: int, key_heads: int, value_heads: int, head_dim: int, dtype: torch.dtype = BF16
) -> tuple[Any, ...]:
    """The arguments that both ops of linear attention share, up to the rows' lines."""
    values = value_heads * head_dim
    channels = 2 * key_heads * head_dim + values
    weights = gated_delta.DeltaWeights(
        empty(channels, 4, dtype=dtype),
        empty(value_heads, dtype=F32),
        empty(value_heads, dtype=F32),
        empty(head_dim, dtype=dtype),
    )
    recurrent = empty(257, value_heads, head_dim, head_dim, dtype=F32)
    states = gated_delta.DeltaStates(empty(257, 4, channels, dtype=dtype), recurrent)
    projected = empty(tokens, channels + values + 2 * value_heads, dtype=dtype)
    return projected[:, : channels + values], projected[:, channels + values :], weights, states


def _linear_attention(gpu: Gpu) -> Iterator[Launch]:
    """Qwen3.5-35B-A3B's heads."""
    shape = (16, 32, 128)
    if gpu.is_hopper:
        for dtype, rows in ((BF16, 64), (BF16, 1), (F16, 64)):
            arguments = (*delta_arguments(rows, *shape, dtype), ints(rows), ints(rows), 1e-6)
            hopper = functools.partial(gated_delta_decode_hopper.gated_delta_decode_hopper, *arguments)
            yield Launch(f"delta_decode hopper 16/32/128 {dtype}, {rows} rows", hopper)
    for dtype in (BF16, F32):
        for rows in (1, 64):
            arguments = (*delta_arguments(rows, *shape, dtype), ints(rows), ints(rows), 1e-6)
            decode = functools.partial(gated_delta_decode.gated_delta_decode_triton, *arguments)
            yield Launch(f"delta_decode 16/32/128 {dtype}, {rows} rows", decode, dtype == BF16)
    arguments: Any = (*delta_arguments(4096, *shape), ints(64), ints(64), ints(65), 1e-6)
    prefill = functools.partial(gated_delta_prefill.gated_delta_prefill_triton, *arguments)
    yield Launch("delta_prefill 16/32/128", prefill)
    snapshots = gated_delta.DeltaStates(*arguments[3])
    saves = gated_delta.DeltaSaves(ints(129), ints(64), snapshots)
    yield Launch("delta_prefill 16/32/128, saved in the middle", functools.partial(prefill, saves=saves))
    yield Launch("delta_prefill 16/32/128, the scan of one prompt", _scan_of_one_prompt)


def _scan_of_one_prompt() -> None:
    """Its programs have fewer columns than those of many prompts."""
    heads, dim = 32, 128
    projected, _, _, states = delta_arguments(64, 16, heads, dim)
    values = empty(64, heads, dim, dtype=BF16)
    chunks = Chunks(values, values, empty(64, heads, 64, dtype=BF16), empty(64, heads, dtype=F32))
    gpu = gated_delta_prefill.gpu_of(projected.device)
    config = gated_delta_prefill.default_delta_prefill_config(dim, dim, 2, gpu)
    y = projected[:, : states.conv.shape[2]]
    gated_delta_prefill.scan_chunks(y, chunks, states, ints(1), ints(1), ints(2), config)


CANDIDATES_OF = ("llama-3.1-8b", "qwen3-30b-a3b", "gemma-3-1b")
"""Models whose candidates are compiled: plain layers, experts, heads of 128 and of 256."""
LINEAR_ATTENTION = "qwen3.5-35b-a3b"
"""The model of which only the ops of linear attention are compiled."""
LARGEST = {"linear_many": (64, 128, 256), "gated_linear_many": (64, 128, 256)}
"""Op -> the sizes by which its candidates differ; the others have the same ones for all sizes."""


def candidate_launches(gpu: Gpu) -> Iterator[Launch]:
    """Every configuration that `minisgl tune` tries on this GPU, each with one shape that it is tried for.

    Those of quantized layers are quantized_launches.py's to compile.

    Of numbers of splits, 1 and another: more of them take no more of a program.
    """
    seen = set()
    for shape in map(read_model_shape, (*CANDIDATES_OF, LINEAR_ATTENTION)):
        for op, tuning in TUNABLE.items():
            if shape.linear_value_heads and not op.startswith("gated_delta"):
                continue
            if op in QUANTIZED or op in QUANTIZED_MOE or (op == "fused_moe" and not shape.experts):
                continue
            for part in tuning.parts(shape):
                # A matrix's sizes do not change what a configuration takes; heads and widths do.
                numbers = () if isinstance(part, Matrix) else tuple(tuning.exact(part).items())
                for size in LARGEST.get(op, (16,)):
                    for config in tuning.candidates(part, size, gpu):
                        kind = config._replace(splits=config.splits > 1) if op in LARGEST else config
                        if (op, numbers, kind) in seen:
                            continue
                        seen.add((op, numbers, kind))
                        call = functools.partial(tuning.launcher, *_arguments(op, part, size), config=config)
                        yield Launch(f"{op} {config}", call)


def _arguments(op: str, part: Any, size: int) -> tuple[Any, ...]:
    """The arguments of a tuned launcher for a part of a model, without the configuration."""
    if isinstance(part, Matrix):
        return empty(size, part.width), empty(part.outputs, part.width)
    if op in ("rms_norm", "add_rms_norm"):
        x = empty(size, part.hidden)
        return (*[x] * (2 if op == "add_rms_norm" else 1), empty(part.hidden), 1e-5)
    if op.startswith("gated_delta"):
        heads = (part.linear_key_heads, part.linear_value_heads, part.linear_head_dim)
        rows = (ints(64), ints(64)) if op == "gated_delta_decode" else (ints(64), ints(64), ints(65))
        return (*delta_arguments(64 if op == "gated_delta_decode" else 4096, *heads), *rows, 1e-6)
    if op == "silu_mul":
        return (empty(size, 2 * part.intermediate),)
    if op == "fused_moe":
        gate_up = empty(part.experts, 2 * part.expert_width, part.hidden)
        down = empty(part.experts, part.hidden, part.expert_width)
        return empty(size, part.hidden), empty(size, part.experts), gate_up, down, part.experts_per_token
    kv_dtype = torch.float8_e4m3fn if op.endswith("_fp8") else None
    scales = (0, 0.0, None, empty(2, dtype=F32)) if kv_dtype else ()
    shape = (part.heads, part.kv_heads, part.head_dim, 16)
    if op.startswith("paged_decode"):
        return (*attention_arguments(64, *shape, kv_dtype=kv_dtype), 0.1, *scales)
    scales = (*scales[:2], *scales[3:])
    return (*attention_arguments(4096, *shape, kv_dtype=kv_dtype), ints(65), 512, 0.1, *scales)
