"""A small model folder whose template has tools, calls and thoughts in the way of Hermes and Qwen."""

from pathlib import Path
from typing import Any

from small_model import make_folder
from tokenizers import AddedToken, Tokenizer

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% elif opened %}<think>\n{% endif %}{% endif %}"
)
ARGUMENTS = '{"city": "R\\u00f6m }{ \\" 好"}'
REPLY = (
    "<think>\nhm, {a}\n</think>\n\nLet me see."
    f'\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
    '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
"""A thought, a text and two calls."""
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def make_tool_model(folder: Path, **knobs: Any) -> Path:
    """Write the folder; `knobs` go to the fake engine."""
    make_folder(folder, template=TEMPLATE, **{"context": 4096, **knobs})
    fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    fast.add_special_tokens([AddedToken(text, special=True) for text in marks])
    fast.save(str(folder / "tokenizer.json"))
    return folder
