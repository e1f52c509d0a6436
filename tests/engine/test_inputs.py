"""What a plan becomes on the device."""

from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl.engine.graphs.buckets import PrefillBucket
from minisgl.engine.step.inputs import (
    NO_DECODES,
    Decodes,
    HostPageTable,
    Stager,
    build_prefill,
    pack_prefill,
    pack_row_inits,
)
from minisgl.engine.step.logits import LogitTables, pack_rules
from minisgl.engine.step.rows import Rows
from minisgl.request import MAX_BAD_WORDS_IDS
from minisgl.scheduler.plan import Chunk, LogitRules, PageUpdate, RowInit, RowRules, StepPlan
from triton_kernels.logit_rules import BANNED, ENDS, IN_PROMPT

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
    tables.rules.has_rules[2] = True
    rules = LogitRules(1.2, 0.0, 0.0, b"", b"", b"", (), b"", 0, tokens(3, 4))
    # Two rows with rules: of a single one torch drops the dimension, but that is on the device already.
    inits = tuple(RowInit(row, 1.0, 0, 1.0, 0.0, 0) for row in (1, 2, 3))
    packed = pack_rules(inits, (RowRules((1, 3), rules),), 32)
    staged = Stager(CPU).to_device(list(packed))
    with SingleValues() as found:
        tables.init_rows(packed, staged)
    assert found.ops == []
    assert tables.rules.has_rules.tolist() == [False, True, False, True, False]


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
    *_, logit_index, _, _ = pack_prefill(chunks, decodes, pages, PrefillBucket(8, 3, 2))
    assert logit_index.tolist() == [0, 4, 3, 4, 4]
    *_, logit_index, _, _ = pack_prefill((), NO_DECODES, pages, PrefillBucket(8, 3, 2))
    assert logit_index.tolist() == [0] * 5


