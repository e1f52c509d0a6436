# pyright: reportMissingImports=false
"""dspy: its adapters, its own tool calls, ReAct; by chat completions and responses."""

import json
import os
from typing import Any, Literal

import dspy
from script import MODEL as SCRIPTED
from script import URL as SCRIPTED_URL
from script import calls, say

dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)


class Paint(dspy.Signature):
    """Choose how to paint."""

    task: str = dspy.InputField()
    colour: Literal["red", "blue"] = dspy.OutputField()
    is_large: bool = dspy.OutputField()


def weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: sunny"


class Ask(dspy.Signature):
    """Call tools."""

    task: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    tool_calls: dspy.ToolCalls = dspy.OutputField()


class Served(dspy.LM):
    """dspy asks its own list of models what a model can do, and this one is not in it."""

    supports_function_calling = True
    supports_response_schema = True
    supported_params = frozenset({"response_format", "tools", "tool_choice", "max_tokens", "temperature"})


def model(name: str, url: str, kind: str, **fields: Any) -> dspy.LM:
    return Served(f"openai/{name}", api_base=url, api_key="none", model_type=kind, num_retries=0, **fields)


RED = {"colour": "red", "is_large": True}
XML = "".join(f"<{name}>\n{value}\n</{name}>\n" for name, value in RED.items())
MARKED = "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in RED.items()) + "[[ ## completed ## ]]"
ANSWERS = {dspy.ChatAdapter: MARKED, dspy.JSONAdapter: json.dumps(RED), dspy.XMLAdapter: XML}
STEPS = (
    {"next_thought": "I ask.", "next_tool_name": "weather", "next_tool_args": {"city": "Rome"}},
    {"next_thought": "Done.", "next_tool_name": "finish", "next_tool_args": {}},
    {"reasoning": "It says so.", "answer": "sunny"},
)

for kind in ("chat", "responses"):
    real = model(os.environ["MODEL"], os.environ["BASE_URL"], kind, temperature=0, max_tokens=60)
    scripted = model(SCRIPTED, SCRIPTED_URL, kind, max_tokens=2000)
    with dspy.context(lm=real, adapter=dspy.JSONAdapter()):
        made = dspy.Predict(Paint)(task="Paint the wall.")
    assert made.colour in ("red", "blue")
    assert isinstance(made.is_large, bool)
    print(f"ok: JSONAdapter, by {kind}")

    for adapter, answer in ANSWERS.items():
        with dspy.context(lm=scripted, adapter=adapter()):
            made = dspy.Predict(Paint)(task=say(answer))
        assert (made.colour, made.is_large) == ("red", True), made
        print(f"ok: {adapter.__name__} with the scripted engine, by {kind}")

    two = calls(("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"}))
    for adapter in (dspy.ChatAdapter(use_native_function_calling=True), dspy.JSONAdapter()):
        with dspy.context(lm=scripted, adapter=adapter):
            made = dspy.Predict(Ask)(task=say(two), tools=[dspy.Tool(weather)]).tool_calls.tool_calls
        assert [(one.name, one.args["city"]) for one in made] == [("weather", "Rome"), ("weather", "Oslo")]
    with dspy.context(lm=scripted, adapter=dspy.JSONAdapter()):
        react = dspy.ReAct("question -> answer", tools=[weather])
        ended = react(question=say(*(json.dumps(step) for step in STEPS)))
    assert (ended.answer, ended.trajectory["observation_0"]) == ("sunny", "Rome: sunny"), ended
    print(f"ok: native calls of tools, ReAct, by {kind}")
