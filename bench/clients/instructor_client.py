# pyright: reportMissingImports=false
"""instructor: every mode of the APIs that the server has, whole, partial, several objects, asked again."""

import json
import os
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import anthropic
import instructor
import openai
from instructor import Mode
from pydantic import AfterValidator, BaseModel, Field
from script import MODEL as SCRIPTED
from script import URL as SCRIPTED_URL
from script import calls, say

MODEL = os.environ["MODEL"]
URL = os.environ["BASE_URL"]
ASK = [{"role": "user", "content": "Ada is 36 years old and lives in London."}]
THOUGHT = "<think>\nhm\n</think>\n\n"


class Town(BaseModel, extra="forbid"):
    size: Literal["small", "large"]


class Person(BaseModel, extra="forbid"):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=150)
    town: Town


def is_ada(name: str) -> str:
    if name != "Ada":
        raise ValueError("the name must be Ada")
    return name


class Checked(BaseModel):
    name: Annotated[str, AfterValidator(is_ada)]
    age: int


class Weather(BaseModel):
    """The weather of a city."""

    city: str


class IterableWeather(BaseModel):
    """What instructor calls its list of them."""


def openai_client(mode: Mode, url: str = URL) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)


def anthropic_client(mode: Mode, url: str = URL) -> Any:
    url = url.removesuffix("/v1")
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    return instructor.from_anthropic(client, mode=mode)


REAL = {
    Mode.TOOLS: openai_client,
    Mode.TOOLS_STRICT: openai_client,
    Mode.FUNCTIONS: openai_client,
    Mode.JSON_SCHEMA: openai_client,
    Mode.JSON_O1: openai_client,
    Mode.RESPONSES_TOOLS: openai_client,
    Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS: openai_client,
    Mode.ANTHROPIC_TOOLS: anthropic_client,
}
"""Modes whose schema a grammar guarantees."""
CALLED = (
    Mode.TOOLS,
    Mode.TOOLS_STRICT,
    Mode.RESPONSES_TOOLS,
    Mode.ANTHROPIC_TOOLS,
    Mode.ANTHROPIC_REASONING_TOOLS,
)
"""Modes that ask for a call."""
ASKED = {
    **REAL,
    Mode.JSON: openai_client,
    Mode.MD_JSON: openai_client,
    Mode.ANTHROPIC_JSON: anthropic_client,
    Mode.ANTHROPIC_REASONING_TOOLS: anthropic_client,
}
"""All modes, with the scripted engine: also those whose schema only the prompt says."""

for mode, connect in REAL.items():
    call = {"model": MODEL, "messages": ASK, "max_tokens": 100, "max_retries": 0}
    call["extra_body"] = {"temperature": 0}
    client = connect(mode)
    person = client.create(response_model=Person, **call)
    assert isinstance(person, Person), person
    parts = list(client.create_partial(response_model=Person, **call))
    assert Person.model_validate(parts[-1].model_dump()), parts
    assert len(parts) > 3
    print(f"ok: {mode.name}, whole and partial")


def answer(mode: Mode, model: type[BaseModel], *objects: dict[str, Any]) -> str:
    """A reply that has the objects in the way of this mode."""
    if "TOOLS" in mode.name or mode is Mode.FUNCTIONS:
        return calls(*((model.__name__, one) for one in objects), before=THOUGHT)
    text = json.dumps(objects[0])
    return THOUGHT + (f"Here:\n```json\n{text}\n```\n" if mode is Mode.MD_JSON else text)


for mode, connect in ASKED.items():
    client = connect(mode, SCRIPTED_URL)
    replies = [answer(mode, Checked, {"name": name, "age": 36}) for name in ("Bob", "Ada")]
    call = {"model": SCRIPTED, "messages": [{"role": "user", "content": say(*replies)}], "max_tokens": 2000}
    found = client.create(response_model=Checked, max_retries=1, **call)
    assert (found.name, found.age) == ("Ada", 36), found
    print(f"ok: {mode.name}, asked again after an answer that is not valid")

cities = [{"city": "Rome"}, {"city": "Oslo"}]
for mode, connect in {
    Mode.PARALLEL_TOOLS: openai_client,
    Mode.ANTHROPIC_PARALLEL_TOOLS: anthropic_client,
}.items():
    reply = calls(("Weather", cities[0]), ("Checked", {"name": "Ada", "age": 1}), before="Let me see.")
    found = connect(mode, SCRIPTED_URL).create(
        model=SCRIPTED,
        messages=[{"role": "user", "content": say(reply)}],
        max_tokens=2000,
        response_model=Iterable[Weather | Checked],
    )
    assert [one.model_dump() for one in found] == [cities[0], {"name": "Ada", "age": 1}]
    print(f"ok: {mode.name}, two calls")

for mode in (Mode.TOOLS, Mode.JSON, Mode.MD_JSON, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS):
    found = openai_client(mode, SCRIPTED_URL).create_iterable(
        model=SCRIPTED,
        messages=[{"role": "user", "content": say(answer(mode, IterableWeather, {"tasks": cities}))}],
        response_model=Weather,
        stream=True,
    )
    assert [one.model_dump() for one in found] == cities
    print(f"ok: {mode.name}, several objects from one stream")