def test_many_updates_and_chunks_at_once_are_what_one_after_the_other_gives() -> None:
    random = np.random.default_rng(0)
    max_rows, width, page_size = 9, 12, 4
    for _ in range(50):
        pages = HostPageTable(max_rows, width, page_size)
        table = np.zeros((max_rows + 1, width), np.int32)
        updates, chunks, places = [], [], []
        for row in random.permutation(max_rows)[: random.integers(1, max_rows)].tolist():
            cut = int(random.integers(1, width))
            own = random.permutation(np.arange(1, 100, dtype=np.int32))[:width]
            updates += [PageUpdate(row, cut, own[cut:].tobytes()), PageUpdate(row, 0, own[:cut].tobytes())]
            table[row] = own
            start, end = sorted(random.choice(width * page_size + 1, 2, replace=False).tolist())
            ids = random.integers(0, 1000, end - start, dtype=np.int32)
            chunks.append(Chunk(row, start, ids.tobytes(), True))
            places += [
                (token, position, own[position // page_size] * page_size + position % page_size)
                for token, position in zip(ids, range(start, end), strict=True)
            ]
        change = pages.update(plan_of(page_updates=tuple(updates)))
        assert change is not None
        device_table = np.zeros_like(table)
        device_table.reshape(-1)[change.flat_index] = change.page_ids
        np.testing.assert_array_equal(device_table, table)
        size = PrefillBucket(len(places) + 3, len(chunks) + 2, 0)
        token_ids, positions, slots, row_ids, context_len, row_start, logit_index, *_ = pack_prefill(
            tuple(chunks), NO_DECODES, pages, size
        )
        assert [*zip(token_ids, positions, slots, strict=True)] == [*places, *[(0, 0, -1)] * 3]
        lengths = [chunk.num_new_tokens for chunk in chunks]
        ends = [sum(lengths[: index + 1]) for index in range(len(chunks))]
        assert row_start.tolist() == [0, *ends, ends[-1], ends[-1]]
        assert logit_index.tolist() == [end - 1 for end in [*ends, ends[-1], ends[-1]]]
        assert row_ids.tolist() == [*(chunk.row for chunk in chunks), pages.padding_row, pages.padding_row]
        whole = [chunk.num_computed_tokens + chunk.num_new_tokens for chunk in chunks]
        assert context_len.tolist() == [*whole, 0, 0]


def test_a_snapshot_divides_a_row_behind_the_tokens_that_lead_to_it() -> None:
    pages = HostPageTable(max_rows=4, max_pages_per_row=4, page_size=4)
    chunks = (
        Chunk(2, 0, tokens(10, 11, 12), True),
        Chunk(0, 4, tokens(20, 21, 22, 23, 24), True, snapshot=(4, 7)),
    )
    decodes = Decodes(np.array([1], dtype=np.int32), np.array([3], dtype=np.int32))
    *_, part_start, state_slots = pack_prefill(chunks, decodes, pages, PrefillBucket(16, 4, 2))
    assert part_start.tolist() == [1, 4, 4, 8, 9, 9, 9, 9, 9]
    assert state_slots.tolist() == [-1, 7, -1, -1]


def test_a_prefill_batch_knows_where_each_token_goes() -> None:
    pages = HostPageTable(max_rows=4, max_pages_per_row=4, page_size=4)
    plan = plan_of(
        Chunk(2, 3, tokens(10, 11, 12), False),
        Chunk(0, 0, tokens(20), True),
        page_updates=(PageUpdate(2, 0, tokens(7, 9)), PageUpdate(0, 0, tokens(5))),
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
    assert batch.num_keys == batch.context_len.sum()


def dense_marks(rules: LogitRules, vocab_size: int) -> np.ndarray:
    """What is known of each token, int32 [V], written down token by token."""
    prompt, output, allowed, ends = (
        np.frombuffer(part, "<i4").tolist()
        for part in (rules.prompt, rules.output, rules.allowed_token_ids, rules.stop_ids)
    )
    return np.array(
        [
            output.count(token_id)
            + (IN_PROMPT if token_id in prompt else 0)
            + (ENDS if token_id in ends else 0)
            + (BANNED if allowed and token_id not in allowed else 0)
            for token_id in range(vocab_size)
        ],
        dtype=np.int32,
    )


def test_rows_get_their_rules_and_nothing_of_those_before_or_beside_them() -> None:
    vocab_size = 64
    some = LogitRules(
        1.2, 0.0, 0.0, tokens(9), np.float32(2).tobytes(), tokens(3, 3, 8), ((7,),), tokens(8, 99), 5,
        tokens(3, 4, 3), tokens(4, 5, 4),
    )  # fmt: skip
    many = LogitRules(1.0, 0.5, 0.0, b"", b"", tokens(*range(40)), ((1, 2), (3,), (4,)), b"", 0, tokens(1))
    none = LogitRules(1.0, 0.0, 1.0, b"", b"", b"", (), b"", 0, tokens(2))
    row_rules = (RowRules((6, 1), some), RowRules((3,), many), RowRules((0, 4, 5), none))
    tables = LogitTables(8, vocab_size, CPU)
    for table in tables.rules:
        table.fill_(1)
    inits = tuple(RowInit(row, 1.0, 0, 1.0, 0.0, 0) for row in range(7))
    packed = pack_rules(inits, row_rules, vocab_size)
    tables.init_rows(packed, Stager(CPU).to_device(list(packed)))
    assert tables.rules.has_rules.tolist() == [True, True, False, True, True, True, True, True, True]
    for rows, rules in row_rules:
        for row in rows:
            assert tables.rules.marks[row].tolist() == dense_marks(rules, vocab_size).tolist()
            assert tables.rules.frequency[row] == rules.frequency_penalty
            assert tables.rules.bad_last[row].tolist() == [
                *(ids[-1] for ids in rules.bad_words_ids),
                *[-1] * (MAX_BAD_WORDS_IDS - len(rules.bad_words_ids)),
            ]
            assert int(tables.rules.bias[row].count_nonzero()) == len(rules.bias) // 4
    assert (tables.rules.bias_ids[1, 0], tables.rules.bias[1, 0], tables.rules.min_len[6]) == (9, 2.0, 5)
    assert tables.rules.bad_words[3, 0].tolist() == [-1] * 14 + [1]
    assert tables.rules.recent[1].tolist() == [-1] * 9 + [3, 4, 3, 4, 5, 4]
    assert tables.rules.marks[2].tolist() == [1] * vocab_size  # a plain row's are never read


def test_no_work_on_rules_grows_with_the_vocabulary_or_the_rows_that_share_them() -> None:
    rules = LogitRules(1.0, 0.0, 0.0, b"", b"", tokens(*range(100)), (), b"", 0, tokens(5))
    inits = tuple(RowInit(row, 1.0, 0, 1.0, 0.0, 0) for row in range(128))
    packed = pack_rules(inits, (RowRules(tuple(range(128)), rules),), 150_000)
    assert sum(map(len, packed)) < 1000
