# pyright: reportMissingImports=false
"""openai-agents by both of its APIs: tools and their answers, output types, handoffs, streams."""

import asyncio
import os
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from script import MODEL as SCRIPTED
from script import URL as SCRIPTED_URL
from script import calls, say

set_tracing_disabled(True)
THOUGHT = "<think>\nhm\n</think>\n\n"
ASK = "Paint the wall."


class Wall(BaseModel):
    colour: Literal["red", "blue"]
    width: int = Field(ge=1, le=9)


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: sunny"


@function_tool
def paint(colour: Literal["red", "blue"], width: int) -> str:
    """Paints a wall."""
    return f"{colour} {width}"


async def run(agent: Agent[Any], ask: str, is_streamed: bool) -> Any:
    """The run's result."""
    if not is_streamed:
        return await Runner.run(agent, ask)
    result = Runner.run_streamed(agent, ask)
    kinds = [event.type async for event in result.stream_events()]
    assert kinds.count("raw_response_event") > 3, kinds
    return result


def outputs(result: Any) -> list[str]:
    """What the tools gave."""
    return [item.output for item in result.new_items if item.type == "tool_call_output_item"]


async def check(api: str, kind: Any) -> None:
    client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
    model = kind(model=os.environ["MODEL"], openai_client=client)
    scripted = kind(
        model=SCRIPTED, openai_client=AsyncOpenAI(base_url=SCRIPTED_URL, api_key="none", max_retries=0)
    )
    greedy = ModelSettings(temperature=0, max_tokens=60)
    for choice in ("required", "paint"):
        settings = greedy.resolve(ModelSettings(tool_choice=choice, parallel_tool_calls=False))
        agent: Agent[Any] = Agent(
            name="painter",
            instructions="You paint.",
            model=model,
            model_settings=settings,
            tools=[paint],
            tool_use_behavior="stop_on_first_tool",
        )
        whole, streamed = [await run(agent, ASK, is_streamed) for is_streamed in (False, True)]
        assert outputs(whole) == outputs(streamed) == [whole.final_output]
        assert whole.final_output.split()[0] in ("red", "blue")
    print(f"ok: required and named tools, whole and streamed, by {api}")

    maker: Agent[Any] = Agent(name="maker", model=model, model_settings=greedy, output_type=Wall)
    walls = [(await run(maker, ASK, is_streamed)).final_output for is_streamed in (False, True)]
    assert isinstance(walls[0], Wall)
    assert walls[0] == walls[1]
    print(f"ok: an output type, whole and streamed, by {api}")

    wall = Wall(colour="red", width=3)
    first = calls(("weather", {"city": "Rome"}), ("paint", wall.model_dump()), before=THOUGHT + "Let me see.")
    second = calls(("weather", {"city": "Oslo"}))
    for is_streamed in (False, True):
        agent = Agent(name="painter", model=scripted, tools=[weather, paint])
        result = await run(agent, say(first, second, "Done."), is_streamed)
        assert result.final_output == "Done."
        assert outputs(result) == ["Rome: sunny", "red 3", "Oslo: sunny"], outputs(result)
        agent = Agent(name="painter", model=scripted, tools=[weather], output_type=Wall)
        result = await run(agent, say(second, wall.model_dump_json()), is_streamed)
        assert (result.final_output, outputs(result)) == (wall, ["Oslo: sunny"])
        boss: Agent[Any] = Agent(name="boss", model=scripted, handoffs=[agent])
        handoff = calls(("transfer_to_painter", {}))
        result = await run(boss, say(handoff, second, wall.model_dump_json()), is_streamed)
        assert (result.final_output, result.last_agent.name) == (wall, "painter")
    print(f"ok: two calls, one more, tools beside an output type, a handoff, whole and streamed, by {api}")


for api, kind in {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}.items():
    asyncio.run(check(api, kind))
