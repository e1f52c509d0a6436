"""Decodes that go through the model with their step's prompts: nobody can tell by the tokens."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_grammar import FakeCompiler, use_fake_grammars
from joining_engines import always_joining, build_joining
from test_step_timeline import MODEL, started

from minisgl.attention.backends import select
from minisgl.engine.engine import Engine
from minisgl.engine.model_runner import LaunchedStep
from minisgl.engine.watch.step_timeline import UsedGraphs
from minisgl.grammar.spec import GrammarSpec
from minisgl.ipc.messages import AddRequest
from minisgl.request import FinishReason, RequestOutput, SamplingParams, ThoughtLimit
from minisgl.scheduler.plan import TokenMasks

LIMITS: dict[str, Any] = {
    "max_running_requests": 10,
    "max_step_tokens": 64,
    "chunk_tokens": 40,
    "page_size": 4,
    "output_reserve_tokens": 0,
}
GRAMMAR = GrammarSpec("lark", "one")
MIXTURE = MODEL | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
DELTA = MODEL | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def joining(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str = "torch",
    max_graph_tokens: int = 48,
    **settings: Any,
) -> Engine:
    """An engine with graphs that joins decodes wherever they may go with chunks."""

    engine = build_joining(
        lambda: started(tmp_path, **{**LIMITS, **settings}), max_graph_tokens=max_graph_tokens
    )
    always_joining(monkeypatch)
    for attention in engine.runner.model.attention_layers():
        attention.attend = select(backend)
    return engine


def some_requests(source: random.Random) -> list[AddRequest]:
    """Requests of all kinds, some of which begin alike."""
    common = [source.randrange(64) for _ in range(20)]
    requests = []
    for number in range(24):
        length = source.choice((1, source.randrange(1, 40)))
        prompt = [source.randrange(64) for _ in range(length)]
        if source.random() < 0.3:
            prompt = common[: source.randrange(20)] + prompt
        others = {
            13: {"grammar": GRAMMAR, "presence_penalty": 0.5, "logprobs": 1},
            15: {"grammar": GRAMMAR},
            18: {"grammar": GRAMMAR, "temperature": 0.0},
            19: {"frequency_penalty": 0.7},
            22: {"logprobs": 2},
        }.get(number, {})
        asked = others or source.choice([{}, {"temperature": 0.0}, {"top_k": 5}])
        if number in (5, 12):
            limit = ThoughtLimit(number // 3, (60,), (61, 62), is_open=True, may_reopen=number == 5)
            asked = asked | {"thought_limit": limit}
        params = SamplingParams(
            **{"temperature": 0.8, "seed": number, "max_tokens": source.randrange(1, 20), **asked}
        )  # pyright: ignore[reportArgumentType] (a mixed dict)
        requests.append(AddRequest(number, np.array(prompt, dtype="<i4").tobytes(), params))
    return requests


def tokens_alone(engine: Engine, requests: list[AddRequest]) -> list[list[int]]:
    """What each request gets when nobody else is there."""
    tokens: list[list[int]] = []
    for request in requests:
        engine.add(request)
        tokens.append([])
        while engine.has_work:
            for output in engine.step():
                tokens[-1] += output.token_ids
    return tokens


@pytest.mark.parametrize(
    ("overlap", "backend", "model", "join"),
    [
        (False, "torch", MODEL, True),
        (True, "torch", MODEL, True),
        (True, "triton", MODEL, True),
        (True, "torch", MIXTURE, True),
        (True, "torch", DELTA, True),
        (True, "torch", MODEL, False),
    ],
    ids=["serial", "overlap", "triton", "mixture", "linear attention", "apart"],
)
@pytest.mark.parametrize("num_pages", [200, 24], ids=["roomy", "preempting"])
def test_a_request_gets_the_tokens_that_it_gets_alone(
    num_pages: int,
    overlap: bool,
    backend: str,
    model: dict[str, Any],
    join: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = started(tmp_path, model, **LIMITS, num_pages=200)
    settings: dict[str, Any] = {"overlap": overlap, "num_pages": num_pages, "join_decodes": join}
    engine = joining(tmp_path, monkeypatch, backend, 32, model=model, **settings)
    num_joined = num_in_graphs = num_aborted = 0
    masked: list[UsedGraphs] = []
    sample = engine.runner.sample

    def sample_and_note(step: LaunchedStep, masks: TokenMasks) -> None:
        masked.append(step.graphs)
        sample(step, masks)

    monkeypatch.setattr(engine.runner, "sample", sample_and_note)
    for one in (plain, engine):
        use_fake_grammars(one, FakeCompiler(MODEL["vocab_size"], 2))
    for seed in range(3):
        source = random.Random(seed)
        requests = some_requests(source)
        expected = tokens_alone(plain, requests)
        tokens: list[list[int]] = [[] for _ in requests]
        ends: dict[int, RequestOutput] = {}
        waiting = list(requests)
        while waiting or engine.has_work:
            for request in waiting[: source.randrange(3)]:
                engine.add(request)
                waiting.remove(request)
            if source.random() < 0.12:
                engine.abort(source.randrange(len(requests)))
            for output in engine.step():
                assert output.request_id not in ends, "an output after the last one"
                tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    ends[output.request_id] = output
            engine.cache.check_invariants()
        for number, output in ends.items():
            if output.finish_reason is FinishReason.ABORT:
                num_aborted += 1
                assert tokens[number] == expected[number][: len(tokens[number])]
            else:
                assert tokens[number] == expected[number], f"request {number} of seed {seed}"
        assert len(ends) == len(requests)
    for record in engine.timeline.records:
        if record.graphs.joined:
            num_joined += 1
            num_in_graphs += record.graphs.prefill_tokens > 0
            assert record.num_decodes
            assert record.num_chunks
            assert not record.graphs.decode_rows
    assert any(graphs.prefill_tokens for graphs in masked)
    if join:
        assert {graphs.joined for graphs in masked} == {False, True}
        assert num_joined > num_in_graphs > 5
    else:
        assert num_joined == 0
        assert any(graphs.prefill_tokens and graphs.decode_rows for graphs in masked)
    assert num_aborted > 1
    assert (engine.status(0).num_preemptions > 0) == (num_pages == 24)
    plain.close()
    engine.close()


def test_many_decodes_go_with_a_chunk_of_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = started(tmp_path, **LIMITS, num_pages=200)
    rows: dict[str, Any] = {"max_running_requests": 30, "num_pages": 200}
    engine = joining(tmp_path, monkeypatch, "triton", max_graph_tokens=16, **rows)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    requests = [
        AddRequest(number, np.full(1, (7 * number) % 64, dtype="<i4").tobytes(), params)
        for number in range(30)
    ]
    expected = tokens_alone(plain, requests)
    tokens: list[list[int]] = [[] for _ in requests]
    waiting = list(requests)
    while waiting or engine.has_work:
        if waiting:
            engine.add(waiting.pop(0))
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    assert tokens == expected
    joined = [record for record in engine.timeline.records if record.graphs.joined]
    uncaptured = [record.num_decodes for record in joined if not record.graphs.prefill_tokens]
    assert max(uncaptured) > 16, "no graph has room for so many"
    plain.close()
    engine.close()


def test_whoever_does_not_want_it_gets_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = joining(tmp_path, monkeypatch, num_pages=200, join_decodes=False)
    source = random.Random(0)
    for request in some_requests(source):
        engine.add(request)
        engine.step()
    while engine.has_work:
        engine.step()
    assert {record.graphs.joined for record in engine.timeline.records} == {False}
    assert any(record.num_decodes and record.num_chunks for record in engine.timeline.records)
    engine.close()
