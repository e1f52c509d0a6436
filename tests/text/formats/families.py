"""How each family's own template writes an assistant's turn, as a short excerpt of it, and what to write with it."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from minisgl.text.chat_template import ChatTemplate
from minisgl.text.formats.events import CallArguments, Content, Event, Reasoning
from minisgl.text.formats.parser import new_parser
from minisgl.text.formats.table import CALLS, HARMONY, THOUGHTS, Format

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "opts": {"type": "object"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"type": ["string", "null"]},
        "flag": {"type": "boolean"},
    },
    "required": ["city"],
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS},
    },
    {
        "type": "function",
        "function": {
            "name": "run-code",
            "description": "Runs it.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string"}},
                "required": ["code"],
            },
        },
    },
    {"type": "function", "function": {"name": "ping", "description": "Pings.", "parameters": {}}},
]
WEATHER = {
    "city": 'Köln {"x"} ]) 🎉',
    "days": -3,
    "opts": {"k": [1, {"z": "}"}], "t": True, "e": 1.5},
    "tags": ["a", "b}"],
    "note": None,
    "flag": False,
}
CODE = {"code": 'if a < b and c > {}:\n\tprint("}")\n'}
PLAIN_CODE = {"code": "if a < b and c > {}: print(1)"}
THOUGHT, TEXT, AFTER = "Should I? {no} <b>\n\nYes.", "Let me look [1] {see}.", "And then {} it was over."


class Family(NamedTuple):
    """A row of the table with the excerpt of a template."""

    format: Format
    begin: str  # the generation prompt
    turn: str  # jinja: what follows it; `m` is the message
    end: str = ""
    after: str = "\n\n{}"  # where text stands that follows the calls
    calls: tuple[tuple[str, dict[str, Any]], ...] = (
        ("get_weather", WEATHER),
        ("run-code", CODE),
        ("ping", {}),
    )

    def reply(self, message: dict[str, Any]) -> str:
        """The model's reply that is this message."""
        template = ChatTemplate(self.source, {})
        user = {"role": "user", "content": "Hi"}
        prompt = template.render([user])
        assert prompt.endswith(self.begin)
        whole = template.render([user, {"role": "assistant", "content": "", **message}], False)
        return whole.removeprefix(prompt).removesuffix(self.end)

    @property
    def source(self) -> str:
        """The chat template."""
        begin = json.dumps(self.begin, ensure_ascii=False)
        return (
            "{% for m in messages %}{% if m.role == 'assistant' %}{{ " + begin + " }}" + self.turn
            + self.end + "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ " + begin + " }}{% endif %}"
        )  # fmt: skip

    def message(self, thinks: bool = True) -> dict[str, Any]:
        """A message with everything."""
        calls = [
            {
                "id": f"call{rank:05}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for rank, (name, arguments) in enumerate(self.calls)
        ]
        thought = (
            {"reasoning_content": THOUGHT} if thinks and (self.format.thought or self.format.channels) else {}
        )
        return {"role": "assistant", "content": TEXT, "tool_calls": calls, **thought}


def form(calls: str, thought: str | None = "think") -> Format:
    return Format(name=calls, calls=CALLS[calls], thought=THOUGHTS[thought] if thought else None)


THINK = (
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
)
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
PYTHON = "{% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}"
PYTHONIC = EACH + "{{ f.name }}(" + PYTHON + ")"
GEMMA_VALUE = (
    "{% macro val(a) %}{% if a is string %}{{ q + a + q }}{% elif a is boolean %}{{ 'true' if a else 'false' }}"
    "{% elif a is mapping %}{{ '{' }}{% for k, v in a | dictsort %}{{ k }}:{{ val(v) }}{{ ',' if not loop.last }}"
    "{% endfor %}{{ '}' }}{% elif a is sequence %}[{% for v in a %}{{ val(v) }}{{ ',' if not loop.last }}"
    "{% endfor %}]{% else %}{{ a }}{% endif %}{% endmacro %}"
)
FAMILIES = {
    "hermes": Family(
        form("hermes"),
        "<|im_start|>assistant\n",
        THINK + EACH + "{{ '\n<tool_call>\n{\"name\": \"' + f.name + '\", \"arguments\": ' }}{{ f.arguments | tojson }}"
        "{{ '}\n</tool_call>' }}{% endfor %}",
        "<|im_end|>\n",
    ),
    "qwen3_coder": Family(
        form("qwen3_coder"),
        "<|im_start|>assistant\n<think>\n",
        "{{ m.reasoning_content }}\n</think>\n\n{{ m.content + '\n' if m.content }}" + EACH + "{{ '\n<tool_call>\n<function=' + f.name + '>\n' }}"
        "{% for k, v in f.arguments.items() %}{{ '<parameter=' + k + '>\n' }}"
        "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
        "{{ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}",
        "<|im_end|>\n",
    ),
    "llama3_json": Family(
        form("llama3_json", None),
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "{{ m.content }}" + EACH + "{{ '{\"name\": \"' + f.name + '\", \"parameters\": ' }}{{ f.arguments | tojson }}{{ '}' }}"
        "{% if not loop.last %}; {% endif %}{% endfor %}",
        "<|eot_id|>",
    ),
    "mistral": Family(
        form("mistral", None),
        "[/INST]",
        "{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS][" + EACH + "{% set out = f | tojson %}{{ out[:-1] }}"
        '{{ \', "id": "\' + c.id + \'"}\' }}{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}',
        "</s>",
    ),
    "mistral_args": Family(
        form("mistral_args", "mistral"),
        "[/INST]",
        "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}"
        + EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
        "</s>",
    ),
    "deepseek_v3": Family(
        form("deepseek_v3"),
        "<｜Assistant｜>",
        THINK + "<｜tool▁calls▁begin｜>" + EACH + "<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ f.name + '\n```json\n' }}"
        "{{ f.arguments + '\n```' }}<｜tool▁call▁end｜>{{ '\n' if not loop.last }}{% endfor %}<｜tool▁calls▁end｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "deepseek_v31": Family(
        form("deepseek_v31"),
        "<｜Assistant｜><think>",
        "{{ m.reasoning_content }}</think>{{ m.content }}<｜tool▁calls▁begin｜>" + EACH
        + "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "deepseek_v32": Family(
        form("deepseek_v32"),
        "<｜Assistant｜><think>",
        "{{ m.reasoning_content }}</think>{{ m.content }}\n\n<｜DSML｜function_calls>\n" + EACH
        + "<｜DSML｜invoke name=\"{{ f.name + '\">\n' }}{% for k, v in f.arguments.items() %}"
        "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
        "{{ v if v is string else v | tojson }}{{ '</｜DSML｜parameter>\n' }}{% endfor %}{{ '</｜DSML｜invoke>\n' }}"
        "{% endfor %}</｜DSML｜function_calls>",
        "<｜end▁of▁sentence｜>",
    ),
    "glm45": Family(
        form("glm45"),
        "<|assistant|>",
        "{{ '\n<think>' + m.reasoning_content + '</think>\n' if m.reasoning_content }}{{ m.content }}" + EACH
        + "{{ '\n<tool_call>' + f.name + '\n' }}{% for k, v in f.arguments.items() %}{{ '<arg_key>' + k + '</arg_key>\n' }}"
        "<arg_value>{{ v if v is string else v | tojson }}{{ '</arg_value>\n' }}{% endfor %}</tool_call>{% endfor %}",
        "<|user|>",
    ),
    "gemma4": Family(
        form("gemma4", "gemma4"),
        "<|turn>model\n",
        "{% set q = '<|\"|>' %}" + GEMMA_VALUE.replace("{{ q +", "{{ '<|\"|>' +").replace("+ q }}", "+ '<|\"|>' }}")
        + "{% if m.reasoning_content %}<|channel>thought\n{{ m.reasoning_content }}\n<channel|>{% endif %}{{ m.content }}"
        + EACH + "<|tool_call>call:{{ f.name }}{{ val(f.arguments) }}<tool_call|>{% endfor %}",
        "<turn|>\n",
    ),
    "functiongemma": Family(
        form("functiongemma", None),
        "<start_of_turn>model\n",
        GEMMA_VALUE.replace("{{ q +", "{{ '<escape>' +").replace("+ q }}", "+ '<escape>' }}")
        + "{{ m.content }}" + EACH
        + "<start_function_call>call:{{ f.name }}{{ val(f.arguments) }}<end_function_call>{% endfor %}",
        "<end_of_turn>\n",
    ),
    "gemma3": Family(
        form("gemma3", None),
        "<start_of_turn>model\n",
        "{{ m.content }}{{ '\n```tool_code\n' }}" + PYTHONIC + "{{ '\n' }}{% endfor %}```",
        "<end_of_turn>\n",
    ),
    "pythonic": Family(
        form("pythonic", None),
        "<|header_start|>assistant<|header_end|>\n\n",
        "{{ m.content }}[" + PYTHONIC + "{{ ', ' if not loop.last }}{% endfor %}]",
        "<|eot|>",
    ),
    "olmo3": Family(
        form("olmo3"),
        "<|im_start|>assistant\n<think>",
        "{{ m.reasoning_content }}</think>\n{{ m.content }}<function_calls>\n" + EACH + "{{ f.name }}("
        "{% for k, v in f.arguments.items() %}{{ k }}={% if v is string %}{{ \"'\" + v + \"'\" }}{% else %}{{ v | tojson }}"
        "{% endif %}{{ ', ' if not loop.last }}{% endfor %}){{ '\n' if not loop.last }}{% endfor %}{{ '\n</function_calls>' }}",
        "<|im_end|>\n",
        calls=(("get_weather", WEATHER), ("run-code", PLAIN_CODE), ("ping", {})),
    ),
    "harmony": Family(
        HARMONY,
        "<|start|>assistant",
        "{% if m.reasoning_content %}<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|><|start|>assistant{% endif %}"
        "<|channel|>commentary<|message|>{{ m.content }}<|end|>" + EACH
        + "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>"
        "{% endfor %}",
        after="<|start|>assistant<|channel|>final<|message|>{}<|return|>",
    ),
}  # fmt: skip
"""Row of the table -> its excerpt."""


def merged(events: Iterable[Event]) -> list[Event]:
    """The events with neighbours of the same kind joined: what all ways to cut a text must agree on."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            found[-1] = CallArguments(last.call, last.text + event.text)
        else:
            found.append(event)
    return found


def parse(family: Family, pieces: Iterable[str], tools: list[dict[str, Any]] | None = TOOLS) -> list[Event]:
    """The merged events of a reply that arrives in these pieces."""
    parser = new_parser(family.format, prompt="[user]Hi" + family.begin, tools=tools)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merged([*events, *parser.finish()])
