"""The engines that bench/clients serves its checks with: they start, answer as they are told, and go on."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

from running_server import RunningServer
from tool_model import make_tool_model

CLIENTS = Path(__file__).parents[2] / "bench" / "clients"


def script(name: str) -> ModuleType:
    """A script of bench/clients, which is no package."""
    spec = importlib.util.spec_from_file_location(name, CLIENTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chat(server: RunningServer, *contents: str, **fields: object) -> dict:
    messages = [{"role": "user", "content": content} for content in contents]
    body = {"model": "tiny", "messages": messages, "max_tokens": 2000, **fields}
    status, answer, _ = server.call("/v1/chat/completions", body)
    assert status == 200, answer
    return answer["choices"][0]


def test_the_scripted_engine_says_one_reply_after_the_other(tmp_path: Path) -> None:
    with script("scripted_engine").scripted_server(tmp_path) as server:
        server.ready()
        ask = "[[say]] first [[then]] second [[end]]"
        said = [chat(server, text)["message"]["content"] for text in (ask, ask, "hello", ask)]
        assert said == ["first", "second", "ok", "first"]


def test_the_agents_engine_calls_the_shell_for_each_step_and_ends(tmp_path: Path) -> None:
    agents = script("agent_clis")
    model = make_tool_model(tmp_path / "tiny", context=agents.CONTEXT)
    worker = [sys.executable, str(CLIENTS / "agent_clis.py"), "--engine"]
    shell, parameter = next(iter(agents.SHELLS.items()))
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": shell, "parameters": schema}}]
    with RunningServer(model, worker=worker) as server:
        server.ready()
        (call,) = chat(server, "do it", tools=tools)["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {parameter: agents.STEPS[0]}
