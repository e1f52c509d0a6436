# pyright: reportMissingImports=false
"""pydantic-ai by three APIs: tools, its three kinds of structured output, retries, streams."""

import asyncio
import os
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelRetry, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from script import MODEL as SCRIPTED
from script import URL as SCRIPTED_URL
from script import calls, say

THOUGHT = "<think>\nhm\n</think>\n\n"
SETTINGS: Any = {"max_tokens": 80, "extra_body": {"temperature": 0}}


class Wall(BaseModel, extra="forbid"):
    """A wall to paint."""

    colour: Literal["red", "blue"]
    width: int = Field(ge=1, le=9)


def weather(city: str) -> str:
    """The weather of a city."""
    if city == "Nowhere":
        raise ModelRetry("there is no such city")
    return f"{city}: sunny"


def model(api: str, name: str, url: str) -> Any:
    """The model `name`, by this API."""
    if api == "messages":
        provider: Any = AnthropicProvider(base_url=url.removesuffix("/v1"), api_key="none")
        return AnthropicModel(name, provider=provider)
    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    return kind(name, provider=OpenAIProvider(base_url=url, api_key="none"))


async def run(agent: Any, ask: str, is_streamed: bool) -> Any:
    """What the run ends with."""
    if not is_streamed:
        return (await agent.run(ask)).output
    async with agent.run_stream(ask) as result:
        outputs = [output async for output in result.stream_output(debounce_by=None)]
        assert await result.get_output() == outputs[-1]
        return outputs[-1]


async def check(api: str) -> None:
    real = model(api, os.environ["MODEL"], os.environ["BASE_URL"])
    outputs: list[Any] = [ToolOutput(Wall)] + ([NativeOutput(Wall)] if api != "messages" else [])
    for output in outputs:
        agent = Agent(real, output_type=output, model_settings=SETTINGS)
        whole, streamed = [await run(agent, "Paint the wall.", is_streamed) for is_streamed in (False, True)]
        assert isinstance(whole, Wall)
        assert whole == streamed
    print(f"ok: {' and '.join(type(one).__name__ for one in outputs)}, whole and streamed, by {api}")

    scripted = model(api, SCRIPTED, SCRIPTED_URL)
    wall = Wall(colour="red", width=3)
    cities = [calls(("weather", {"city": city}), before=THOUGHT) for city in ("Nowhere", "Rome")]
    two = calls(
        ("weather", {"city": "Oslo"}), ("weather", {"city": "Bern"})
    )  # run_stream takes a text before calls for the end
    ends = {
        "text": (str, "It is sunny.", "It is sunny."),
        "ToolOutput": (ToolOutput(Wall), calls(("final_result", wall.model_dump())), wall),
        "NativeOutput": (NativeOutput(Wall), THOUGHT + wall.model_dump_json(), wall),
        "PromptedOutput": (PromptedOutput(Wall), wall.model_dump_json(), wall),
    }
    if api == "messages":
        del ends["NativeOutput"]
    for name, (output, last, expected) in ends.items():
        for is_streamed in (False, True):
            seen: list[str] = []

            def noted(city: str, seen: list[str] = seen) -> str:
                seen.append(city)
                return weather(city)

            agent = Agent(scripted, output_type=output)
            agent.tool_plain(name="weather", retries=2)(lambda city: noted(city))
            found = await run(agent, say(*cities, two, last), is_streamed)
            assert found == expected, (name, found)
            assert [*seen[:2], *sorted(seen[2:])] == ["Nowhere", "Rome", "Bern", "Oslo"], (name, seen)
        print(f"ok: tools, one asked again, then {name}, whole and streamed, by {api}")


for api in ("chat", "responses", "messages"):
    asyncio.run(check(api))
