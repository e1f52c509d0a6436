"""Steps on padding: which blocks they run, and what they leave as it was."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from test_prefill_graphs import CONFIG as DENSE
from torch import Tensor, nn

import minisgl.engine.step.logits
from minisgl.attention.backends import select
from minisgl.attention.interface import Backend
from minisgl.attention.triton import MOST_UNPACKED_KEYS
from minisgl.config import DeviceFacts, EngineConfig, resolve_engine_config
from minisgl.engine.graphs import dry_runs
from minisgl.engine.graphs.dry_runs import (
    DryPrefill,
    Peaks,
    compile_ahead,
    largest_prefills,
    measure_peaks,
    padding_batch,
    run_distinct_blocks,
    unpacking_prefills,
    warm_up_prefill,
    warm_up_sizes,
)
from minisgl.engine.step import sample_extras
from minisgl.engine.step.attention_planner import AttentionPlanner
from minisgl.engine.step.inputs import HostPageTable
from minisgl.engine.step.logits import LogitTables
from minisgl.engine.step.rows import Rows
from minisgl.engine.step.sample_extras import RowMasks, sample_with_extras
from minisgl.engine.step.steps import DecodeStep, StepOutput, prefill_step
from minisgl.model_config.config import ExpertsConfig, ModelConfig
from minisgl.model_config.kv_groups import KVShape, StateShape
from minisgl.models.decoder import Decoder
from minisgl.models.registry import BUILDERS, build_model
from minisgl.scheduler.plan import LogitExtras
from triton_kernels.launch import align_up
from triton_kernels.logit_rules import RuleTables
from triton_kernels.token_mask import num_mask_words

CPU = torch.device("cpu")
PAGE_SIZE = 4
PAGES_PER_ROW = 16
CONFIG = replace(
    DENSE,
    architecture="Qwen3MoeForCausalLM",
    num_layers=6,
    windows=(3, 3, 0, 3, 0, 0),
    experts=ExpertsConfig(
        num_experts=4,
        experts_per_token=2,
        intermediate_size=16,
        renormalize=True,
        dense_layers=frozenset({0, 1, 2}),
    ),
)


def small_model(config: ModelConfig = CONFIG) -> Decoder:
    model = build_model(config, attention_backend="torch", dtype=torch.float32, device="cpu")
    model.allocate_kv(8, PAGE_SIZE, torch.float32, "cpu")
    return model.requires_grad_(False)


def test_one_block_runs_of_each_window_and_mlp_and_the_last() -> None:
    model = small_model()
    ran: list[int] = []

    def note(index: int, block: nn.Module) -> None:
        block.register_forward_pre_hook(lambda *_: ran.append(index))

    for index, block in enumerate(model.layers):
        note(index, block)
    rows, _ = tables()
    with torch.inference_mode():
        prefill_step(model, rows, padding_batch(DryPrefill(2, 3, 4), rows, CPU), run_distinct_blocks(model))
    assert ran == [0, 2, 3, 4, 5]


@pytest.mark.parametrize("architecture", BUILDERS)
def test_what_runs_to_measure_memory_and_to_compile_writes_nothing_but_padding(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = CONFIG.experts if architecture in ("MixtralForCausalLM", "Qwen3MoeForCausalLM") else None
    attention = KVShape(CONFIG.num_kv_heads, CONFIG.head_dim)
    shapes: tuple[KVShape | StateShape, ...] = ()
    if architecture == "Gemma4ForCausalLM":
        shapes = (attention,) * CONFIG.num_layers
    if architecture in ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"):
        shapes = (*[StateShape(2, 16, 16, 64, 4)] * 2, attention) * 2
    config = replace(CONFIG, architecture=architecture, experts=experts, cache_shapes=shapes)
    model = small_model(config)
    rows, planner = tables()
    states = model.allocate_states(rows.max_rows, 1, torch.float32, CPU)
    assert (states is None) == (StateShape not in map(type, shapes))
    asked = EngineConfig(
        device="cpu", max_running_requests=rows.max_rows, max_context_tokens=64, chunk_tokens=32
    )
    config = resolve_engine_config(asked, CONFIG, DeviceFacts(has_cuda=False))
    tables_before = [table.clone() for table in written(rows)]

    def count(run: Callable[[], Tensor | StepOutput], device: torch.device) -> int:
        result = run()
        return len(result.token_ids if isinstance(result, StepOutput) else result)

    monkeypatch.setattr(dry_runs, "peak_bytes", count)
    with torch.inference_mode():
        # On CUDA only; all but the memory is as here.
        config = replace(config, max_graph_tokens=64, join_decodes=True)
        peaks = measure_peaks(config, model, rows, planner, CPU, torch.float32)
    # A graph has room for as many decodes, too.
    assert peaks == Peaks(rows.max_rows, rows.max_rows, rows.max_rows + align_up(rows.max_rows))
    for then, now in zip(tables_before, written(rows), strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0)
    if states is not None:
        assert not any(state[:, : rows.max_rows].any() for state in states.states)
        assert not any(snapshot.any() for snapshot in states.snapshots)


def test_the_kernels_of_rules_and_masks_are_compiled_before_anybody_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton compiles another kernel for other dtypes, and for other sizes of tables and vocabulary."""
    seen: dict[str, set[tuple[object, ...]]] = {}

    def note(module: ModuleType, name: str) -> None:
        function = getattr(module, name)

        def noted(*arguments: Any) -> Any:
            flat = [one for some in arguments for one in (some if isinstance(some, RuleTables) else [some])]
            variant = tuple((one.dtype, one.shape[1:]) for one in flat)
            seen.setdefault(name, set()).add(variant)
            return function(*arguments)

        monkeypatch.setattr(module, name, noted)

    note(minisgl.engine.step.logits, "logit_rules")
    note(minisgl.engine.step.logits, "count_tokens")
    note(dry_runs, "token_mask")
    note(sample_extras, "token_mask")
    model = small_model(replace(CONFIG, experts=None, architecture="Qwen3ForCausalLM"))
    rows, planner = tables()
    asked = EngineConfig(device="cpu", max_running_requests=rows.max_rows, max_context_tokens=64)
    config = resolve_engine_config(asked, CONFIG, DeviceFacts(has_cuda=False))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with torch.inference_mode():
        warm_up_prefill(config, model, rows, planner, CPU)
        compiled = {name: set(variants) for name, variants in seen.items()}
        assert compiled.keys() == {"logit_rules", "count_tokens", "token_mask"}
        compile_ahead(config, DecodeStep(model, rows), planner, CPU)
        row_ids = torch.arange(3, dtype=torch.int32)
        logits = DecodeStep(model, rows).logits(row_ids)
        words = torch.full((2, num_mask_words(CONFIG.vocab_size)), -1, dtype=torch.int32)
        masks = RowMasks(torch.tensor([-1, 1, 0], dtype=torch.int32), words)
        logit_tables = LogitTables(rows.max_rows, CONFIG.vocab_size, CPU)
        sample_with_extras(rows, logits, row_ids < 2, LogitExtras(rules=True), logit_tables, masks)
    assert seen == compiled


