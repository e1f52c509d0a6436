"""Tools, thoughts and their limit in `LLM`: a small model with random weights, in a real engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer
from tool_model import PARAMETERS, make_tool_model

from minisgl import LLM, RequestError, SamplingParams
from minisgl.text.formats.events import Content, Reasoning

ENUM = {**PARAMETERS, "properties": {"city": {"enum": ["Rom", "Oslo"]}}, "additionalProperties": False}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": ENUM}}]
HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
OPENED = {"opened": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_tool_model(tmp_path_factory.mktemp("offline") / "model")
    fast = Tokenizer.from_file(str(made / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": fast.get_vocab_size(),
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": fast.token_to_id("<|im_end|>"),
        "bos_token_id": 1,
    }
    (made / "config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    settings = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "dummy_weights": True}
    with LLM(str(folder), num_pages=200, **settings) as made:
        yield made


def sampled(seed: int, max_tokens: int = 60, **params: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, **params)


def test_required_calls_are_calls_that_fit(llm: LLM) -> None:
    replies = llm.chat(HELLO, sampled(1, 200), n=4, tools=TOOLS, tool_choice="required")
    calls = [call for reply in replies for call in reply.tool_calls]
    assert calls
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert call.name == "get_weather"
        if call.complete:
            jsonschema.validate(json.loads(call.arguments), ENUM)
    whole = next(reply for reply in replies if reply.tool_calls and reply.tool_calls[0].complete)
    assert whole.message["tool_calls"][0]["function"]["name"] == "get_weather"
    result = {"role": "tool", "tool_call_id": whole.tool_calls[0].id, "content": "Sunny."}
    assert llm.chat([*HELLO, whole.message, result], sampled(2, 3))[0].token_ids


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("schema", [None, {"type": "object", "properties": {"a": {"const": 1}}}])
def test_a_thought_ends_at_its_limit_and_then_the_answer_comes(llm: LLM, budget: int, schema: Any) -> None:
    close = llm._text.marker_ids["</think>"]
    params = sampled(3, 40, json_schema=schema, thinking_token_budget=budget)
    replies = llm.chat(HELLO, params, n=3, chat_template_kwargs=OPENED)
    for reply in replies:
        at = reply.token_ids.index(close)
        assert at <= budget
        assert reply.num_reasoning_tokens in (0, at + 1)  # 0: nothing but spaces was thought
        if schema is not None and reply.finish_reason == "stop":
            jsonschema.validate(json.loads(reply.text), schema)
    assert any(reply.token_ids.index(close) == budget for reply in replies)


def test_a_stream_tells_thoughts_from_the_answer(llm: LLM) -> None:
    chat = [*HELLO]
    params = sampled(5, 30, logit_bias={llm._text.marker_ids["<think>"]: 100.0}, thinking_token_budget=4)
    deltas = list(llm.stream(chat, params))
    (whole,) = llm.chat(chat, params)
    events = [event for delta in deltas for event in delta.events]
    thought = "".join(event.text for event in events if isinstance(event, Reasoning))
    text = "".join(event.text for event in events if isinstance(event, Content))
    assert (thought, text) == (whole.reasoning, whole.text)
    assert text == "".join(delta.text for delta in deltas)
    assert thought


def test_what_can_not_be_done_is_refused_by_name(llm: LLM, folder: Path) -> None:
    def refused(call: Any) -> RequestError:
        with pytest.raises(RequestError) as caught:
            call()
        return caught.value

    limited = sampled(1, 5, thinking_token_budget=3)
    assert refused(lambda: llm.generate("Hi", limited)).param == "thinking_token_budget"
    assert refused(lambda: llm.chat(HELLO, tools=[{"type": "x"}])).param == "tools[0].type"
    assert refused(lambda: llm.stream("Hi", tools=TOOLS)).param == "tools"
    named = {"type": "function", "function": {"name": "other"}}
    assert refused(lambda: llm.chat(HELLO, tools=TOOLS, tool_choice=named)).param == "tool_choice"
    settings = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "dummy_weights": True}
    with LLM(str(folder), num_pages=200, tool_parser="none", reasoning_parser="none", **settings) as plain:
        assert "LLM(tool_parser=" in refused(lambda: plain.chat(HELLO, tools=TOOLS)).message
        assert "LLM(reasoning_parser=" in refused(lambda: plain.chat(HELLO, limited)).message
