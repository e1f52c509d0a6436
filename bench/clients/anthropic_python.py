"""The anthropic package: messages whole and streamed, stop sequences, structured output, tools, counts."""

import json
import os
from typing import Any

import anthropic  # pyright: ignore[reportMissingImports] - installed in an environment of its own

MODEL = os.environ["MODEL"]
URL = os.environ["BASE_URL"].removesuffix("/v1")
client: Any = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
ASK = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Name three colours."}],
    "extra_body": {"temperature": 0},
}
SYSTEM = [{"type": "text", "text": "You answer briefly. " * 10, "cache_control": {"type": "ephemeral"}}]


def refusal(**fields: Any) -> Any:
    """The error of a call that is refused; None: it is answered."""
    try:
        client.messages.create(**fields)
    except anthropic.APIStatusError as error:
        return error
    return None


whole = client.messages.create(**ASK, system=SYSTEM, max_tokens=24)
text = whole.content[0].text
assert text
assert whole.role == "assistant"
assert whole.stop_reason in ("end_turn", "max_tokens")
count = client.messages.count_tokens(model=MODEL, messages=ASK["messages"], system=SYSTEM)
usage = whole.usage
assert usage.input_tokens + usage.cache_read_input_tokens == count.input_tokens
print("ok: messages and count_tokens")

with client.messages.stream(**ASK, system=SYSTEM, max_tokens=24) as stream:
    pieces = list(stream.text_stream)
    final = stream.get_final_message()
assert "".join(pieces) == text == final.content[0].text
assert len(pieces) > 3
assert final.usage.output_tokens == usage.output_tokens
assert final.usage.cache_read_input_tokens > 0
print("ok: streamed messages are the whole ones, with cached tokens")

billed = [
    client.messages.create(
        **ASK,
        system=[{"type": "text", "text": f"x-anthropic-billing-header: cch={digest};"}, *SYSTEM],
        max_tokens=24,
    )
    for digest in ("a1b2c", "d3e4f")
]
assert [one.content[0].text for one in billed] == [text, text]
assert billed[1].usage.cache_read_input_tokens == final.usage.cache_read_input_tokens
print("ok: the billing header does not reach the model")

stopped = client.messages.create(**ASK, system=SYSTEM, max_tokens=24, stop_sequences=["\x00", text[5:8]])
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[5:8])
assert stopped.content[0].text == text[: text.index(text[5:8])]
print("ok: stop sequences")

schema = {
    "type": "object",
    "properties": {"colours": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3}},
    "required": ["colours"],
    "additionalProperties": False,
}
made = client.messages.create(
    **ASK, max_tokens=200, output_config={"format": {"type": "json_schema", "schema": schema}}
)
assert set(json.loads(made.content[0].text)["colours"]) <= {"red", "blue"}
print("ok: structured output")

tools = [{"name": "paint", "description": "Paints a wall.", "input_schema": schema}]
asked = {**ASK, "tools": tools, "tool_choice": {"type": "any"}, "max_tokens": 200}
if (error := refusal(**asked)) is not None:
    assert "tools can't be used" in str(error), error
    print("ok: tools are refused, as this model is not told of them")
else:
    called = client.messages.create(**asked)
    use = called.content[-1]
    assert (called.stop_reason, use.type, use.name) == ("tool_use", "tool_use", "paint")
    assert set(use.input["colours"]) <= {"red", "blue"}
    with client.messages.stream(**asked) as stream:
        again = stream.get_final_message()
    assert (again.content[-1].name, again.content[-1].input) == (use.name, use.input)
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "done"}]
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": [block.model_dump() for block in called.content]},
        {"role": "user", "content": results},
    ]
    last = client.messages.create(model=MODEL, messages=turns, tools=tools, max_tokens=8)
    assert last.stop_reason in ("end_turn", "max_tokens", "tool_use")
    print("ok: tools, whole, streamed and sent back")

prefilled = [*ASK["messages"], {"role": "assistant", "content": "Red"}]
for kind, fields in (
    (anthropic.NotFoundError, {"model": "other"}),
    (anthropic.BadRequestError, {"extra_body": {"temperature": -1}}),
    (anthropic.BadRequestError, {"messages": prefilled}),
):
    error = refusal(**{**ASK, **fields}, max_tokens=8)
    assert isinstance(error, kind), error
    assert error.body["type"] == "error", error.body
print("ok: errors")