def test_decodes_as_few_and_as_many_as_there_may_be_go_with_prompts_before_anybody_serves() -> None:
    asked = EngineConfig(device="cpu", max_running_requests=99, max_step_tokens=200)
    config = resolve_engine_config(asked, CONFIG, DeviceFacts(has_cuda=False))
    assert {size.decodes for size in warm_up_sizes(config, [16, 99])} == {0}
    joining = replace(config, max_graph_tokens=64, join_decodes=True)
    # What lies behind them has to be aligned.
    assert {size.decodes for size in warm_up_sizes(joining, [16, 99])} == {0, 16, 100}
    large = replace(joining, max_running_requests=64, max_step_tokens=512)
    assert largest_prefills(large)[0] == DryPrefill(rows=32, row_tokens=15, decodes=32)
    # Rows that can't be long: all of them together have the most tokens.
    short = replace(joining, max_running_requests=8, max_step_tokens=8192, max_context_tokens=1024)
    assert largest_prefills(short)[0] == DryPrefill(rows=8, row_tokens=1024, decodes=0)


def test_prompts_over_an_fp8_cache_are_measured_and_compiled_as_their_keys_are_unpacked() -> None:
    asked = EngineConfig(device="cpu", max_running_requests=2, max_step_tokens=8192)
    config = resolve_engine_config(asked, CONFIG, DeviceFacts(has_cuda=False))
    config = replace(config, max_context_tokens=1024)
    assert not any(size.num_keys for size in warm_up_sizes(config, [2]))
    *others, largest = unpacking_prefills(replace(config, kv_dtype="fp8"))
    # Not eight rows: more than two never run.
    assert largest == DryPrefill(rows=2, row_tokens=1024, num_keys=MOST_UNPACKED_KEYS)
    assert [size.row_tokens for size in others] == [32, 64, 128, 256, 512, 1024]
    assert warm_up_sizes(replace(config, kv_dtype="fp8"), [2])[-7:] == [*others, largest]


def test_what_decode_is_measured_on_has_slots_of_its_own_and_leaves_nothing_behind() -> None:
    rows, _ = tables()
    before = [table.clone() for table in rows.buffers()]
    row_ids = torch.tensor([0, 3, rows.max_rows], dtype=torch.int32)
    with rows.filled_for_measuring(61):
        state = rows.read(row_ids)
        assert state.slot_mapping.tolist() == [PAGE_SIZE, PAGE_SIZE, -1]
        assert state.positions.tolist()[:2] == [0, 0]
        assert len(set(state.token_ids.tolist()[:2])) == 2
        assert int(rows.last_token.max()) < 61
        rows.context_len.add_(1)
    for table, old in zip(rows.buffers(), before, strict=True):
        assert torch.equal(table, old)


def tables() -> tuple[Rows, AttentionPlanner]:
    rows = Rows(6, PAGES_PER_ROW, PAGE_SIZE, CPU)
    return rows, AttentionPlanner(Backend(select("torch")), HostPageTable(6, PAGES_PER_ROW, PAGE_SIZE))


def written(rows: Rows) -> list[Tensor]:
    """All of the tables that belongs to somebody and that a step may write."""
    return [rows.last_token[:-1], rows.context_len[:-1], rows.page_table]
