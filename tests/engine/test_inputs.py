"""What a plan becomes on the device."""

from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl.engine.buckets import PrefillBucket
from minisgl.engine.inputs import (
    NO_DECODES,
    Decodes,
    HostPageTable,
    Stager,
    build_prefill,
    pack_prefill,
    pack_row_inits,
)
from minisgl.engine.logits import LogitTables, pack_rules
from minisgl.engine.rows import Rows
from minisgl.scheduler.plan import Chunk, LogitRules, PageUpdate, RowInit, StepPlan

CPU = torch.device("cpu")


def plan_of(*chunks: Chunk, page_updates: tuple[PageUpdate, ...] = ()) -> StepPlan:
    rows = tuple(chunk.row for chunk in chunks if chunk.samples)
    return StepPlan(0, (), page_updates, (), chunks, rows)


def tokens(*ids: int) -> bytes:
    return np.array(ids, dtype="<i4").tobytes()


def test_sampling_parameters_arrive_bit_for_bit() -> None:
    rows = Rows(8, 4, 16, CPU)
    inits = (
        RowInit(3, 0.7, 50, 0.95, 0.05, -(2**63)),
        RowInit(0, 1e-30, 0, 1.0, 0.0, 2**63 - 1),
        RowInit(7, 2.0, 2**31 - 1, 0.1, 1.0, (5 << 32) | 0xFFFFFFFF),
    )
    rows.init_rows(Stager(CPU).to_device(pack_row_inits(inits)))
    for init in inits:
        assert rows.temperature[init.row].item() == np.float32(init.temperature)
        assert rows.top_k[init.row].item() == init.top_k
        assert rows.top_p[init.row].item() == np.float32(init.top_p)
        assert rows.min_p[init.row].item() == np.float32(init.min_p)
        assert rows.seed[init.row].item() == init.seed
    assert rows.seed[1].item() == 0, "another row was written"


class SingleValues(TorchDispatchMode):
    """Notes the ops that take a tensor without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(arg, torch.Tensor) and not arg.dim() for arg in args):
            self.ops.append(str(func))
        return func(*args, **kwargs or {})


def test_rows_that_change_hands_write_no_single_value_from_the_host() -> None:
    """On CUDA, launching would wait for such a copy, and so for the step before."""
    tables = LogitTables(4, 32, CPU)
    tables.has_rules[2] = True
    rules = LogitRules(1.2, 0.0, 0.0, (), (), (), (), 0, tokens(3, 4), b"")
    # Two rows with rules: of a single one torch drops the dimension, but that is on the device already.
    inits = (
        RowInit(1, 1.0, 0, 1.0, 0.0, 0, rules),
        RowInit(2, 1.0, 0, 1.0, 0.0, 0),
        RowInit(3, 1.0, 0, 1.0, 0.0, 0, rules),
    )
    staged = Stager(CPU).to_device(list(pack_rules(inits, 32)))
    with SingleValues() as found:
        tables.init_rows(staged)
    assert found.ops == []
    assert tables.has_rules.tolist() == [False, True, False, True, False]


def test_staged_arrays_are_what_was_given_and_start_at_16_bytes() -> None:
    arrays = [np.arange(length, dtype=np.int32) for length in (1, 3, 4, 0, 5, 17)]
    staged = Stager(CPU).to_device(arrays)
    start = staged[0].data_ptr()
    for array, tensor in zip(arrays, staged, strict=True):
        assert tensor.tolist() == array.tolist()
        assert (tensor.data_ptr() - start) % 16 == 0


def test_padding_rows_look_at_a_token_that_is_looked_at_anyway() -> None:
    pages = HostPageTable(max_rows=4, max_pages_per_row=4, page_size=4)
    chunks = (Chunk(2, 0, tokens(10, 11, 12), True), Chunk(0, 0, tokens(20), True))
    decodes = Decodes(np.array([1], dtype=np.int32), np.array([3], dtype=np.int32))
    *_, logit_index = pack_prefill(chunks, decodes, pages, PrefillBucket(8, 3, 2))
    assert logit_index.tolist() == [0, 4, 3, 4, 4]
    *_, logit_index = pack_prefill((), NO_DECODES, pages, PrefillBucket(8, 3, 2))
    assert logit_index.tolist() == [0] * 5


def test_a_prefill_batch_knows_where_each_token_goes() -> None:
    pages = HostPageTable(max_rows=4, max_pages_per_row=4, page_size=4)
    plan = plan_of(
        Chunk(2, 3, tokens(10, 11, 12), False),
        Chunk(0, 0, tokens(20), True),
        page_updates=(PageUpdate(2, 0, (7, 9)), PageUpdate(0, 0, (5,))),
    )
    change = pages.update(plan)
    assert change is not None
    assert dict(zip(change.flat_index.tolist(), change.page_ids.tolist(), strict=True)) == {8: 7, 9: 9, 0: 5}
    batch = build_prefill(plan.chunks, pages, Stager(CPU))
    assert batch.token_ids.tolist() == [10, 11, 12, 20]
    assert batch.positions.tolist() == [3, 4, 5, 0]
    assert batch.slot_mapping.tolist() == [7 * 4 + 3, 9 * 4, 9 * 4 + 1, 5 * 4]
    assert batch.row_ids.tolist() == [2, 0]
    assert batch.context_len.tolist() == [6, 1]
    assert batch.row_start.tolist() == [0, 3, 4]
    assert batch.logit_index.tolist() == [2, 3]
    assert batch.max_query_len == 3
