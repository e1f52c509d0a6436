"""The limit of a thought: from each API's field to the token ids of the model's format, or a refusal."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from small_model import make_folder
from tokenizers import AddedToken, Tokenizer
from tool_model import make_tool_model

from minisgl.errors import RequestError
from minisgl.replies.plan import plan_reply
from minisgl.request import SamplingParams, ThoughtLimit
from minisgl.server.apis.chat import parse_chat
from minisgl.server.apis.completions import parse_completion
from minisgl.server.apis.messages import parse_messages
from minisgl.server.apis.responses import parse_response
from minisgl.server.calls.call import Call
from minisgl.server.served_model import ServedModel, load_served_model

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
MARKERS = (
    *(
        "[THINK]",
        "[/THINK]",
        "<|channel>",
        "<channel|>",
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|end|>",
    ),
    *("<seed:think>", "</seed:think>"),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load_served_model(make_tool_model(tmp_path_factory.mktemp("limit") / "model"), "tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has a token for every marker of the formats but those of `think`."""
    made = make_folder(tmp_path_factory.mktemp("markers") / "model")
    fast = Tokenizer.from_file(str(made / "tokenizer.json"))
    fast.add_special_tokens([AddedToken(text, special=True) for text in MARKERS])
    fast.save(str(made / "tokenizer.json"))
    return made


def limit_of(call: Call, served: ServedModel) -> ThoughtLimit | None:
    params = call.encode(served, 4096).plan.params
    assert params.thinking_token_budget is None
    return params.thought_limit


def test_each_api_has_a_field_for_the_limit(served: ServedModel) -> None:
    opens, closes = ((served.marker_ids[text],) for text in ("<think>", "</think>"))
    budget = {"thinking_token_budget": 9}
    chat = {"messages": HELLO, **budget}
    expected = ThoughtLimit(9, opens, closes)
    assert limit_of(parse_chat(msgspec.json.encode(chat), served), served) == expected
    opened = {**chat, "chat_template_kwargs": {"opened": True}}
    found = limit_of(parse_chat(msgspec.json.encode(opened), served), served)
    assert found == msgspec.structs.replace(expected, is_open=True)
    response = {"input": "Hi", **budget}
    assert limit_of(parse_response(msgspec.json.encode(response), served), served) == expected
    message = {"messages": HELLO, "max_tokens": 50, "thinking": {"type": "enabled", "budget_tokens": 9}}
    assert limit_of(parse_messages(msgspec.json.encode(message), served), served) == expected
    for none in (None, -1):
        free = {"messages": HELLO, "thinking_token_budget": none}
        assert limit_of(parse_chat(msgspec.json.encode(free), served), served) is None


@pytest.mark.parametrize("value", [-2, 1.5, "9", 2**31])
def test_a_limit_that_is_no_number_of_tokens_is_refused(served: ServedModel, value: Any) -> None:
    body = msgspec.json.encode({"messages": HELLO, "thinking_token_budget": value})
    with pytest.raises(RequestError) as refused:
        parse_chat(body, served)
    assert refused.value.param == "thinking_token_budget"


def test_a_completion_has_no_thoughts_to_limit(served: ServedModel) -> None:
    with pytest.raises(RequestError) as refused:
        parse_completion(b'{"prompt": "Hi", "thinking_token_budget": 5}', served)
    assert (refused.value.status, refused.value.param) == (400, "thinking_token_budget")


def test_a_model_without_thoughts_refuses_a_limit_and_keeps_anthropics(served: ServedModel) -> None:
    plain = served._replace(reply_format=None)
    call = parse_chat(msgspec.json.encode({"messages": HELLO, "thinking_token_budget": 5}), plain)
    with pytest.raises(RequestError, match="--reasoning-parser") as refused:
        call.encode(plain, 4096)
    assert refused.value.param == "thinking_token_budget"
    body = {"messages": HELLO, "max_tokens": 50, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert limit_of(parse_messages(msgspec.json.encode(body), plain), plain) is None


@pytest.mark.parametrize(
    ("parser", "open_text", "close", "may_reopen", "instead"),
    [
        ("mistral", "[THINK]", "[/THINK]", True, []),
        ("gemma4", "<|channel>thought", "<channel|>", True, []),
        ("seed_oss", "<seed:think>", "</seed:think>", False, []),
        ("harmony", "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", True, ["f", "c"]),
    ],
)
def test_each_format_is_limited_by_its_own_tokens(
    folder: Path, parser: str, open_text: str, close: str, may_reopen: bool, instead: list[str]
) -> None:
    model = load_served_model(folder, "tiny", reasoning_parser=parser)
    limit = plan_reply(model, "", SamplingParams(thinking_token_budget=3)).params.thought_limit
    assert limit is not None
    decode = model.tokenizer.decode
    assert (decode([*limit.open], False), decode([*limit.close], False)) == (open_text, close)
    assert limit.open[0] in model.marker_ids.values()
    assert limit.close[0] in model.marker_ids.values()
    assert (limit.may_reopen, limit.is_open) == (may_reopen, False)
    assert [model.tokenizer.decode([one])[:1] for one in limit.instead] == instead


def test_a_marker_that_is_no_token_is_refused(folder: Path) -> None:
    model = load_served_model(folder, "tiny", reasoning_parser="think")
    with pytest.raises(RequestError, match="'<think>' of a thought does not begin with a token"):
        plan_reply(model, "", SamplingParams(thinking_token_budget=3))


def test_a_response_template_is_limited_where_it_has_one_text_for_each_marker(tmp_path: Path) -> None:
    made = make_tool_model(tmp_path / "own")
    thought: dict[str, Any] = {"open": "<think>", "close": "</think>"}
    template = {
        "version": 1,
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"reasoning_content": thought, "content": {}},
    }
    file = made / "tokenizer_config.json"

    def planned(prompt: str) -> ThoughtLimit | None:
        file.write_text(json.dumps({**json.loads(file.read_text()), "response_template": template}))
        model = load_served_model(made, "tiny")
        return plan_reply(model, prompt, SamplingParams(thinking_token_budget=3)).params.thought_limit

    begin = "<|im_start|>assistant\n"
    free, opened = planned(begin), planned(f"{begin}<think>\n")
    assert free is not None
    assert opened is not None
    assert (free.is_open, opened.is_open, free.max_tokens, len(free.close)) == (False, True, 3, 1)
    thought["close"] = ["</think>", "</tool_call>"]
    with pytest.raises(RequestError, match="reasoning-parser"):
        planned(begin)
