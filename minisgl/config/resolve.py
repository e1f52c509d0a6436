"""Decides every "auto" of the engine's settings, once, before anything starts.

Promise: a pure function of the settings, the model and `DeviceFacts`; its result passes the same checks.
"""

import math

from minisgl.attention.choice import (
    OLDEST_FP8_GPU,
    OLDEST_GPU,
    TORCH,
    TRITON,
    AttentionEnvironment,
    Backends,
    choose,
)
from minisgl.config.engine import DeviceFacts, EngineConfig, ResolvedConfig
from minisgl.config.engine_checks import check_engine_config
from minisgl.config.field_checks import require
from minisgl.errors import ConfigError
from minisgl.model_config.config import FP8_CACHE, ModelConfig
from minisgl.model_config.kv_groups import KVShape

LAUNCH_MULTIPLICATIONS = 120e9
"""Multiply-adds of an H200 (600 TFLOP/s) in the time that launching a layer's kernels takes (0.4 ms)."""


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
    if on_cuda and (0, 0) < facts.compute_capability < OLDEST_GPU:
        major, minor = facts.compute_capability
        raise ConfigError(
            "--device cuda needs an Ampere GPU or a newer one (compute 8.0), and this is compute "
            f"{major}.{minor}; use --device cpu"
        )

    def or_auto(value: int | None, auto: int) -> int:
        return auto if value is None else value

    max_context_tokens = or_auto(config.max_context_tokens, model.max_position)
    require(
        max_context_tokens <= model.max_position,
        "max_context_tokens",
        f"between 2 and the model's {model.max_position}",
        max_context_tokens,
    )
    max_running = or_auto(config.max_running_requests, _auto_running(model, on_cuda))
    max_step_tokens = or_auto(config.max_step_tokens, max(8192 if on_cuda else 512, max_running))
    dtype = config.dtype or _auto_dtype(model, facts, on_cuda)
    if on_cuda and config.kv_dtype == FP8_CACHE and (0, 0) < facts.compute_capability < OLDEST_FP8_GPU:
        major, minor = facts.compute_capability
        raise ConfigError(
            f"--kv-dtype {FP8_CACHE} needs a GPU that converts FP8 (Ada, Hopper or newer, compute 8.9), and "
            f"this is compute {major}.{minor}; leave it away"
        )
    place = attention_environment(
        model, facts, device=device, dtype=dtype, page_size=config.page_size, kv_dtype=config.kv_dtype
    )
    attention = choose(config.attention_backend, place)
    can_record = on_cuda and attention.decode != TORCH
    max_graph_batch = or_auto(config.max_graph_batch, max_running if can_record else 0)
    can_record_prefill = max_graph_batch > 0 and attention.prefill == TRITON
    auto_graph_tokens = _auto_graph_tokens(model, config.tp, max_step_tokens) if can_record_prefill else 0
    max_graph_tokens = or_auto(config.max_graph_tokens, auto_graph_tokens)
    can_join = max_graph_batch > 0 and max_graph_tokens > 0 and max_running > 1 and {*attention} == {TRITON}
    join_decodes = config.join_decodes and can_join
    _check_states(config, model)
    mixed_tokens = auto_mixed_tokens(join_decodes) if on_cuda else 128
    compile_mode = config.compile_mode or ("layers" if can_record and max_graph_batch else "off")
    resolved = ResolvedConfig(
        model=config.model,
        revision=config.revision,
        tokenizer=config.tokenizer,
        dummy_weights=config.dummy_weights,
        quantization=config.quantization,
        device=device,
        dtype=dtype,
        kv_dtype=config.kv_dtype,
        max_context_tokens=max_context_tokens,
        max_running_requests=max_running,
        max_step_tokens=max_step_tokens,
        chunk_tokens=or_auto(config.chunk_tokens, max_step_tokens),
        mixed_step_tokens=or_auto(config.mixed_step_tokens, min(max_step_tokens, mixed_tokens)),
        page_size=config.page_size,
        num_pages=config.num_pages,
        keep_window_pages=must_keep_windows(config, attention),
        state_cache_memory=config.state_cache_memory,
        join_decodes=join_decodes,
        output_reserve_tokens=config.output_reserve_tokens,
        memory_fraction=config.memory_fraction,
        prefix_cache=config.prefix_cache,
        overlap=config.overlap if config.overlap is not None else on_cuda,
        compile_mode=compile_mode,
        compile_on_cpu=config.compile_on_cpu,
        max_graph_batch=max_graph_batch,
        max_graph_tokens=max_graph_tokens,
        attention_backend=str(attention),
        seed=config.seed,
        strict_compile=config.strict_compile,
        compile_cache=config.compile_cache,
        kv_events_endpoint=config.kv_events_endpoint,
        kv_events_replay_endpoint=config.kv_events_replay_endpoint,
        kv_events_topic=config.kv_events_topic,
        kv_events_buffer_steps=config.kv_events_buffer_steps,
        profile_dir=config.profile_dir,
        tp=config.tp,
        cpu_threads=config.cpu_threads,
        kernel=config.kernel,
        must_compile=config.strict_compile or config.compile_mode is not None,
        ranks_per_host=config.tp,
    )
    check_engine_config(resolved)  # again, because now every value is decided
    return resolved


