"""Settings are checked before anything starts, and give our errors whatever is in them."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_config import TINY

from minisgl.attention.choice import OLDEST_GPU
from minisgl.commands.flags import fields_of
from minisgl.config import (
    DeviceFacts,
    EngineConfig,
    ResolvedConfig,
    ServerConfig,
    check_engine_config,
    check_server_config,
    resolve_engine_config,
)
from minisgl.errors import ConfigError
from minisgl.model_config.config import ExpertsConfig
from triton_kernels.gpu import OLDEST

MODEL = replace(TINY, max_position=512, checkpoint_dtype="bfloat16")
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 600),
    st.sampled_from([0.5, 2.5, math.nan, math.inf, -math.inf, 10**30, -1, 1 << 31, 1e300]),
    st.sampled_from(["cpu", "float32", "torch", "off", "12", "a\ud800b", ("a=b:c",), ["x"], b"cpu"]),
)


@pytest.mark.parametrize(
    "fields",
    [
        {"page_size": 3},
        {"page_size": 0},
        {"page_size": 512},
        {"dtype": "float8"},
        {"device": "tpu"},
        {"memory_fraction": math.nan},
        {"memory_fraction": 1.5},
        {"num_pages": 1},
        {"num_pages": "12"},
        {"num_pages": 12.0},
        {"num_pages": True},
        {"num_pages": 10**30},
        {"max_running_requests": 0},
        {"max_running_requests": -3},
        {"max_step_tokens": 4, "max_running_requests": 8},
        {"max_context_tokens": 1},
        {"chunk_tokens": 65, "max_step_tokens": 64},
        {"mixed_step_tokens": 65, "max_step_tokens": 64},
        {"max_graph_batch": 9, "max_running_requests": 8},
        {"output_reserve_tokens": -1},
        {"attention_backend": "flash"},
        {"attention_backend": "triton", "device": "cpu"},
        {"compile_mode": "fast"},
        {"compile_mode": "full", "device": "cpu"},
        {"cpu_threads": 0},
        {"seed": 1 << 63},
        {"overlap": "yes"},
        {"kernel": "rms_norm=a:b"},
        {"kernel": (1,)},
        {"model": None},
    ],
)
def test_what_no_engine_can_run_with_is_known_without_device_and_model(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--" + next(iter(fields)).replace("_", "-")[:8]):
        check_engine_config(EngineConfig(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"port": -1},
        {"port": 65536},
        {"port": "80"},
        {"max_body_bytes": 0},
        {"max_body_bytes": -1},
        {"max_body_bytes": 1.5},
        {"max_upload_bytes": 1000},
        {"max_queued_requests": 0},
        {"api_key": ("",)},
        {"admin_key": ("key\n",)},
        {"admin_key": (" key",)},
        {"api_key": ("a", "b"), "admin_key": ("b",)},
        {"request_timeout_s": math.nan},
        {"request_timeout_s": 0.0},
        {"request_timeout_s": math.inf},
        {"upload_timeout_s": 0},
        {"keep_alive_timeout_s": 0},
        {"drain_timeout_s": -1.0},
        {"heartbeat_timeout_s": 0.0},
        {"startup_timeout_s": -1},
        {"log_level": "loud"},
        {"sampling_defaults": "vendor"},
        {"host": None},
    ],
)
def test_what_no_server_can_run_with_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--" + next(iter(fields)).replace("_", "-")):
        check_server_config(ServerConfig(**fields))


@pytest.mark.parametrize("backend", [None, "torch"])
def test_graphs_asked_for_where_there_are_none_are_named_not_what_follows_from_them(
    backend: str | None,
) -> None:
    config = EngineConfig(max_graph_batch=4, attention_backend=backend)
    facts = DeviceFacts(has_cuda=backend is not None)
    with pytest.raises(ConfigError, match="--max-graph-batch 4 needs --device cuda"):
        resolve_engine_config(config, MODEL, facts)


def test_the_defaults_are_fine() -> None:
    check_engine_config(EngineConfig())
    check_server_config(ServerConfig())
    check_server_config(ServerConfig(drain_timeout_s=0, port=0, request_timeout_s=5))


def refusal(check: Callable[[], object]) -> str:
    """What the ConfigError says, or nothing; any other exception fails the test."""
    try:
        check()
    except ConfigError as error:
        return str(error)
    return ""


def some(cls: type) -> st.SearchStrategy[dict[str, Any]]:
    names = [field.name for field in fields_of(cls)]
    return st.dictionaries(st.sampled_from(names), VALUES, max_size=4)


@settings(max_examples=400, deadline=None)
@given(some(EngineConfig), st.booleans())
def test_any_engine_setting_resolves_or_is_our_error(values: dict[str, Any], has_cuda: bool) -> None:
    config, facts = EngineConfig(**values), DeviceFacts(has_cuda=has_cuda)
    words = refusal(lambda: resolve_engine_config(config, MODEL, facts))
    assert len(words) < 300
    if not words:
        check_engine_config(config)  # what resolves was no mistake before
        resolved = resolve_engine_config(config, MODEL, facts)
        again = EngineConfig(**{field.name: getattr(resolved, field.name) for field in fields(EngineConfig)})
        assert resolve_engine_config(again, MODEL, facts) == replace(resolved, must_compile=True)


def test_what_is_resolved_has_every_setting_and_leaves_open_only_what_may_be_off() -> None:
    hints, open_hints = get_type_hints(ResolvedConfig), get_type_hints(EngineConfig)
    assert hints.keys() == open_hints.keys() | {"must_compile", "ranks_per_host"}
    optional = {name for name, kind in hints.items() if NoneType in get_args(kind)}
    none = {
        "quantization",
        "kv_dtype",
        "revision",
        "tokenizer",
        "num_pages",
        "state_cache_memory",
        "seed",
        "compile_cache",
        "kv_events_endpoint",
        "kv_events_replay_endpoint",
        "profile_dir",
        "cpu_threads",
    }
    assert optional == none
    for name, kind in open_hints.items():
        assert hints[name] in (kind, *get_args(kind)), name


@settings(max_examples=200, deadline=None)
@given(some(ServerConfig))
def test_any_server_setting_is_fine_or_our_error(values: dict[str, Any]) -> None:
    assert len(refusal(lambda: check_server_config(ServerConfig(**values)))) < 300


@pytest.mark.parametrize(
    ("sizes", "experts", "tp", "tokens"),
    [
        ({"hidden_size": 1024, "intermediate_size": 3072, "num_heads": 16, "num_kv_heads": 8}, 0, 1, 8192),
        ({"hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32, "num_kv_heads": 8}, 0, 1, 1024),
        ({"hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32, "num_kv_heads": 8}, 0, 4, 4096),
        ({"hidden_size": 8192, "intermediate_size": 28672, "num_heads": 64, "num_kv_heads": 8}, 0, 1, 256),
        ({"hidden_size": 2048, "intermediate_size": 6144, "num_heads": 32, "num_kv_heads": 4}, 8, 1, 4096),
    ],
    ids=["qwen3-0.6b", "llama-3.1-8b", "llama-3.1-8b on four GPUs", "llama-3.1-70b", "qwen3-30b-a3b"],
)
def test_the_larger_a_model_the_shorter_the_prefills_that_are_recorded(
    sizes: dict[str, int], experts: int, tp: int, tokens: int
) -> None:
    model = replace(MODEL, head_dim=128, **sizes)
    if experts:
        mixture = ExpertsConfig(
            num_experts=128, experts_per_token=experts, intermediate_size=768, renormalize=True
        )
        model = replace(model, experts=mixture)
    facts = DeviceFacts(has_cuda=True, compute_capability=(9, 0))
    resolved = resolve_engine_config(EngineConfig(tp=tp), model, facts)
    assert resolved.max_graph_tokens == tokens
    small = resolve_engine_config(EngineConfig(tp=tp, max_step_tokens=256), model, facts)
    assert small.max_graph_tokens == 256


def test_a_gpu_that_is_too_old_for_the_kernels_is_refused() -> None:
    old = DeviceFacts(has_cuda=True, cuda_name="T4", compute_capability=(7, 5))
    with pytest.raises(ConfigError, match=r"compute 8\.0\), and this is compute 7\.5; use --device cpu"):
        resolve_engine_config(EngineConfig(), MODEL, old)
    assert resolve_engine_config(EngineConfig(device="cpu"), MODEL, old).device == "cpu"
    oldest = DeviceFacts(has_cuda=True, compute_capability=OLDEST)
    assert resolve_engine_config(EngineConfig(), MODEL, oldest).attention_backend == "triton"
    assert OLDEST == OLDEST_GPU


def test_mixed_steps_are_shorter_where_decodes_go_with_their_prompts() -> None:
    facts = DeviceFacts(has_cuda=True, compute_capability=(9, 0))

    def mixed_step_tokens(facts: DeviceFacts, **settings: Any) -> int:
        return resolve_engine_config(EngineConfig(**settings), MODEL, facts).mixed_step_tokens

    assert mixed_step_tokens(facts) == 1024
    assert mixed_step_tokens(facts, join_decodes=False) == 2048
    assert mixed_step_tokens(facts, max_graph_batch=0) == 2048
    assert mixed_step_tokens(facts, max_step_tokens=300) == 300
    assert mixed_step_tokens(facts, mixed_step_tokens=2048) == 2048
    assert mixed_step_tokens(DeviceFacts(has_cuda=False)) == 128
