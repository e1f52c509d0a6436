"""Every setting, resolved once: how the engine runs a model, how the server offers it.

Promise: the dataclasses are frozen, and what runs an engine reads a `ResolvedConfig`, in which nothing is
left to be decided; flags of the command line are generated from the fields and their docstrings
(`minisgl/cli.py`).
"""

import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from minisgl.attention_choice import TORCH, TRITON, Place, choose, parse
from minisgl.errors import ConfigError
from minisgl.log import LEVELS
from minisgl.model_config import DTYPE_BYTES, ModelConfig

MIB = 1 << 20
GIB = 1 << 30
LAUNCH_MULTIPLICATIONS = 120e9
"""Multiply-adds of an H200 (600 TFLOP/s) in the time that launching a layer's kernels takes (0.4 ms)."""
LARGEST = (1 << 31) - 1
"""Bound of counts that have no smaller one of their own."""
SHORTEST_S = 0.01
LONGEST_S = 1e8
SECONDS = f"a number of seconds up to {LONGEST_S:.0f}"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one engine runs. `None` means "auto", which `resolve_engine_config` decides."""

    model: str = "smollm2-135m"
    """What to serve: a built-in name (`minisgl pull --list`), a local folder, a GGUF file, or a hub name:
    org/name on the Hugging Face hub, modelscope:org/name on ModelScope."""
    revision: str | None = None
    """Branch, tag or commit of a hub name. Auto: the main branch."""
    tokenizer: str | None = None
    """A folder or hub name whose tokenizer and chat template take the place of the model's own, as a GGUF
    file may need it. Auto: the model's."""
    dummy_weights: bool = False
    """Random weights N(0, 0.02) instead of the checkpoint's: for benchmarks; needs only config.json."""
    device: str | None = None
    """Either "cuda" or "cpu". Auto: cuda where there is one."""
    dtype: str | None = None
    """One of "bfloat16", "float16", "float32". Auto: the checkpoint's on cuda; on cpu bfloat16 where the
    processor has instructions for it (a token in half the time), else float32."""
    max_context_tokens: int | None = None
    """Longest prompt + output of a request, in tokens. Auto: the model's own limit."""
    max_running_requests: int | None = None
    """Requests that decode together (rows of the device tables). Auto: 256 on cuda, 32 on cpu."""
    max_step_tokens: int | None = None
    """New tokens fed in one step, prompt chunks and decodes together. Auto: 8192 on cuda, 512 on cpu."""
    chunk_tokens: int | None = None
    """Longest part of one prompt fed in one step. Auto: max_step_tokens. Shorter = smoother decoding."""
    mixed_step_tokens: int | None = None
    """New tokens fed in a step that also decodes a request whose tokens are read as they come: bounds the
    pause between two of them. Prompts get what the decodes leave, half of it at least. All requests of a
    server are such, and LLM.stream's; the others' (LLM.generate, chat) let prompts fill the step. Auto: on
    cuda 1024, or 2048 without join_decodes, where each such step reads the weights twice; 128 on cpu (at most
    max_step_tokens)."""
    page_size: int = 16
    """Tokens per KV page, a power of two from 1 to 256."""
    num_pages: int | None = None
    """KV pages in the pool. Auto: what fits in memory_fraction of the device's memory."""
    join_decodes: bool = True
    """Decodes go through the model with their step's prompts where the times measured at the start say that
    this is faster than one after the other. Only where both have CUDA graphs, with the attention backend
    triton."""
    output_reserve_tokens: int = 64
    """Room that admitting a request leaves for the output of each running one, in tokens. When outputs
    are longer and the pool is full, the youngest request is preempted and computed again later."""
    memory_fraction: float = 0.9
    """Share of the device's free memory the engine may take, 0.1 to 0.98. On cpu an auto-sized pool
    stays under 1 GiB."""
    prefix_cache: bool = True
    """Keep the K/V of finished requests in a radix tree and reuse them for equal prefixes."""
    overlap: bool | None = None
    """Plan and launch step k+1 before the result of step k is read. Auto: on cuda (a CPU has nothing to
    overlap with)."""
    compile_mode: str | None = None
    """What torch.compile gets of the decode step: "layers" (one block, shared by all), "full" (the whole
    step, mode="reduce-overhead"; starts far slower) or "off". Auto: layers on cuda; where compiling fails,
    auto goes on without it and says so."""
    max_graph_batch: int | None = None
    """Largest decode batch with a recorded CUDA graph; larger ones run uncaptured; 0 = no graphs. Auto:
    max_running_requests on cuda, unless torch is decode's attention backend, else 0."""
    max_graph_tokens: int | None = None
    """Most prompt tokens of a step with a recorded CUDA graph; more run uncaptured, and so do steps that take
    the GPU far longer than their launch takes the host. 0 = no such graphs. Auto: as many as may be worth it
    by the model's size, at most max_step_tokens (8192 for Qwen3-0.6B, 1024 for Llama-3.1-8B), where decode
    has graphs, else 0."""
    attention_backend: str | None = None
    """One of "triton", "flashinfer" (fa3 for prompts on Hopper GPUs, else fa2), "flashinfer-fa2",
    "flashinfer-fa3", "trtllm" (Blackwell GPUs) and "torch" (the plain reference, and what a CPU runs), or two
    as prefill,decode: "triton,flashinfer". Auto: triton on cuda, or the next of these where it can't run;
    torch on cpu."""
    seed: int = 0
    """Seeds the requests that bring none of their own, and the dummy weights."""
    strict_compile: bool = False
    """Make a recompilation or a missing graph after warm-up an error instead of a counter."""
    compile_cache: str | None = None
    """Folder that keeps compiled code between starts on cuda. Auto: "compiled" in the cache directory; an
    empty text leaves it to torch and Triton, as do their TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR,
    and as does --kernel."""
    profile_dir: str | None = None
    """Folder for the traces of torch's profiler that POST /debug/profile asks for. Auto: none are made."""
    tp: int = 1
    """Ranks that share each layer of the model (tensor parallelism), each a process: a GPU each on cuda, a
    share of the threads on cpu. It has to divide the model's attention heads and MLP width."""
    nnodes: int = 1
    """Hosts that share the ranks of --tp evenly. On each run 'minisgl serve' with the same flags but
    --node-rank; the server is on node 0."""
    node_rank: int = 0
    """This host's number, 0 to nnodes - 1."""
    rdzv: str | None = None
    """Where the hosts meet, as host:port: an address of node 0, and a port that is free there. Needed with
    more than one host; whoever reaches it can join, so the network has to be trusted."""
    cpu_threads: int | None = None
    """Threads of torch on cpu, of each rank. Auto: torch's own choice (the physical cores), shared out."""
    kernel: tuple[str, ...] = ()
    """Replace an op for an experiment: op=module:function, for example rms_norm=my_module:my_norm; the
    module may lie in the current directory (docs/kernels.md)."""


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """An `EngineConfig`, which says what the fields mean, with every "auto" decided: a `None` means none."""

    model: str
    revision: str | None
    tokenizer: str | None
    dummy_weights: bool
    device: str
    dtype: str
    max_context_tokens: int
    max_running_requests: int
    max_step_tokens: int
    chunk_tokens: int
    mixed_step_tokens: int
    page_size: int
    num_pages: int | None
    """None = what fits, which takes a memory profile."""
    join_decodes: bool
    output_reserve_tokens: int
    memory_fraction: float
    prefix_cache: bool
    overlap: bool
    compile_mode: str
    max_graph_batch: int
    max_graph_tokens: int
    attention_backend: str
    seed: int
    strict_compile: bool
    compile_cache: str | None
    profile_dir: str | None
    tp: int
    nnodes: int
    node_rank: int
    rdzv: str | None
    cpu_threads: int | None
    kernel: tuple[str, ...]
    must_compile: bool
    """What can't be compiled ends the start: compiling was asked for, not chosen here."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each host."""
        return self.tp // self.nnodes


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the HTTP server behaves."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all interfaces."""
    port: int = 8000
    """TCP port; 0 picks a free one and prints it."""
    served_model_name: str | None = None
    """Name clients must send as `model`. Auto: the value of --model; a folder's last part."""
    sampling_defaults: str = "model"
    """What holds where a request leaves temperature, top_p, top_k, min_p or repetition_penalty out: "model"
    (its generation_config.json) or "openai" (temperature 1 and nothing else)."""
    max_queued_requests: int = 1024
    """Open requests beyond which new ones get 429."""
    max_queued_tokens: int | None = None
    """Prompt tokens of requests that have no token yet, beyond which new ones get 429. Auto: any number."""
    max_body_bytes: int = 16 * MIB
    """Largest request body; larger gets 413."""
    max_upload_bytes: int = 256 * MIB
    """Bodies that are being read and tokenized, all together, in bytes; beyond it new ones get 429."""
    upload_timeout_s: float = 60.0
    """A body that has not arrived after this long gets 408."""
    request_timeout_s: float = 600.0
    """A request that has not ended after this long is aborted and gets an error."""
    drain_timeout_s: float = 30.0
    """After SIGTERM: how long open requests may go on before they are cut off."""
    heartbeat_timeout_s: float = 30.0
    """The engine counts as dead, and the server ends, when it neither steps nor answers for this long."""
    startup_timeout_s: float = 1800.0
    """The engine must be ready after this long (a first compilation of a large model takes minutes)."""
    api_key: tuple[str, ...] = ()
    """Clients must send this as "Authorization: Bearer KEY"; without any, none is needed. As
    MINISGL_API_KEY it stays out of the list of processes."""
    cors_origin: tuple[str, ...] = ()
    """Web pages from this origin may call, as https://example.org; "*" for all."""
    tls_cert: str | None = None
    """File with the certificate chain (PEM), for HTTPS; needs --tls-key."""
    tls_key: str | None = None
    """File with the certificate's private key (PEM)."""
    access_log: bool = False
    """Write a line of JSON to stderr for every HTTP call."""
    api_workers: int = 1
    """Server processes that share the port, 1 to 64: more of them tokenize and stream more. The limits on
    open requests and queued tokens are split among them."""
    log_level: str = "info"
    """One of "debug", "info", "warning", "error"; prompts are never logged above debug."""


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What the engine's machine offers; found by the engine, so that resolving stays a pure function."""

    has_cuda: bool
    cuda_name: str = ""
    num_gpus: int = 0
    compute_capability: tuple[int, int] = (0, 0)
    """Of the GPU, as (9, 0); (0, 0) = there is none, or it is not known."""
    flashinfer: str = ""
    """Version of the installed flashinfer-python; empty = there is none."""
    cpu_has_bf16: bool = False
    """The processor multiplies bfloat16 (AVX512-BF16 or AMX)."""


