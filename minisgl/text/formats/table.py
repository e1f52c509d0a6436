"""How families write thoughts and calls: one row a format, read by the parser, the chooser and the grammar.

Texts are written here as a model's template writes them. The parser is lenient about whitespace between the
parts; the grammar is not.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Thought:
    """How a thought is marked. It opens at the reply's begin, or the prompt has opened it already."""

    open: str
    close: str
    anywhere: bool = False
    """The marker is a special token and opens a thought also after text."""


@dataclass(frozen=True, kw_only=True)
class JsonBody:
    """A call is one JSON object that holds name and arguments."""

    name_key: str = "name"
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    """The first one is what the template writes; the others are read, too."""
    first_keys: tuple[str, ...] = ()
    """Not empty: an object that begins with another key is no call."""
    may_have_id: bool = False
    """The template writes a call's id, nine letters and digits, behind the arguments."""


@dataclass(frozen=True, kw_only=True)
class NamedBody:
    """A call is a name and then the arguments' JSON object."""

    begin: str = ""
    after_name: str
    end: str = ""


@dataclass(frozen=True, kw_only=True)
class TaggedBody:
    """A call is a name and then a key and a value per argument, each between tags."""

    begin: str = ""
    after_name: str
    key_open: str
    key_close: Mapping[str, str]
    """What ends a key -> what the value is: "string", "json", or "schema" where the tool's schema says it."""
    value_open: str = ""
    value_close: str
    after_value: str
    in_lines: bool = False
    """The value stands between two line breaks, which are no part of it."""
    end: str


@dataclass(frozen=True, kw_only=True)
class LiteralBody:
    """A call is a name and then keys with values that are literals of a language of their own."""

    begin: str = ""
    open: str
    assign: str
    close: str
    quotes: tuple[str, ...]
    """What opens and closes a string. A string has escapes only with Python's quotes."""
    between: str = ", "


Body = JsonBody | NamedBody | TaggedBody | LiteralBody


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """How calls are written: `opens[0] head call separator call ... tail`, then maybe `between` and again."""

    opens: tuple[str, ...]
    """Markers in the text with which calls begin. The first is what the template writes."""
    unread: tuple[str, ...] = ()
    """Those of `opens` that are already part of the call itself."""
    head: str = ""
    bodies: tuple[Body, ...]
    """How one call is written. The first is what the template writes; the others are read, too."""
    separator: str | None = None
    """Between two calls; None: every call has markers of its own."""
    tail: str = ""
    closes: tuple[str, ...] = ()
    """What may follow the calls and is no text."""
    between: str = ""
    also_head: str = ""
    """Is read like `head`."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """What the parser of a model's replies has to know."""

    name: str
    thought: Thought | None = None
    calls: CallFormat | None = None
    channels: bool = False
    """The reply is a sequence of messages with headers (harmony); nothing else of the row counts."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the reply must hold although a tokenizer may have them as special tokens."""
        if self.channels:
            return HARMONY_TOKENS
        found = [self.thought.open, self.thought.close] if self.thought else []
        if self.calls:
            found += [*self.calls.opens, *self.calls.closes]
            for body in self.calls.bodies:
                match body:
                    case NamedBody():
                        found += [body.begin, body.after_name, body.end]
                    case TaggedBody():
                        found += [body.begin, body.key_open, *body.key_close, body.value_open]
                        found += [body.value_close, body.end]
                    case LiteralBody():
                        found += [*body.quotes, body.close]
                    case JsonBody():
                        pass
        return tuple(dict.fromkeys(text for text in found if text))

    def keeps(self, token_text: str) -> bool:
        """Whether this special token must stay in the text that the parser reads."""
        return any(token_text in marker for marker in self.markers)


HARMONY_TOKENS = (
    "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>",
)  # fmt: skip

END_TOKENS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "</s>", "<eos>",
    "<｜end▁of▁sentence｜>", "<end_of_turn>", "<turn|>", "<|end_of_text|>", "<|user|>", "<|observation|>",
    "<|tool_response>", "<start_function_response>",
)  # fmt: skip
"""They are no text at the end of a reply, should the detokenizer have kept them."""

THINK = Thought(open="<think>", close="</think>")
THOUGHTS: dict[str, Thought] = {
    "think": THINK,  # DeepSeek R1 and V3.1, Qwen3, GLM-4.x, OLMo 3, SmolLM3 and most others
    "mistral": Thought(open="[THINK]", close="[/THINK]", anywhere=True),
    "gemma4": Thought(open="<|channel>thought", close="<channel|>", anywhere=True),
    "seed_oss": Thought(open="<seed:think>", close="</seed:think>"),
}
"""--reasoning-parser's names -> how a thought is marked. "harmony" is a call format, too."""

HERMES = CallFormat(
    opens=("<tool_call>",),
    head="\n",
    bodies=(JsonBody(),),
    tail="\n</tool_call>",
    closes=("</tool_call>",),
    between="\n",
)
MISTRAL_LIST = JsonBody(may_have_id=True)
MISTRAL_NAMED = NamedBody(after_name="[ARGS]")
DEEPSEEK = CallFormat(
    opens=("<｜tool▁calls▁begin｜>",),
    bodies=(
        NamedBody(begin="<｜tool▁call▁begin｜>", after_name="<｜tool▁sep｜>", end="<｜tool▁call▁end｜>"),
    ),
    separator="",
    tail="<｜tool▁calls▁end｜>",
    closes=("<｜tool▁calls▁end｜>",),
)

