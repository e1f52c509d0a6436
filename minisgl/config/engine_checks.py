"""Checks the engine's settings: each value's range, and which values contradict each other."""

import re

from minisgl.attention.choice import TORCH, TRITON, parse
from minisgl.config.engine import EngineConfig, ResolvedConfig
from minisgl.config.field_checks import LARGEST, check_types, require
from minisgl.errors import ConfigError
from minisgl.model_config.config import DTYPE_BYTES, FP8_CACHE
from minisgl.model_config.hf_folder.quantization_formats import QUANTIZED_WHILE_LOADING


def check_engine_config(config: EngineConfig | ResolvedConfig) -> None:
    """Refuse values that are wrong for every device and model; a value that is still "auto" passes.

    Raises:
        ConfigError: a value has the wrong type or is out of range, or two of them contradict.
    """
    check_types(config)

    def check_range(flag: str, low: int, high: int = LARGEST, what: str = "") -> None:
        value = getattr(config, flag)
        needed = f"between {low} and {what or high}" if high < LARGEST else f"at least {low}"
        require(value is None or low <= value <= high, flag, needed, value)

    def check_choice(flag: str, *choices: str) -> None:
        value = getattr(config, flag)
        require(value is None or value in choices, flag, "one of " + ", ".join(choices), value)

    check_choice("device", "cuda", "cpu")
    check_choice("dtype", *DTYPE_BYTES)
    check_choice("kv_dtype", FP8_CACHE)
    check_choice("quantization", *QUANTIZED_WHILE_LOADING)
    check_choice("compile_mode", "layers", "full", "off")
    check_range("max_context_tokens", 2)
    check_range("max_running_requests", 1, 4096)
    running, step = config.max_running_requests, config.max_step_tokens
    require(
        step is None or (running or 1) <= step <= 1 << 20,
        "max_step_tokens",
        f"at least max_running_requests ({running or 1}) and at most {1 << 20}",
        step,
    )
    for flag in ("chunk_tokens", "mixed_step_tokens"):
        check_range(flag, 1, step or 1 << 20, f"max_step_tokens ({step or 1 << 20})")
    page = config.page_size
    require(
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
    require(
        0.1 <= config.memory_fraction <= 0.98,
        "memory_fraction",
        "between 0.1 and 0.98",
        config.memory_fraction,
    )
    snapshots = config.state_cache_memory
    require(snapshots is None or snapshots >= 0, "state_cache_memory", "0 or more, in GiB", snapshots)
    _check_attention(config)
    if config.max_graph_batch == 0 and config.compile_mode in ("layers", "full"):
        raise ConfigError(
            f"--compile-mode {config.compile_mode} compiles what goes into graphs, and --max-graph-batch 0 "
            "asks for none; use --compile-mode off"
        )
    check_range("max_graph_batch", 0, running or 4096, f"max_running_requests ({running or 4096})")
    check_range("max_graph_tokens", 0, step or 1 << 20, f"max_step_tokens ({step or 1 << 20})")
    check_range("kv_events_buffer_steps", 1, 1 << 20)
    _check_page_events(config)
    check_range("tp", 1, 64)
    check_range("cpu_threads", 1, 1024)
    seed = config.seed
    require(seed is None or -(1 << 63) <= seed < 1 << 63, "seed", "a signed 64-bit integer", seed)


def _check_attention(config: EngineConfig | ResolvedConfig) -> None:
    """Check that attention backend, graphs and compilation go together, as far as they are decided."""
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


def _check_page_events(config: EngineConfig | ResolvedConfig) -> None:
    for flag in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        address = getattr(config, flag)
        usable = address is None or re.fullmatch(r"tcp://[^\s;]+:(\*|\d{1,5})|ipc://[^\0]+", address)
        require(bool(usable), flag, "tcp://*:5557, tcp://host:5557 or ipc://path", address)
    if config.kv_events_endpoint is None:
        if config.kv_events_replay_endpoint is not None:
            raise ConfigError("--kv-events-replay-endpoint needs --kv-events-endpoint; give both")
    elif not config.prefix_cache:
        raise ConfigError("--kv-events-endpoint needs the prefix cache; leave --no-prefix-cache out")
