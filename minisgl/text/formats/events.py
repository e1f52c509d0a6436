"""What a parser says of a reply while it arrives, and the whole reply put together from it."""

from collections.abc import Iterable
from typing import NamedTuple


class Reasoning(NamedTuple):
    """More text of the thought."""

    text: str


class Content(NamedTuple):
    """More text of the answer."""

    text: str


class CallStart(NamedTuple):
    """A call opens. Its arguments follow."""

    call: int  # counts the reply's calls from 0
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments; all pieces together are the arguments' JSON text."""

    call: int
    text: str


class CallEnd(NamedTuple):
    """A call is over."""

    call: int
    complete: bool  # False: the arguments are not a JSON object, as the model broke off or broke the format


Event = Reasoning | Content | CallStart | CallArguments | CallEnd


class Call(NamedTuple):
    """One whole call."""

    name: str
    arguments: str
    complete: bool


class Reply(NamedTuple):
    """One whole reply."""

    reasoning: str
    content: str
    calls: tuple[Call, ...]


def collect(events: Iterable[Event]) -> Reply:
    """The reply that the events of one parser tell."""
    reasoning, content = [], []
    names: list[str] = []
    arguments: list[list[str]] = []
    complete: list[bool] = []
    for event in events:
        match event:
            case Reasoning(text):
                reasoning.append(text)
            case Content(text):
                content.append(text)
            case CallStart(_, name):
                names.append(name)
                arguments.append([])
                complete.append(False)
            case CallArguments(call, text):
                arguments[call].append(text)
            case CallEnd(call, is_complete):
                complete[call] = is_complete
    calls = zip(names, map("".join, arguments), complete, strict=True)
    return Reply("".join(reasoning), "".join(content), tuple(Call(*call) for call in calls))
