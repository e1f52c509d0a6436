"""How a format's calls look when they are written right: plain data from which a grammar is made.

Promise: what a grammar made of it accepts, the parser reads as the calls that were meant.
"""

from typing import NamedTuple

from minisgl.text.formats.table import (
    HARMONY,
    Body,
    Format,
    JsonBody,
    LiteralBody,
    NamedBody,
    TaggedBody,
    Thought,
)


class Structure(NamedTuple):
    """The texts around calls. A reply is: thought, text, `open` call (`separator` call)* `close`, text.

    With `separator` None, each call has its own `open` and `close`, and `between` stands between two of them.
    """

    triggers: tuple[str, ...]  # where free text must end, as a call begins
    open: str
    begin: str  # before a call's name
    after_name: str
    arguments: Body | None  # how arguments are written; None, JsonBody and NamedBody: as a JSON object
    end: str  # after a call's arguments
    separator: str | None
    between: str
    close: str
    is_name_json: bool = False  # the name stands in a JSON string
    is_messages: bool = False  # harmony: the reply is messages with headers, and a call is the last one
    thought: Thought | None = None
    may_have_id: bool = False  # the object of a call may end with an id of nine letters and digits
    markers: tuple[str, ...] = ()  # texts in which a tokenizer's added tokens are these tokens and no text


HARMONY_CALL = Structure(
    triggers=(),
    open="",
    begin="<|channel|>commentary to=functions.",
    after_name=" <|constrain|>json<|message|>",
    arguments=None,
    end="",  # <|call|>, which is an end-of-sequence token
    separator=None,
    between="",
    close="",
    is_messages=True,
    thought=Thought(open="<|channel|>analysis<|message|>", close="<|end|><|start|>assistant"),
    markers=HARMONY.markers,
)


def describe(form: Format) -> Structure | None:
    """The structure of a format's calls; None if it has none."""
    if form.channels:
        return HARMONY_CALL
    calls = form.calls
    if calls is None:
        return None
    body = calls.bodies[0]
    begin, after_name, end = _texts(body)
    return Structure(
        triggers=calls.opens,
        open=("" if calls.opens[0] in calls.unread else calls.opens[0]) + calls.head,
        begin=begin,
        after_name=after_name,
        arguments=body,
        end=end,
        separator=calls.separator,
        between=calls.between,
        close=calls.tail,
        is_name_json=isinstance(body, JsonBody),
        thought=form.thought,
        may_have_id=isinstance(body, JsonBody) and body.may_have_id,
        markers=form.markers,
    )


def _texts(body: Body) -> tuple[str, str, str]:
    """What stands before a call's name, after it, and after the arguments."""
    match body:
        case JsonBody():
            return f'{{"{body.name_key}": "', f'", "{body.argument_keys[0]}": ', "}"
        case LiteralBody():
            return body.begin, body.open, body.close
        case NamedBody() | TaggedBody():
            return body.begin, body.after_name, body.end
