"""The openai package's Responses API: whole and streamed, structured output, tools, items sent back."""

import json
import os
from typing import Any

import openai

MODEL = os.environ["MODEL"]
client: Any = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
ASK = {"model": MODEL, "input": "Name three colours.", "instructions": "You answer briefly."}
GREEDY = {**ASK, "temperature": 0, "max_output_tokens": 24}


def refusal(**fields: Any) -> Any:
    """The error of a call that is refused; None: it is answered."""
    try:
        client.responses.create(**fields)
    except openai.APIStatusError as error:
        return error
    return None


whole = client.responses.create(**GREEDY)
assert whole.output_text
assert whole.status in ("completed", "incomplete")
assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
print("ok: a response")

with client.responses.stream(**GREEDY) as stream:
    events = list(stream)
    final = stream.get_final_response() if whole.status == "completed" else events[-1].response
assert [event.sequence_number for event in events] == list(range(len(events)))
deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
assert "".join(deltas) == final.output_text == whole.output_text
assert len(deltas) > 3
print("ok: a streamed response is the whole one")

turns = [
    {"role": "user", "content": ASK["input"]},
    *(item.model_dump(exclude_unset=True) for item in whole.output),
    {"role": "developer", "content": "You answer in one word."},
    {"role": "user", "content": [{"type": "input_text", "text": "One more?"}]},
]
assert client.responses.create(**{**GREEDY, "input": turns}).output_text
print("ok: items sent back")

schema = {
    "type": "object",
    "properties": {"colours": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3}},
    "required": ["colours"],
    "additionalProperties": False,
}
form = {"type": "json_schema", "name": "colours", "schema": schema, "strict": True}
made = client.responses.create(**ASK, max_output_tokens=200, text={"format": form})
assert set(json.loads(made.output_text)["colours"]) <= {"red", "blue"}
print("ok: structured output")

tools = [
    {"type": "web_search"},
    {"type": "function", "name": "paint", "description": "Paints.", "parameters": schema, "strict": True},
]
asked = {**ASK, "tools": tools, "tool_choice": "required", "max_output_tokens": 200, "temperature": 0}
if (error := refusal(**asked)) is not None:
    assert "tools can't be used" in str(error), error
    print("ok: tools are refused, as this model is not told of them")
else:
    called = client.responses.create(**asked)
    call = called.output[-1]
    assert (call.type, call.name) == ("function_call", "paint")
    assert set(json.loads(call.arguments)["colours"]) <= {"red", "blue"}
    streamed = list(client.responses.create(**asked, stream=True))
    done = next(event for event in streamed if event.type == "response.function_call_arguments.done")
    assert done.arguments == call.arguments
    turns = [
        {"role": "user", "content": ASK["input"]},
        *(item.model_dump(exclude_unset=True) for item in called.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "done"},
    ]
    client.responses.create(**{**asked, "input": turns, "tool_choice": "none", "max_output_tokens": 8})
    print("ok: tools, whole, streamed and sent back")

for name, value in {"store": True, "previous_response_id": "resp_1", "background": True}.items():
    error = refusal(**GREEDY, **{name: value})
    assert (error.status_code, error.param) == (400, name)
print("ok: what would need a memory is refused")
