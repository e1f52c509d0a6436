# pyright: reportMissingImports=false
"""langchain-openai: invoke, stream, batch, logprobs, tools, structured output; both APIs."""

import os
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field
from script import MODEL as SCRIPTED
from script import URL as SCRIPTED_URL
from script import calls, say

WHERE = {"model": os.environ["MODEL"], "base_url": os.environ["BASE_URL"], "api_key": "none"}
chat = ChatOpenAI(**WHERE, temperature=0, max_tokens=24, stream_usage=True)
ASK = [("system", "You are brief."), ("human", "Name three colours.")]

whole = chat.invoke(ASK)
assert whole.content
assert whole.usage_metadata["output_tokens"] > 0
print("ok: invoke")

chunks = list(chat.stream(ASK))
assert "".join(chunk.content for chunk in chunks) == whole.content
assert any(chunk.usage_metadata for chunk in chunks)
print("ok: stream is the whole one")

assert [one.content for one in chat.batch([ASK, ASK])] == [whole.content] * 2
print("ok: batch")

entries = chat.bind(logprobs=True).invoke(ASK).response_metadata["logprobs"]["content"]
assert len(entries) == whole.usage_metadata["output_tokens"]
print("ok: logprobs")

assert OpenAI(**WHERE, temperature=0, max_tokens=8).invoke("One, two,")
print("ok: completions")


class Wall(BaseModel, extra="forbid"):
    """A wall to paint."""

    colour: Literal["red", "blue"]
    width: int = Field(ge=1, le=9)


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: sunny"


paint = tool(args_schema=Wall)(lambda colour, width: f"{colour} {width}")
paint.name, paint.description = "paint", "Paints a wall."
apis: dict[str, dict[str, Any]] = {"chat": {"max_tokens": 60}, "responses": {"use_responses_api": True}}
for api, fields in apis.items():
    chat = ChatOpenAI(**WHERE, temperature=0, **fields)
    for choice in ("required", "paint"):
        bound = chat.bind_tools([paint], tool_choice=choice, parallel_tool_calls=False)
        (call,) = bound.invoke(ASK).tool_calls
        assert call["name"] == "paint"
        assert Wall.model_validate(call["args"])
    chunks = list(bound.stream(ASK))
    assert sum(chunks[1:], chunks[0]).tool_calls[0]["args"] == call["args"]
    assert sum(1 for chunk in chunks if chunk.tool_call_chunks) > 3
    print(f"ok: bind_tools with required and a name, whole and streamed, by {api}")

    for method in ("function_calling", "json_schema"):
        made = chat.with_structured_output(Wall, method=method, include_raw=True)
        answer = made.invoke(ASK)
        assert isinstance(answer["parsed"], Wall), answer
        assert list(chat.with_structured_output(Wall, method=method).stream(ASK))[-1] == answer["parsed"]
    strict = chat.with_structured_output(Wall.model_json_schema(), method="json_schema", strict=True)
    assert Wall.model_validate(strict.invoke(ASK))
    print(f"ok: with_structured_output by function_calling and json_schema, whole and streamed, by {api}")

    scripted = ChatOpenAI(
        model=SCRIPTED, base_url=SCRIPTED_URL, api_key="none", **{**fields, "max_tokens": 2000}
    )
    wall = Wall(colour="red", width=3)
    made = scripted.with_structured_output(Wall, method="json_mode")
    ask = say(f"<think>\nhm\n</think>\n\n{wall.model_dump_json()}")
    assert made.invoke(ask) == list(made.stream(ask))[-1] == wall
    print(f"ok: with_structured_output by json_mode, by {api}")

    both = scripted.bind_tools([weather, paint])
    reply = calls(("weather", {"city": "Rome"}), ("paint", wall.model_dump()), before="Let me see.")
    for is_streamed in (False, True):
        turns: list[Any] = [HumanMessage(say(reply, "It is sunny."))]
        for _ in range(2):
            chunks = list(both.stream(turns)) if is_streamed else [both.invoke(turns)]
            turns.append(sum(chunks[1:], chunks[0]))
            for call in turns[-1].tool_calls:
                done = {"weather": weather, "paint": paint}[call["name"]].invoke(call["args"])
                turns.append(ToolMessage(done, tool_call_id=call["id"]))
        assert [one.type for one in turns[2:4]] == ["tool", "tool"], turns
        assert [one.content for one in turns[2:4]] == ["Rome: sunny", "red 3"]
        assert turns[-1].text == "It is sunny."
    print(f"ok: two calls that the model chooses and their answers, whole and streamed, by {api}")
