"""`LLM` with the built-in model: the same tokens as transformers, and clean behaviour around them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from minisgl import LLM, Completion, ConfigError, FinishReason, MinisglError, RequestError, SamplingParams
from minisgl.engine.engine import Engine
from minisgl.ipc.messages import AddRequest
from minisgl.weights.sources import resolve_model_folder

GOLDEN = json.loads((Path(__file__).parent / "data" / "smollm2_golden.json").read_text(encoding="utf-8"))
MAX_CONTEXT = 512
CASES = [
    case for case in GOLDEN["cases"] if "messages" in case and len(case["prompt_ids"]) + 16 <= MAX_CONTEXT
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    try:
        resolve_model_folder("smollm2-135m")
    except MinisglError as error:
        pytest.skip(f"the built-in model is not on this machine and can't be fetched: {error}")
    settings = {"device": "cpu", "dtype": "float32", "cpu_threads": 1}
    with LLM(max_context_tokens=MAX_CONTEXT, num_pages=256, **settings) as made:
        yield made


def idle(llm: LLM) -> bool:
    """No request is left in driver or engine."""
    engine = llm._driver._engine
    return not llm._driver._open and engine is not None and not engine.has_work


def wanted(case: dict[str, Any], num_tokens: int) -> tuple[int, ...]:
    return tuple(case["float32"]["ids"][:num_tokens])


def test_chats_in_one_batch_equal_transformers_token_for_token(llm: LLM) -> None:
    cases = CASES[:6]
    replies = llm.chat([case["messages"] for case in cases], GREEDY)
    assert [reply.token_ids for reply in replies] == [wanted(case, 16) for case in cases]
    assert [reply.num_prompt_tokens for reply in replies] == [len(case["prompt_ids"]) for case in cases]
    assert idle(llm)


def test_a_stream_asks_for_bounded_pauses_and_a_batch_for_throughput(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = cast(Engine, llm._driver._engine)
    added: list[AddRequest] = []
    add = engine.add
    monkeypatch.setattr(engine, "add", lambda request: (added.append(request), add(request)))
    short = SamplingParams(max_tokens=1)
    list(llm.stream("Hello", short))
    llm.generate(["Hello"], short)
    llm.chat([{"role": "user", "content": "Hello"}], short)
    assert [request.streamed for request in added] == [True, False, False]


def test_text_token_ids_and_messages_are_the_same_prompt(llm: LLM) -> None:
    case = CASES[0]
    chat = llm.chat(case["messages"], GREEDY)
    tokens = llm.generate([case["prompt_ids"]], GREEDY)
    assert len(chat) == len(tokens) == 1
    assert chat[0].text == tokens[0].text == case["float32"]["text"]
    assert chat[0].finish_reason is FinishReason.STOP
    assert chat[0].token_ids[-1] == 2
    assert tokens[0].num_cached_tokens > 0


def test_a_streams_deltas_add_up_to_the_completion(llm: LLM) -> None:
    (whole,) = llm.chat(CASES[1]["messages"], GREEDY)
    deltas = list(llm.stream(CASES[1]["messages"], GREEDY))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason is whole.finish_reason


def test_streams_and_a_batch_at_once_lose_nothing(llm: LLM) -> None:
    first, second = (llm.stream(case["messages"], GREEDY) for case in CASES[:2])
    got_first, got_second = [next(first)], [next(second)]
    batch = llm.generate(["The sky is", "Two and two"], GREEDY)
    got_first += first
    got_second += second
    for got, case in zip((got_first, got_second), CASES, strict=False):
        assert tuple(token for delta in got for token in delta.token_ids) == wanted(case, 16)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in ("The sky is", "Two and two")]
    assert [reply.token_ids for reply in batch] == [reply.token_ids for reply in alone]
    assert idle(llm)


def test_closing_a_stream_early_leaves_nothing_behind(llm: LLM) -> None:
    stream = cast(Any, llm.stream("Once upon a time", SamplingParams(max_tokens=200, ignore_eos=True)))
    next(stream)
    assert not idle(llm)
    stream.close()
    assert idle(llm)


def test_a_stream_that_is_never_started_costs_nothing(llm: LLM) -> None:
    llm.stream("Once upon a time")
    assert idle(llm)


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=64, stop=("Paris",))
    (reply,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], params)
    assert reply.text == "The capital of France is "
    assert reply.finish_reason is FinishReason.STOP
    assert idle(llm)


def test_max_tokens_ends_with_length_and_is_cut_to_the_room(llm: LLM) -> None:
    (short,) = llm.generate("Count: 1, 2, 3,", SamplingParams(temperature=0.0, max_tokens=3))
    assert (len(short.token_ids), short.finish_reason) == (3, FinishReason.LENGTH)
    params = SamplingParams(temperature=0.0, max_tokens=10**6, ignore_eos=True)
    (full,) = llm.generate([[5] * (MAX_CONTEXT - 4)], params)
    assert (len(full.token_ids), full.finish_reason) == (4, FinishReason.LENGTH)


def test_each_prompt_gets_n_completions_one_after_the_other(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=4, ignore_eos=True)
    single = llm.generate(["One", "Two"], params)
    several = llm.generate(["One", "Two"], params, n=2)
    assert [reply.token_ids for reply in several[::2]] == [reply.token_ids for reply in single]
    assert several[0].token_ids != several[1].token_ids
    with pytest.raises(RequestError, match="n must be a whole number"):
        llm.generate("One", params, n=0)


def test_logprobs_stand_beside_the_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=0)
    (reply,) = llm.generate([[504, 3575, 282, 4649]], params)
    assert reply.logprobs is not None
    assert [entry.token_id for entry in reply.logprobs] == list(reply.token_ids)
    assert [entry.top_ids[0] for entry in reply.logprobs] == list(reply.token_ids)
    assert reply.prompt_logprobs is not None
    assert [entry.token_id for entry in reply.prompt_logprobs] == [3575, 282, 4649]
    (only_prompt,) = llm.generate([[504, 3575]], SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert (only_prompt.token_ids, only_prompt.text) == ((), "")
    assert only_prompt.prompt_logprobs is not None
    first, second = llm.generate([[504, 3575]], SamplingParams(max_tokens=1, prompt_logprobs=1), n=2)
    assert first.prompt_logprobs == second.prompt_logprobs
    assert first.prompt_logprobs is not None
    found = [values[0].logprob for values in (only_prompt.prompt_logprobs, first.prompt_logprobs)]
    assert found == pytest.approx([reply.prompt_logprobs[0].logprob] * 2, abs=1e-3)


def test_bad_words_do_not_come(llm: LLM) -> None:
    ask = [{"role": "user", "content": "What is the capital of France?"}]
    (plain,) = llm.chat(ask, GREEDY)
    (banned,) = llm.chat(ask, SamplingParams(temperature=0.0, max_tokens=16, bad_words=("Paris",)))
    assert "Paris" in plain.text
    assert "Paris" not in banned.text


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 5, 2)]
    replies = llm.generate(["a", "b", "c"], params)
    assert [len(reply.token_ids) for reply in replies] == [1, 5, 2]


def test_a_seed_gives_the_same_tokens_alone_and_in_company(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=12)
    (alone,) = llm.generate("My favourite", params)
    company: list[Completion] = llm.generate(["My favourite", "Other", "Texts"], params)
    assert company[0].token_ids == alone.token_ids


def test_choices_and_calls_without_a_seed_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=10.0, max_tokens=12, ignore_eos=True)
    replies = llm.generate("My favourite", params, n=2) + llm.generate("My favourite", params)
    assert len({reply.token_ids for reply in replies}) == 3


@pytest.mark.parametrize(
    ("prompts", "code", "index"),
    [
        ("", "invalid_value", None),
        ([[]], "invalid_value", None),
        ([[1] * MAX_CONTEXT], "context_length_exceeded", None),
        (["fine", [1] * (10 * MAX_CONTEXT)], "context_length_exceeded", 1),
        (["fine", "fine", [-3]], "invalid_value", 2),
        ([[1], [10**9], [1]], "invalid_token_id", 1),  # refused by the engine, after all were submitted
        (["fine", "lone \ud800 surrogate"], "invalid_unicode", 1),
        ([3, 4], "invalid_value", None),
    ],
)
def test_a_refused_prompt_is_named_and_the_rest_let_go(
    llm: LLM, prompts: Any, code: str, index: int | None
) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    assert (caught.value.status, caught.value.code) == (400, code)
    assert caught.value.message.startswith(f"prompt {index}: ") == (index is not None)
    assert idle(llm)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user", "content": "x" * 10**5}],
        [[{"role": "user", "content": "hi"}], []],
    ],
)
def test_messages_that_make_no_prompt_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError):
        llm.chat(messages, GREEDY)
    assert idle(llm)


def test_as_many_parameters_as_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="3 prompts need one SamplingParams or 3, got 2"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])


def test_no_prompts_give_no_completions(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_progress_is_a_line_on_a_stderr_that_is_no_terminal(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["a", "b"], SamplingParams(temperature=0.0, max_tokens=2), progress=True)
    assert capsys.readouterr().err == "generating ...\n"


def test_an_unknown_setting_is_refused_before_anything_loads() -> None:
    with pytest.raises(ConfigError, match="max_modell_len"):
        LLM("smollm2-135m", max_modell_len=3)


def test_a_closed_llm_says_so(llm: LLM) -> None:
    other = LLM(device="cpu", cpu_threads=1, max_context_tokens=64, num_pages=16)
    stream = other.stream("Once upon a time", SamplingParams(max_tokens=20, ignore_eos=True))
    next(stream)
    other.close()
    other.close()
    with pytest.raises(MinisglError, match="closed"):
        list(stream)
    with pytest.raises(MinisglError, match="closed"):
        other.generate("again")


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.generate("a", {"max_tokens": 2}),
        lambda llm: llm.generate(["a", "b"], [GREEDY, None]),
        lambda llm: llm.generate(["a", "b"], 5),
        lambda llm: llm.stream("a", {"max_tokens": 2}),
        lambda llm: llm.stream("a", "greedy"),
        lambda llm: llm.generate(5),
        lambda llm: llm.generate(None),
        lambda llm: llm.generate({"prompt": "a"}),
        lambda llm: llm.generate([[1.5]]),
        lambda llm: llm.generate([[True]]),
        lambda llm: llm.generate([["a"]]),
        lambda llm: llm.stream(5),
        lambda llm: llm.stream(None),
        lambda llm: llm.stream(["a", "b"]),
        lambda llm: llm.stream([]),
        lambda llm: llm.chat("hello"),
        lambda llm: llm.chat(None),
        lambda llm: llm.chat(5),
        lambda llm: llm.chat(["hello"]),
        lambda llm: llm.chat({"role": "user", "content": "x"}),
        lambda llm: llm.chat([{"role": "user"}]),
        lambda llm: llm.chat([{"role": "user", "content": 5}]),
        lambda llm: llm.chat([{"role": "robot", "content": "x"}]),
        lambda llm: llm.chat([[{"role": "user", "content": "x"}], 5]),
        lambda llm: llm.stream([{"content": "x"}]),
    ],
)
def test_arguments_of_a_wrong_type_are_request_errors(llm: LLM, ask: Any) -> None:
    with pytest.raises(RequestError):
        ask(llm)
    assert idle(llm)


def test_a_chat_follows_the_servers_message_rules(llm: LLM) -> None:
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    other = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    first, second = llm.chat([plain, other], GREEDY)
    assert first.token_ids == second.token_ids
    assert first.num_prompt_tokens == second.num_prompt_tokens
    streamed = list(llm.stream(cast(Any, other), GREEDY))
    assert tuple(token for delta in streamed for token in delta.token_ids) == first.token_ids


def test_a_single_stop_string_is_not_its_characters(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=64, stop=cast(Any, "Paris"))
    (reply,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], params)
    assert reply.text == "The capital of France is "


def test_text_that_is_far_too_long_is_refused_at_once(llm: LLM) -> None:
    with pytest.raises(RequestError, match="bytes and so more than") as caught:
        llm.generate("1" * 3_000_000, GREEDY)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "settings",
    [
        {"num_pages": "12"},
        {"page_size": 3},
        {"memory_fraction": float("nan")},
        {"max_context_tokens": 2.5},
        {"kernel": "rms_norm=a:b"},
        {"overlap": "no"},
    ],
)
def test_an_impossible_setting_is_refused_before_a_model_is_looked_for(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings)).replace("_", "-")):
        LLM("/no/such/folder", **settings)


def test_a_model_that_is_no_name_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="--model must be a text"):
        LLM(cast(Any, None))