def with_cache_dir(config: EngineConfig, cache_dir: Path) -> EngineConfig:
    """The same config with an "auto" compile cache put into minisgl's cache directory."""
    if config.compile_cache is not None:
        return config
    return replace(config, compile_cache=str(cache_dir / "compiled"))


def resolve_engine_config(config: EngineConfig, model: ModelConfig, facts: DeviceFacts) -> ResolvedConfig:
    """Decide every "auto" but `num_pages`, which needs a memory profile.

    Raises:
        ConfigError: a value is out of range, or two of them contradict.
    """
    check_engine_config(config)
    device = config.device or ("cuda" if facts.has_cuda else "cpu")
    if device == "cuda" and not facts.has_cuda:
        raise ConfigError(
            "--device cuda needs a CUDA GPU and torch sees none; use --device cpu, or see 'minisgl doctor'"
        )
    on_cuda = device == "cuda"

    def given(value: int | None, auto: int) -> int:
        return auto if value is None else value

    max_context_tokens = given(config.max_context_tokens, model.max_position)
    _check(
        max_context_tokens <= model.max_position,
        "max_context_tokens",
        f"between 2 and the model's {model.max_position}",
        max_context_tokens,
    )
    max_running = given(config.max_running_requests, 256 if on_cuda else 32)
    max_step_tokens = given(config.max_step_tokens, max(8192 if on_cuda else 512, max_running))
    dtype = config.dtype or _auto_dtype(model, facts, on_cuda)
    place = attention_place(model, facts, device=device, dtype=dtype, page_size=config.page_size)
    attention = choose(config.attention_backend, place)
    can_record = on_cuda and attention.decode != TORCH
    max_graph_batch = given(config.max_graph_batch, max_running if can_record else 0)
    can_record_prefill = max_graph_batch > 0 and attention.prefill == TRITON
    auto_graph_tokens = _auto_graph_tokens(model, config.tp, max_step_tokens) if can_record_prefill else 0
    max_graph_tokens = given(config.max_graph_tokens, auto_graph_tokens)
    can_join = max_graph_batch > 0 and max_graph_tokens > 0 and max_running > 1 and {*attention} == {TRITON}
    join_decodes = config.join_decodes and can_join
    mixed_tokens = auto_mixed_tokens(join_decodes) if on_cuda else 128
    compile_mode = config.compile_mode or ("layers" if can_record and max_graph_batch else "off")
    resolved = ResolvedConfig(
        model=config.model,
        revision=config.revision,
        tokenizer=config.tokenizer,
        dummy_weights=config.dummy_weights,
        device=device,
        dtype=dtype,
        max_context_tokens=max_context_tokens,
        max_running_requests=max_running,
        max_step_tokens=max_step_tokens,
        chunk_tokens=given(config.chunk_tokens, max_step_tokens),
        mixed_step_tokens=given(config.mixed_step_tokens, min(max_step_tokens, mixed_tokens)),
        page_size=config.page_size,
        num_pages=config.num_pages,
        join_decodes=join_decodes,
        output_reserve_tokens=config.output_reserve_tokens,
        memory_fraction=config.memory_fraction,
        prefix_cache=config.prefix_cache,
        overlap=config.overlap if config.overlap is not None else on_cuda,
        compile_mode=compile_mode,
        max_graph_batch=max_graph_batch,
        max_graph_tokens=max_graph_tokens,
        attention_backend=str(attention),
        seed=config.seed,
        strict_compile=config.strict_compile,
        compile_cache=config.compile_cache,
        profile_dir=config.profile_dir,
        tp=config.tp,
        nnodes=config.nnodes,
        node_rank=config.node_rank,
        rdzv=config.rdzv,
        cpu_threads=config.cpu_threads,
        kernel=config.kernel,
        must_compile=config.strict_compile or config.compile_mode is not None,
    )
    check_engine_config(resolved)  # once more: now every relation between two values is there to be checked
    return resolved