CALLS: dict[str, CallFormat] = {
    "hermes": HERMES,
    "qwen3_coder": CallFormat(
        opens=("<tool_call>", "<function="),
        unread=("<function=",),  # the models leave <tool_call> out at times
        head="\n",
        bodies=(
            TaggedBody(
                begin="<function=",
                after_name=">\n",
                key_open="<parameter=",
                key_close={">": "schema"},
                value_close="</parameter>",
                after_value="\n",
                in_lines=True,
                end="</function>",
            ),
        ),
        tail="\n</tool_call>",
        closes=("</tool_call>",),
        between="\n",
    ),
    "llama3_json": CallFormat(
        opens=("{", "<|python_tag|>"),
        unread=("{",),
        bodies=(JsonBody(argument_keys=("parameters", "arguments"), first_keys=("name", "type")),),
        separator="; ",
    ),
    "mistral": CallFormat(  # up to tokenizer v7
        opens=("[TOOL_CALLS]",),
        head="[",
        bodies=(MISTRAL_LIST, MISTRAL_NAMED),
        separator=", ",
        tail="]",
        closes=("]",),
    ),
    "mistral_args": CallFormat(  # from tokenizer v11 on
        opens=("[TOOL_CALLS]",),
        bodies=(MISTRAL_NAMED, MISTRAL_LIST),
        closes=("]",),
        also_head="[",
    ),
    "deepseek_v3": CallFormat(
        opens=("<｜tool▁calls▁begin｜>",),
        bodies=(
            NamedBody(
                begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                after_name="\n```json\n",
                end="\n```<｜tool▁call▁end｜>",
            ),
        ),
        separator="\n",
        tail="<｜tool▁calls▁end｜>",
        closes=("<｜tool▁calls▁end｜>",),
    ),
    "deepseek_v31": DEEPSEEK,
    "deepseek_v32": CallFormat(
        opens=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        head="\n",
        bodies=(
            TaggedBody(
                begin='<｜DSML｜invoke name="',
                after_name='">\n',
                key_open='<｜DSML｜parameter name="',
                key_close={'" string="true">': "string", '" string="false">': "json"},
                value_close="</｜DSML｜parameter>",
                after_value="\n",
                end="</｜DSML｜invoke>",
            ),
        ),
        separator="\n",
        tail="\n</｜DSML｜function_calls>",
        closes=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    ),
    "glm45": CallFormat(
        opens=("<tool_call>",),
        bodies=(
            TaggedBody(
                after_name="\n",
                key_open="<arg_key>",
                key_close={"</arg_key>": "schema"},
                value_open="\n<arg_value>",
                value_close="</arg_value>",
                after_value="\n",
                end="</tool_call>",
            ),
        ),
        between="\n",
    ),
    "gemma4": CallFormat(
        opens=("<|tool_call>",),
        bodies=(LiteralBody(begin="call:", open="{", assign=":", close="}", quotes=('<|"|>',), between=","),),
        tail="<tool_call|>",
        closes=("<tool_call|>",),
    ),
    "functiongemma": CallFormat(
        opens=("<start_function_call>",),
        bodies=(
            LiteralBody(begin="call:", open="{", assign=":", close="}", quotes=("<escape>",), between=","),
        ),
        tail="<end_function_call>",
        closes=("<end_function_call>",),
    ),
    "gemma3": CallFormat(  # Google's guide asks for it; Gemma 3's template itself knows no tools
        opens=("```tool_code",),
        head="\n",
        bodies=(LiteralBody(open="(", assign="=", close=")", quotes=('"', "'")),),
        separator="\n",
        tail="\n```",
        closes=("```",),
    ),
    "pythonic": CallFormat(  # Llama 4, Llama 3.2 and others that are asked for it
        opens=("[", "<|python_start|>"),
        head="",
        bodies=(LiteralBody(open="(", assign="=", close=")", quotes=('"', "'")),),
        separator=", ",
        tail="]",
        closes=("]", "<|python_end|>"),
        also_head="[",
    ),
    "olmo3": CallFormat(
        opens=("<function_calls>",),
        head="\n",
        bodies=(LiteralBody(open="(", assign="=", close=")", quotes=('"', "'")),),
        separator="\n",
        tail="\n</function_calls>",
        closes=("</function_calls>",),
    ),
}
"""--tool-parser's names -> how calls are written; "harmony" (gpt-oss) is one more."""

HARMONY = Format(name="harmony", channels=True)

CALL_ALIASES = {
    "qwen": "hermes", "qwen25": "hermes", "qwen2_5": "hermes", "qwen3": "hermes", "longcat": "hermes",
    "qwen3_xml": "qwen3_coder", "qwen3_5": "qwen3_coder", "qwen35": "qwen3_coder", "nemotron3": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "llama3": "llama3_json", "llama4_json": "llama3_json",
    "mistral_v11": "mistral_args",
    "deepseekv3": "deepseek_v3", "deepseek_r1": "deepseek_v3",
    "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32", "deepseek_v4": "deepseek_v32",
    "glm": "glm45", "glm46": "glm45", "glm47": "glm45",
    "llama4_pythonic": "pythonic", "llama4": "pythonic",
    "openai": "harmony", "gpt-oss": "harmony", "gpt_oss": "harmony",
}  # fmt: skip
"""Names that other engines have for our rows."""

THOUGHT_ALIASES = {
    **dict.fromkeys(
        (
            "deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "deepseek_v31", "deepseek_v32",
            "qwen3", "qwen3-thinking", "qwen3_5", "glm45", "olmo3", "smollm3", "nemotron3", "step3p5",
        ),
        "think",
    ),
    "magistral": "mistral",
    "openai": "harmony", "openai_gptoss": "harmony", "gpt-oss": "harmony", "gpt_oss": "harmony",
}  # fmt: skip
