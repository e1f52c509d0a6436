"""Grammars of replies, run by llguidance: a thought, then calls or an answer. The parser reads them back."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from small_model import EOS, make_folder
from tokenizers import Tokenizer as FastTokenizer

from minisgl.grammar.compiler import GrammarCompiler
from minisgl.grammar.matcher import GrammarError, Matcher
from minisgl.replies.plan import plan_reply
from minisgl.request import SamplingParams
from minisgl.server.calls.tool_fields import ToolFields, tools_of
from minisgl.server.open_choices import Delta
from minisgl.server.served_model import ServedModel, load_served_model
from minisgl.text.formats.events import Reply, collect

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rom", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time"}},
]
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
NAMED = {"type": "function", "function": {"name": "time"}}
ROM = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
PARIS = ROM.replace("Rom", "Paris")
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Rom"}}'
HARMONY = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
COMMENTARY = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rom"}'
FINAL = "<|channel|>final<|message|>"
SCHEMA = SamplingParams(json_schema={"type": "object", "required": ["a"], "properties": {"a": {"const": 1}}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("grammars") / "model")


@pytest.fixture(scope="module")
def compiler(folder: Path) -> GrammarCompiler:
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    return GrammarCompiler(fast.to_str(), fast.get_vocab_size(), [fast.token_to_id(EOS) or 0])


@cache
def served(folder: Path, calls: str, thought: str) -> ServedModel:
    return load_served_model(folder, "tiny", tool_parser=calls, reasoning_parser=thought)


@pytest.mark.parametrize(
    ("calls", "thought", "prompt", "fields", "params", "good", "bad"),
    [
        ("hermes", "none", "", {"tool_choice": "required"}, None, [ROM, f"{ROM}\n{TIME}"], ["Yes", PARIS]),
        ("hermes", "none", "", {"tool_choice": NAMED}, None, [TIME], [ROM, f"{TIME}\n{TIME}", "no"]),
        ("hermes", "think", "<think>\n", {"tool_choice": "required"}, None, [f"hm</think>\n{ROM}"], [ROM]),
        ("hermes", "think", "", {"tool_choice": "required"}, None, [f"<think>hm</think>{ROM}", ROM], ["Yes"]),
        (
            *("hermes", "think", "", {"parallel_tool_calls": False}, None),
            ["Yes", f"<think>hm</think>Yes\n{PARIS}"],
            [f"{ROM}\n{ROM}"],
        ),
        (
            "hermes",
            "think",
            "",
            {"tools": STRICT},
            None,
            ["Yes", f"Yes {ROM}\n{TIME}"],
            [PARIS, f"Yes {PARIS}"],
        ),
        ("hermes", "think", "", {}, SCHEMA, [f"<think>hm</think>{ROM}", '{"a": 1}'], ["Yes", PARIS]),
        ("none", "think", "<think>", {"tool_choice": "none"}, SCHEMA, ['hm</think>{"a": 1}'], ['{"a": 1}']),
        ("hermes", "none", "", {"tool_choice": "none"}, SCHEMA, ['{"a": 1}'], [ROM]),
        ("llama3_json", "none", "", {"tool_choice": "required"}, None, [LLAMA], ["Yes"]),
        (
            *("harmony", "harmony", "<|start|>assistant", {}, SCHEMA),
            [f'{HARMONY}{FINAL}{{"a": 1}}', HARMONY + COMMENTARY, COMMENTARY],
            ['{"a": 1}', f"{FINAL}Yes"],
        ),
    ],
)
def test_replies_follow_their_grammar_and_are_read_back(
    folder: Path,
    compiler: GrammarCompiler,
    calls: str,
    thought: str,
    prompt: str,
    fields: dict[str, Any],
    params: SamplingParams | None,
    good: list[str],
    bad: list[str],
) -> None:
    model = served(folder, calls, thought)
    asked = tools_of(ToolFields(**{"tools": TOOLS, **fields}))
    plan = plan_reply(model, prompt, params or SamplingParams(), asked)
    assert plan.params.grammar is not None
    grammar = compiler.compile(plan.params.grammar).result()

    def takes(text: str) -> bool:
        try:
            return Matcher.rebuilt(grammar, model.tokenizer.encode(text, False)).may_end
        except GrammarError:
            return False

    for text in good:
        assert takes(text), text
        reply: Reply = collect(plan.reader().read(Delta(0, text, 9, 0, "stop", [7] * 9)))
        assert ("hm" in text) == (reply.reasoning == "hm")
        assert len(reply.calls) == text.count('"name"') + text.count("to=functions")
        assert all(call.complete for call in reply.calls)
        assert reply.content == ('{"a": 1}' if '{"a": 1}' in text else "Yes" if "Yes" in text else "")
    for text in bad:
        assert not takes(text), text
