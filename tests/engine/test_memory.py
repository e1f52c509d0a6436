"""The memory budget adds up, and says what to change when it can't."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_config import TINY
from torch import Tensor

import minisgl.engine.step.logits
from minisgl.config import GIB, DeviceFacts, EngineConfig, ResolvedConfig, resolve_engine_config
from minisgl.engine.start.memory import (
    check_weights_fit,
    logit_extras_bytes,
    plan_memory,
)
from minisgl.engine.step.logits import LogitTables, pack_logprobs
from minisgl.errors import ConfigError
from triton_kernels.logit_rules import logit_rules_triton
from triton_kernels.token_mask import num_mask_words, token_mask_triton

MODEL = replace(
    TINY,
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position=8192,
    tie_word_embeddings=False,
    checkpoint_dtype="bfloat16",
)
GPU = DeviceFacts(has_cuda=True, cuda_name="test")
PARTS = {
    "weights_bytes": 16 * GIB,
    "activation_bytes": 2 * GIB,
    "tables_bytes": GIB // 2,
    "reserve_bytes": GIB,
}


def resolved(**fields: object) -> ResolvedConfig:
    return resolve_engine_config(EngineConfig(**fields), MODEL, GPU)  # pyright: ignore[reportArgumentType]


def test_a_page_holds_keys_and_values_of_all_layers() -> None:
    budget = plan_memory(MODEL, resolved(page_size=16), available_bytes=40 * GIB, **PARTS)
    assert budget.page_bytes == 16 * 2 * 32 * 8 * 128 * 2


@pytest.mark.parametrize("available_gib", [21, 24, 40, 80])
def test_the_parts_never_exceed_what_is_available(available_gib: int) -> None:
    budget = plan_memory(MODEL, resolved(), available_bytes=available_gib * GIB, **PARTS)
    used = sum(PARTS.values()) + budget.pool_bytes
    assert used <= available_gib * GIB
    assert available_gib * GIB - used < budget.page_bytes or budget.num_pages == 2 * 256 * 512 + 1


@pytest.mark.parametrize("available_gib", [1, 16, 19])
def test_too_little_memory_names_the_knobs(available_gib: int) -> None:
    with pytest.raises(ConfigError, match="--memory-fraction"):
        plan_memory(MODEL, resolved(), available_bytes=available_gib * GIB, **PARTS)


def test_more_pages_than_fit_are_refused_with_the_number_that_fits() -> None:
    with pytest.raises(ConfigError, match=r"but \d+ pages fit"):
        plan_memory(MODEL, resolved(num_pages=1_000_000), available_bytes=40 * GIB, **PARTS)


def test_a_pool_that_can_hold_no_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        plan_memory(MODEL, resolved(num_pages=2, page_size=1), available_bytes=40 * GIB, **PARTS)


def test_weights_that_do_not_fit_are_refused_before_anything_is_allocated() -> None:
    with pytest.raises(ConfigError, match="smaller model"):
        check_weights_fit(50 * GIB, 40 * GIB, resolved())


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"max_context_tokens": 0}, "--max-context-tokens"),
        ({"max_context_tokens": 8193}, "--max-context-tokens"),
        ({"max_running_requests": 0}, "--max-running-requests"),
        ({"max_step_tokens": 0}, "--max-step-tokens"),
        ({"max_step_tokens": 8}, "--max-step-tokens"),
        ({"chunk_tokens": 0}, "--chunk-tokens"),
        ({"mixed_step_tokens": 0}, "--mixed-step-tokens"),
        ({"page_size": 3}, "--page-size"),
        ({"page_size": 512}, "--page-size"),
        ({"num_pages": 1}, "--num-pages"),
        ({"memory_fraction": 1.0}, "--memory-fraction"),
        ({"memory_fraction": float("nan")}, "--memory-fraction"),
        ({"dtype": "float64"}, "--dtype"),
        ({"seed": 2**63}, "--seed"),
        ({"cpu_threads": 0}, "--cpu-threads"),
        ({"max_graph_batch": 300}, "--max-graph-batch"),
        ({"device": "cpu", "compile_mode": "full"}, "--compile-mode"),
        ({"attention_backend": "torch", "compile_mode": "full"}, "--compile-mode"),
        ({"device": "cpu", "attention_backend": "triton"}, "--attention-backend"),
    ],
)
def test_an_impossible_setting_is_refused_by_its_flag(fields: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        resolved(**fields)


def test_a_page_table_too_large_for_its_index_is_refused() -> None:
    model = replace(MODEL, max_position=1 << 20)
    config = EngineConfig(page_size=1, max_running_requests=4096)
    with pytest.raises(ConfigError, match="--page-size"):
        resolve_engine_config(config, model, GPU)


def peak_bytes(run: Callable[[], object]) -> int:
    """The most memory that torch's allocator handed out during `run`, on a CPU."""
    profile: Any = torch.autograd.profiler.profile(profile_memory=True)
    with profile:
        run()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    events = sorted((event.start_ns(), event.nbytes()) for event in events)
    return max(itertools.accumulate(num_bytes for _, num_bytes in events))


@pytest.mark.parametrize("num_rows", [1, 64, 150])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_steps_with_extras_take_no_more_than_is_kept_for_them(
    num_rows: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on CUDA, for which memory is kept. The rows have no rules, so that the interpreter may see bfloat16.
    monkeypatch.setattr(minisgl.engine.step.logits, "logit_rules", logit_rules_triton)
    model = replace(MODEL, vocab_size=3001)
    config = resolve_engine_config(EngineConfig(max_running_requests=num_rows, dtype=dtype), model, GPU)
    logits = torch.randn(num_rows, model.vocab_size).to(getattr(torch, dtype))
    row_ids = torch.arange(num_rows, dtype=torch.int32)
    masks = torch.zeros(1, num_mask_words(model.vocab_size), dtype=torch.int32)

    def run() -> tuple[Tensor, ...]:
        x, residual = torch.empty((2, config.max_step_tokens, model.hidden_size), dtype=logits.dtype)
        tables = LogitTables(num_rows, model.vocab_size, torch.device("cpu"))
        waiting = logits.clone()  # those that wait for masks
        ruled = tables.apply_rules(waiting, row_ids, row_ids)
        masked = token_mask_triton(ruled, row_ids - num_rows, masks)
        return x, residual, masked, pack_logprobs(waiting, row_ids)

    kept = logit_extras_bytes(model, config)
    with torch.inference_mode():
        assert kept / 4 < peak_bytes(run) <= kept