def attention_environment(
    model: ModelConfig,
    facts: DeviceFacts,
    *,
    device: str,
    dtype: str,
    page_size: int,
    kv_dtype: str | None = None,
) -> AttentionEnvironment:
    """The facts that decide which attention backends can run."""
    shapes = {shape for shape in model.cache_shapes if isinstance(shape, KVShape)}
    shapes = shapes or {KVShape(model.num_kv_heads, model.head_dim)}
    heads = (model.num_heads, min(kv for kv, _ in shapes), max(size for _, size in shapes))
    return AttentionEnvironment(
        device,
        facts.compute_capability,
        facts.flashinfer,
        dtype,
        *heads,
        page_size,
        has_softcap=model.attention_softcap is not None,
        has_sinks=model.attention_sinks,
        has_two_sizes=len(shapes) > 1,
        has_fp8_cache=kv_dtype == FP8_CACHE,
    )


def must_keep_windows(config: EngineConfig, attention: Backends) -> bool:
    """Whether layers with a window keep all pages: other backends and page events know one page table."""
    return config.keep_window_pages or bool(config.kv_events_endpoint) or not {*attention} <= {TRITON, TORCH}


def auto_mixed_tokens(join_decodes: bool) -> int:
    """The "auto" of `mixed_step_tokens` on cuda. Decodes that do not join their step's prompts read the
    weights a second time in each such step, so fewer and larger steps are better."""
    return 1024 if join_decodes else 2048


def _check_states(config: EngineConfig, model: ModelConfig) -> None:
    """Refuse what does not go with the states of linear attention, or is only for them.

    Raises:
        ConfigError: names the setting.
    """
    if model.has_states and config.kv_events_endpoint is not None:
        raise ConfigError(
            f"--kv-events-endpoint can't tell what a prompt finds in the cache of {model.architecture}: hits "
            "need snapshots of its linear attention; leave it out"
        )
    if config.state_cache_memory is not None and not model.has_states:
        raise ConfigError(
            f"--state-cache-memory is for models with linear attention, and {model.architecture} has none; "
            "leave it out"
        )


def _auto_running(model: ModelConfig, on_cuda: bool) -> int:
    """The "auto" of `max_running_requests`. States of linear attention take 60 to 150 MB a request."""
    if not on_cuda:
        return 32
    return 64 if model.has_states else 256


def _auto_graph_tokens(model: ModelConfig, tp: int, max_step_tokens: int) -> int:
    """Prompt tokens up to which a prefill graph may pay off; measuring at start-up decides below that."""
    tokens = LAUNCH_MULTIPLICATIONS * tp / model.layer_weights_per_token
    return min(max_step_tokens, 1 << math.ceil(math.log2(max(tokens, 1))))


def _auto_dtype(model: ModelConfig, facts: DeviceFacts, on_cuda: bool) -> str:
    if on_cuda:
        return model.checkpoint_dtype
    return "bfloat16" if facts.cpu_has_bf16 and model.checkpoint_dtype == "bfloat16" else "float32"