def attention_place(
    model: ModelConfig, facts: DeviceFacts, *, device: str, dtype: str, page_size: int
) -> Place:
    """What attention backends are chosen by."""
    heads = (model.num_heads, model.num_kv_heads, model.head_dim)
    return Place(device, facts.compute_capability, facts.flashinfer, dtype, *heads, page_size)


def check_engine_config(config: EngineConfig | ResolvedConfig) -> None:
    """What can be known without a device and a model; values that are still "auto" contradict nothing.

    Raises:
        ConfigError: a value has the wrong type or is out of range, or two of them contradict.
    """
    _check_types(config)

    def check_range(flag: str, low: int, high: int = LARGEST, what: str = "") -> None:
        value = getattr(config, flag)
        needed = f"between {low} and {what or high}" if high < LARGEST else f"at least {low}"
        _check(value is None or low <= value <= high, flag, needed, value)

    def check_choice(flag: str, *choices: str) -> None:
        value = getattr(config, flag)
        _check(value is None or value in choices, flag, "one of " + ", ".join(choices), value)

    check_choice("device", "cuda", "cpu")
    check_choice("dtype", *DTYPE_BYTES)
    check_choice("compile_mode", "layers", "full", "off")
    check_range("max_context_tokens", 2)
    check_range("max_running_requests", 1, 4096)
    running, step = config.max_running_requests, config.max_step_tokens
    _check(
        step is None or (running or 1) <= step <= 1 << 20,
        "max_step_tokens",
        f"at least max_running_requests ({running or 1}) and at most {1 << 20}",
        step,
    )
    for flag in ("chunk_tokens", "mixed_step_tokens"):
        check_range(flag, 1, step or 1 << 20, f"max_step_tokens ({step or 1 << 20})")
    page = config.page_size
    _check(
        1 <= page <= 256 and page & (page - 1) == 0,
        "page_size",
        "a power of two from 1 to 256 (16 suits most models)",
        page,
    )
    if running is not None and config.max_context_tokens is not None:
        pages_per_row = -(-config.max_context_tokens // page)
        if (running + 1) * pages_per_row >= 1 << 31:
            raise ConfigError(
                f"{running} requests of {pages_per_row} pages are more than a page table can hold; "
                "raise --page-size, or lower --max-context-tokens or --max-running-requests"
            )
    check_range("num_pages", 2)
    check_range("output_reserve_tokens", 0)
    _check(
        0.1 <= config.memory_fraction <= 0.98,
        "memory_fraction",
        "between 0.1 and 0.98",
        config.memory_fraction,
    )
    _check_attention(config)
    if config.max_graph_batch == 0 and config.compile_mode in ("layers", "full"):
        raise ConfigError(
            f"--compile-mode {config.compile_mode} compiles what goes into graphs, and --max-graph-batch 0 "
            "asks for none; use --compile-mode off"
        )
    check_range("max_graph_batch", 0, running or 4096, f"max_running_requests ({running or 4096})")
    check_range("max_graph_tokens", 0, step or 1 << 20, f"max_step_tokens ({step or 1 << 20})")
    check_range("tp", 1, 64)
    _check_nodes(config)
    check_range("cpu_threads", 1, 1024)
    _check(-(1 << 63) <= config.seed < 1 << 63, "seed", "a signed 64-bit integer", config.seed)


def _check_attention(config: EngineConfig | ResolvedConfig) -> None:
    """Whether backends, graphs and compilation go together, as far as they are decided."""
    attention = parse(config.attention_backend) if config.attention_backend is not None else None
    if config.device == "cpu" and attention is not None and set(attention) != {TORCH}:
        raise ConfigError(
            f"--attention-backend {config.attention_backend} needs --device cuda; "
            "use --attention-backend torch"
        )
    compiles = config.compile_mode in ("layers", "full")
    if config.device == "cpu" or (attention is not None and attention.decode == TORCH):
        why = "needs --device cuda and a kernel for decode (the torch backend looks at tensor values)"
        if compiles:
            raise ConfigError(f"--compile-mode {config.compile_mode} {why}; use --compile-mode off")
        for flag in ("max_graph_batch", "max_graph_tokens"):
            name, value = f"--{flag.replace('_', '-')}", getattr(config, flag)
            if value:
                raise ConfigError(f"{name} {value} {why}; use {name} 0")
    if attention is None:
        return
    if config.compile_mode == "full" and attention.decode != TRITON:
        raise ConfigError(
            f"--compile-mode full takes --attention-backend triton for decode, got {attention.decode}; "
            "use --compile-mode layers"
        )
    for spec in config.kernel:
        op = spec.partition("=")[0].replace("_", "").replace("-", "").lower()
        if op in ("pageddecode", "pagedprefill") and not set(attention) <= {TRITON, TORCH}:
            raise ConfigError(
                f"--kernel {spec} replaces a kernel of --attention-backend triton, got "
                f"{config.attention_backend}; leave one of them out"
            )
    if config.max_graph_tokens and attention.prefill != TRITON:
        raise ConfigError(
            f"--max-graph-tokens {config.max_graph_tokens} takes --attention-backend triton for prefill, got "
            f"{attention.prefill}: only its prompts can be recorded; use --max-graph-tokens 0"
        )


def _check_nodes(config: EngineConfig | ResolvedConfig) -> None:
    tp, nnodes = config.tp, config.nnodes
    _check(1 <= nnodes <= tp and tp % nnodes == 0, "nnodes", f"a divisor of tp ({tp})", nnodes)
    _check(
        0 <= config.node_rank < nnodes,
        "node_rank",
        f"between 0 and nnodes - 1 ({nnodes - 1})",
        config.node_rank,
    )
    if config.rdzv is not None:
        split_rdzv(config.rdzv)
    elif nnodes > 1:
        raise ConfigError("--nnodes needs --rdzv host:port, an address of node 0 that all hosts reach")


def split_rdzv(rdzv: str) -> tuple[str, int]:
    """Host and port of a meeting place; an IPv6 address is in brackets.

    Raises:
        ConfigError: it is none.
    """
    host, _, port = rdzv.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) <= 65535:
        raise ConfigError(f"--rdzv must be host:port, for example 10.0.0.1:29500, got {rdzv!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_server_config(config: ServerConfig) -> None:
    """Refuse what no server can run with.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """
    _check_types(config)
    _check(0 <= config.port <= 65535, "port", "between 0 and 65535", config.port)
    _check(1 <= config.api_workers <= 64, "api_workers", "between 1 and 64", config.api_workers)
    queued = config.max_queued_tokens
    _check(queued is None or 1 <= queued <= LARGEST, "max_queued_tokens", f"between 1 and {LARGEST}", queued)
    for key in config.api_key:
        if not key or not key.isascii() or not key.isprintable() or key != key.strip():
            raise ConfigError("--api-key must be visible ASCII characters without spaces around them")
    for origin in config.cors_origin:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise ConfigError(
                f'--cors-origin must be as https://example.org, without a path, or "*"; got {origin!r}'
            )
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together; give both or none")
    for flag in ("max_queued_requests", "max_body_bytes", "max_upload_bytes"):
        value = getattr(config, flag)
        _check(1 <= value <= LARGEST, flag, f"between 1 and {LARGEST}", value)
    _check(
        config.max_upload_bytes >= config.max_body_bytes,
        "max_upload_bytes",
        f"at least max_body_bytes ({config.max_body_bytes})",
        config.max_upload_bytes,
    )
    _check(0 <= config.drain_timeout_s <= LONGEST_S, "drain_timeout_s", SECONDS, config.drain_timeout_s)
    for flag in ("request_timeout_s", "upload_timeout_s", "heartbeat_timeout_s", "startup_timeout_s"):
        value = getattr(config, flag)
        _check(SHORTEST_S <= value <= LONGEST_S, flag, f"{SECONDS}, at least {SHORTEST_S}", value)
    _check(
        config.sampling_defaults in ("model", "openai"),
        "sampling_defaults",
        "one of model, openai",
        repr(config.sampling_defaults),
    )
    _check(config.log_level in LEVELS, "log_level", "one of " + ", ".join(LEVELS), repr(config.log_level))


def _check(ok: bool, flag: str, needed: str, got: object) -> None:
    if not ok:
        text = str(got)
        text = text if len(text) <= 60 else text[:57] + "..."
        raise ConfigError(f"--{flag.replace('_', '-')} must be {needed}, got {text}")


def _check_types(config: EngineConfig | ResolvedConfig | ServerConfig) -> None:
    """From Python anything may come; flags and JSON give the right types already."""
    hints = get_type_hints(type(config))
    for field in fields(config):
        value = getattr(config, field.name)
        kinds = (
            get_args(hints[field.name]) if isinstance(hints[field.name], UnionType) else (hints[field.name],)
        )
        if not any(_is_kind(value, kind) for kind in kinds):
            _check(False, field.name, KIND_NAMES[kinds[0]], repr(value))


KIND_NAMES = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    tuple[str, ...]: "a tuple of texts",
}


def _is_kind(value: object, kind: Any) -> bool:
    if kind == tuple[str, ...]:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if kind is float:
        kind = int | float
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def auto_mixed_tokens(join_decodes: bool) -> int:
    """`mixed_step_tokens` on cuda where nobody says it: decodes that do not go with their step's prompts read
    the weights again, in each of these steps."""
    return 1024 if join_decodes else 2048


def _auto_graph_tokens(model: ModelConfig, tp: int, max_step_tokens: int) -> int:
    """Where recording prefills can stop: what is not worth it below is found out by measuring."""
    tokens = LAUNCH_MULTIPLICATIONS * tp / model.layer_weights_per_token
    return min(max_step_tokens, 1 << math.ceil(math.log2(max(tokens, 1))))


def _auto_dtype(model: ModelConfig, facts: DeviceFacts, on_cuda: bool) -> str:
    if on_cuda:
        return model.checkpoint_dtype
    return "bfloat16" if facts.cpu_has_bf16 and model.checkpoint_dtype == "bfloat16" else "float32"
