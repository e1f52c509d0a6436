# pyright: reportMissingImports=false
"""litellm: chat streamed and whole, text completion, an error as its own class; tools and structured output.

These by its providers openai and anthropic, and by its Responses API.
"""

import json
import os
import sys
from typing import Any, Literal

from pydantic import BaseModel, Field
from script import MODEL as SCRIPTED
from script import URL as SCRIPTED_URL
from script import calls, say

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices
import litellm

WHERE = {"model": "openai/" + os.environ["MODEL"], "api_base": os.environ["BASE_URL"], "api_key": "none"}
TEXT = {**WHERE, "model": "text-completion-openai/" + os.environ["MODEL"]}
ASK = {"messages": [{"role": "user", "content": "Name three colours."}], "temperature": 0, "max_tokens": 24}

whole = litellm.completion(**WHERE, **ASK)
text = whole.choices[0].message.content
assert text
assert whole.usage.completion_tokens > 0
print("ok: chat")

chunks = list(litellm.completion(**WHERE, **ASK, stream=True, stream_options={"include_usage": True}))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == whole.usage.completion_tokens
print("ok: streamed chat is the whole one")

assert litellm.text_completion(**TEXT, prompt="One, two,", max_tokens=8, temperature=0).choices[0].text
print("ok: completions")

try:
    litellm.completion(**WHERE, **{**ASK, "temperature": -1})
except litellm.BadRequestError:
    print("ok: errors")
else:
    sys.exit("a negative temperature was not refused")


class Wall(BaseModel, extra="forbid"):
    colour: Literal["red", "blue"]
    width: int = Field(ge=1, le=9)


def function(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PAINT, WEATHER = function("paint", Wall.model_json_schema()), function("weather", CITY)
NAMED = {"type": "function", "function": {"name": "paint"}}
ANTHROPIC = {
    **WHERE,
    "model": "anthropic/" + os.environ["MODEL"],
    "api_base": os.environ["BASE_URL"].removesuffix("/v1"),
}
THOUGHT = "<think>\nhm\n</think>\n\n"


def joined(**call: Any) -> Any:
    """The message of a streamed answer."""
    chunks = list(litellm.completion(**call, stream=True))
    assert len(chunks) > 3
    built: Any = litellm.stream_chunk_builder(chunks)
    return built.choices[0]


for where in (WHERE, ANTHROPIC):
    provider = where["model"].partition("/")[0]
    ask = {**where, **ASK, "max_tokens": 100}
    for choice in ("required", NAMED):
        call = {**ask, "tools": [PAINT], "tool_choice": choice}
        if choice == "required":
            call["parallel_tool_calls"] = False
        whole, streamed = litellm.completion(**call).choices[0], joined(**call)
        for one in (whole, streamed):
            (made,) = one.message.tool_calls
            assert (one.finish_reason, made.function.name) == ("tool_calls", "paint")
            assert Wall.model_validate_json(made.function.arguments)
        assert json.loads(made.function.arguments) == json.loads(
            whole.message.tool_calls[0].function.arguments
        )
    print(f"ok: required and named tools, whole and streamed, by {provider}")

    whole, streamed = litellm.completion(**ask, response_format=Wall), joined(**ask, response_format=Wall)
    wall = Wall.model_validate_json(whole.choices[0].message.content)
    assert wall == Wall.model_validate_json(streamed.message.content)
    print(f"ok: a model as response_format, whole and streamed, by {provider}")

    url = SCRIPTED_URL if where is WHERE else SCRIPTED_URL.removesuffix("/v1")
    scripted = {**where, "model": f"{provider}/{SCRIPTED}", "api_base": url, "max_tokens": 2000}
    two = calls(("weather", {"city": "Rome"}), ("paint", {}), before=THOUGHT + "Let me see.")
    for is_streamed in (False, True):
        turns: list[Any] = [{"role": "user", "content": say(two, "Done.")}]
        call = {**scripted, "messages": turns, "tools": [WEATHER, PAINT]}
        one = joined(**call) if is_streamed else litellm.completion(**call).choices[0]
        message = one.message
        assert one.finish_reason == "tool_calls"
        assert message.reasoning_content.strip() == "hm", message
        assert message.content.strip() == "Let me see.", message
        assert [made.function.name for made in message.tool_calls] == ["weather", "paint"]
        assert [json.loads(made.function.arguments) for made in message.tool_calls] == [{"city": "Rome"}, {}]
        turns.append(message.model_dump())
        turns += [{"role": "tool", "tool_call_id": made.id, "content": "1"} for made in message.tool_calls]
        one = joined(**call) if is_streamed else litellm.completion(**call).choices[0]
        assert one.message.content == "Done."
    print(f"ok: a thought, two calls that the model chooses, whole and streamed, by {provider}")

form = {"type": "json_schema", "name": "wall", "schema": Wall.model_json_schema(), "strict": True}
tool = {"type": "function", **PAINT["function"]}
ask = {**WHERE, "input": "Paint the wall.", "temperature": 0, "max_output_tokens": 100}
for fields in (
    {"text": {"format": form}},
    {"tools": [tool], "tool_choice": {"type": "function", "name": "paint"}},
):
    whole = litellm.responses(**ask, **fields)
    *_, last = litellm.responses(**ask, **fields, stream=True)
    assert last.type == "response.completed"
    for one in (whole, last.response):
        item = one.output[-1]
        text = item.arguments if "tools" in fields else item.content[0].text
        assert Wall.model_validate_json(text)
print("ok: a named tool and structured output, whole and streamed, by responses")
