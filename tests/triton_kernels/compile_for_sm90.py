"""Compiles for sm_90, without a GPU, every kernel that the launchers launch; one JSON line for each.

Run as a program (Triton's interpreter must be off): `python compile_for_sm90.py [case ...]`. The launchers
run on meta tensors, so that what is compiled is what a GPU would be given: same arguments, configuration.
"""

import functools
import json
import re
import subprocess
import sys
import tempfile
import time

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonTensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_kernels import (
    advance_rows,
    all_reduce,
    fused_moe,
    linear_few,
    linear_many,
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

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


MEMORY = re.compile(r"\b(?:ld\.global|st\.global|cp\.async\.[bc]|atom\.|red\.)")


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes of a kernel, read with the cuobjdump that Triton carries."""
    from triton.backends.nvidia import __file__ as backend

    tool = backend.rsplit("/", 1)[0] + "/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return {"registers": int(found[1]), "stack_bytes": int(found[2])} if found else {}


def compile_instead_of_launching(case: str):
    """A stand-in for JITFunction.run that compiles for sm_90 and prints what the compiler says."""

    def run(self, *args, grid, warmup, num_warps=4, num_stages=3, **kwargs):
        bound = dict(zip(self.arg_names, args, strict=False)) | kwargs
        if "EARLY" in self.arg_names:
            bound["EARLY"] = True  # as on a GPU that can
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(self.params):
            value = bound[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name] = "constexpr"
                constants[(index,)] = value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = TYPES[value.dtype]
                attributes[(index,)] = [["tt.divisibility", 16]]
            elif isinstance(value, TensorDescriptor):
                block = ", ".join(str(n) for n in value.block_shape)
                signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype][1:]}[{block}]>"
            elif isinstance(value, GluonTensorDescriptor):
                element = TYPES[value.base.dtype][1:]
                signature[parameter.name] = f"tensordesc<{element}{value.block_shape},{value.layout!r}>"
            else:
                signature[parameter.name] = "i32"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    attributes[(index,)] = [["tt.divisibility", 16]]
        source_type = GluonASTSource if self.is_gluon() else ASTSource
        source = source_type(self, signature, constants, attributes)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        begin = time.perf_counter()
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ptx = compiled.asm["ptx"]
        line = {
            "case": case,
            "kernel": self.__name__,
            "shared_bytes": compiled.metadata.shared,
            "wgmma": ptx.count("wgmma.mma_async"),
            "mma": ptx.count("mma.sync"),
            "cp_async": ptx.count("cp.async.cg") + ptx.count("cp.async.ca"),
            "waits": ptx.count("griddepcontrol.wait"),
            "before_wait": len(MEMORY.findall(ptx.partition("griddepcontrol.wait")[0])),
            "triggers_before_wait": "griddepcontrol.launch" in ptx.partition("griddepcontrol.wait")[0],
            **resources(compiled.asm["cubin"]),
            "seconds": round(time.perf_counter() - begin, 1),
        }
        print(json.dumps(line), flush=True)  # noqa: T201 (a program's output)

    return run


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def attention_inputs(heads: int, kv_heads: int, head_dim: int, page: int, tokens: int, dtype=torch.bfloat16):
    pool = empty(4096, page, kv_heads, head_dim, dtype=dtype)
    qkv = empty(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    q = qkv[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    return q, pool, torch.empty_like(pool), ints(257, 2048), ints(tokens), ints(tokens)


def decode(heads: int, kv_heads: int, head_dim: int, page: int, **options):
    dtype = options.pop("dtype", torch.bfloat16)
    inputs = attention_inputs(heads, kv_heads, head_dim, page, 64, dtype)
    return lambda: paged_decode.paged_decode_triton(*inputs, 0.1, **options)


def rope_decode(heads: int, kv_heads: int, head_dim: int, rows: int, normed: bool):
    _, k_cache, v_cache, *where = attention_inputs(heads, kv_heads, head_dim, 16, rows)
    norm = empty(head_dim) if normed else None
    table = empty(8192, head_dim, dtype=torch.float32)
    qkv = empty(rows, (heads + 2 * kv_heads) * head_dim)
    rope = paged_decode.Rope(table, ints(rows), ints(rows), norm, norm)
    return lambda: paged_decode.paged_decode_triton(qkv, k_cache, v_cache, *where, scale=0.1, rope=rope)


def prefill(heads: int, kv_heads: int, head_dim: int, page: int, **options):
    dtype = options.pop("dtype", torch.bfloat16)
    inputs = attention_inputs(heads, kv_heads, head_dim, page, 4096, dtype)
    return lambda: paged_prefill.paged_prefill_triton(*inputs, ints(65), 512, 0.1, **options)


def moe(
    tokens: int, experts: int = 128, top_k: int = 8, width: int = 2048, expert_width: int = 768, **options
):
    dtype = options.pop("dtype", torch.bfloat16)
    x, logits = empty(tokens, width, dtype=dtype), empty(tokens, experts, dtype=dtype)
    gate_up = empty(experts, 2 * expert_width, width, dtype=dtype)
    down = empty(experts, width, expert_width, dtype=dtype)
    return lambda: fused_moe.fused_moe_triton(x, logits, gate_up, down, top_k, **options)


def prefill_hopper(heads: int, kv_heads: int, head_dim: int, page: int, **options):
    dtype = options.pop("dtype", torch.bfloat16)
    inputs = attention_inputs(heads, kv_heads, head_dim, page, 4096, dtype)
    return lambda: paged_prefill_hopper.paged_prefill_hopper(*inputs, ints(65), 512, 0.1, **options)


def cases():
    bf16 = torch.bfloat16
    yield "rms_norm 4096", lambda: rms_norm.rms_norm_triton(empty(64, 4096), empty(4096), 1e-5)
    yield "rms_norm 128", lambda: rms_norm.rms_norm_triton(empty(640, 128), empty(128), 1e-5)
    for num_ranks, shots in ((2, 1), (4, 2)):
        regions = all_reduce.Regions(empty(num_ranks, dtype=torch.int64), 1, 8 << 20)
        call = functools.partial(
            all_reduce.all_reduce_norm, empty(64, 5120), empty(64, 5120), empty(5120), 1e-5, regions
        )
        config = all_reduce.AllReduceConfig(shots, 8)
        yield f"all_reduce {num_ranks} ranks", functools.partial(call, config=config)
    x = empty(64, 576)
    yield "add_rms_norm 576", lambda: rms_norm.add_rms_norm_triton(x, x, empty(576), 1e-5)
    for tokens, width, experts in ((2, 2048, 128), (16, 4096, 8)):
        x = empty(tokens, width)
        call = functools.partial(
            norm_router.add_rms_norm_router_triton,
            x,
            x,
            empty(width),
            1e-6,
            empty(experts, width),
            ints(tokens),
        )
        yield f"norm_router {tokens}x{width} to {experts}", call
    yield "silu_mul 14336", lambda: silu_mul.silu_mul_triton(empty(64, 2 * 14336))
    for outputs, width in ((1024, 3072), (4096, 14336), (6144, 4096), (128256, 4096)):
        name, weight = f"{outputs}x{width}", empty(outputs, width)
        for rows in (16, 32):
            x = empty(rows, width)
            yield f"linear {rows} to {name}", functools.partial(linear_few.linear_triton, x, weight)
    for outputs, width in ((6144, 1024), (28672, 4096)):
        name, weight = f"{outputs}x{width}", empty(outputs, width)
        for rows in (16, 32):
            x = empty(rows, width)
            yield (
                f"gated_linear {rows} to {name}",
                functools.partial(linear_few.gated_linear_triton, x, weight),
            )
    tiled = linear_many.TiledConfig
    for rows, outputs, gated, config in (
        (32, 6144, False, tiled(32, 64, 64, 2, 4, 8)),
        (64, 4096, False, tiled(64, 128, 64, 4, 4, 6)),
        (256, 6144, False, tiled(128, 128, 64, 2, 8, 5)),
        (64, 28672, True, tiled(64, 128, 64, 1, 8, 4)),
        (64, 6144, True, tiled(64, 32, 128, 1, 4, 4, rows_tall=True)),
        (64, 1024, False, tiled(64, 32, 128, 4, 4, 6, rows_tall=True)),
    ):
        function = linear_many.gated_linear_many_with if gated else linear_many.linear_many_with
        call = functools.partial(function, empty(rows, 4096), empty(outputs, 4096), config=config)
        yield f"{'gated_' if gated else ''}linear_many {rows}x4096 to {outputs}", call
    yield (
        "read_rows",
        lambda: read_rows.read_rows_triton(
            ints(64),
            ints(257),
            ints(257),
            ints(257, 512),
            empty(257, dtype=torch.float32),
            ints(257),
            empty(257, dtype=torch.float32),
            empty(257, dtype=torch.float32),
            empty(257, dtype=torch.int64),
            16,
        ),
    )
    yield (
        "advance_rows",
        lambda: advance_rows.advance_rows_triton(ints(64), ints(64), ints(64), ints(257), ints(257), 256),
    )
    for dtype in (torch.bfloat16, torch.float32):
        yield (
            f"token_mask {dtype}",
            lambda dtype=dtype: token_mask.token_mask_triton(
                empty(64, 151936, dtype=dtype), ints(64), ints(40, 4748)
            ),
        )
    pool = empty(4096, 16, 8, 128)
    yield (
        "rope_store 32/8/128",
        lambda: rope_store.rope_store_triton(
            empty(64, 48 * 128), empty(8192, 128, dtype=torch.float32), ints(64), ints(64), pool, pool
        ),
    )
    for tokens in (2, 64):
        call = functools.partial(
            rope_store.rope_store_triton,
            empty(tokens, 40 * 128),
            empty(8192, 128, dtype=torch.float32),
            ints(tokens),
            ints(tokens),
            empty(4096, 16, 4, 128),
            empty(4096, 16, 4, 128),
            empty(128),
            empty(128),
        )
        yield f"rope_store normed 32/4/128, {tokens} tokens", call
    yield "decode 32/8/128 page 16", decode(32, 8, 128, 16)
    yield "decode 9/3/64 page 16 fp16", decode(9, 3, 64, 16, dtype=torch.float16)
    yield "decode 28/4/80 page 1 window softcap", decode(28, 4, 80, 1, window=1024, softcap=30.0)
    yield "decode 16/1/256 page 256", decode(16, 1, 256, 256)
    yield "decode 32/8/128 float32", decode(32, 8, 128, 16, dtype=torch.float32)
    yield "rope_decode 32/8/128", rope_decode(32, 8, 128, 64, normed=False)
    yield "rope_decode 32/4/128 normed", rope_decode(32, 4, 128, 64, normed=True)
    yield "rope_decode 32/4/128 normed, few rows", rope_decode(32, 4, 128, 2, normed=True)
    yield "rope_decode 9/3/64", rope_decode(9, 3, 64, 64, normed=False)
    yield "prefill 32/8/128 page 16", prefill(32, 8, 128, 16)
    yield "prefill 9/3/64 page 16 fp16", prefill(9, 3, 64, 16, dtype=torch.float16)
    yield "prefill 28/4/80 page 1 window softcap", prefill(28, 4, 80, 1, window=1024, softcap=30.0)
    yield "prefill 16/1/256 page 256", prefill(16, 1, 256, 256)
    yield "prefill 32/8/128 float32", prefill(32, 8, 128, 16, dtype=torch.float32)
    for tokens in (1, 64, 512, 1024, 8192):
        yield f"moe {tokens} tokens", moe(tokens)
    yield "moe odd fp16", moe(64, 60, 4, 720, 208, dtype=torch.float16)
    for tokens in (1, 5, 40):
        yield f"moe {tokens} tokens 2 experts", moe(tokens, 2, 1, 48, 16)
    yield "moe 512 tokens float32", moe(512, dtype=torch.float32)
    yield "prefill hopper 32/8/128 page 16", prefill_hopper(32, 8, 128, 16)
    one_head = paged_prefill_hopper.HopperPrefillConfig(128, 2, 1)
    yield "prefill hopper 32/8/128, a head a program", prefill_hopper(32, 8, 128, 16, config=one_head)
    yield "prefill hopper 9/3/64 page 64 fp16", prefill_hopper(9, 3, 64, 64, dtype=torch.float16)
    yield "prefill hopper 28/4/128 window softcap", prefill_hopper(28, 4, 128, 16, window=1024, softcap=30.0)
    yield "prefill hopper 16/1/256 page 256", prefill_hopper(16, 1, 256, 256)
    f32 = torch.float32
    for dtype in (bf16, f32):
        arguments = (
            empty(64, 128256, dtype=dtype),
            empty(64, dtype=f32),
            ints(64),
            empty(64, dtype=f32),
            empty(64, dtype=f32),
            empty(64, dtype=torch.int64),
            ints(64),
        )
        yield f"sample {dtype}", lambda arguments=arguments: sample.sample_triton(*arguments)


def main(wanted: list[str]) -> None:
    """Compile the cases whose names contain one of `wanted`, or all."""
    for name, launch in cases():
        if not wanted or any(word in name for word in wanted):
            triton.runtime.jit.JITFunction.run = compile_instead_of_launching(name)
            launch()


if __name__ == "__main__":
    main(sys.argv[1:])
