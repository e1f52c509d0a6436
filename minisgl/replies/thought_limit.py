"""The limit of a reply's thought as token ids, from the format of the model's replies.

Promise: a limit that could not be kept exactly is refused by the name of its field.
"""

from typing import NoReturn

from minisgl.errors import RequestError
from minisgl.replies.model import ReplyModel
from minisgl.request import ThoughtLimit
from minisgl.text.formats.call_grammars.structure import HARMONY_CALL
from minisgl.text.formats.events import Reasoning
from minisgl.text.formats.parser import ReplyFormat, new_parser, opens_thought
from minisgl.text.formats.response_template import ResponseTemplate
from minisgl.text.formats.table import Thought

HARMONY_ANSWERS = ("final", "commentary")
"""The channels that are no thought."""


def limit_thought(model: ReplyModel, prompt: str, max_tokens: int, where: str) -> ThoughtLimit:
    """The limit for replies to the rendered `prompt`.

    Args:
        where: the request's field, for errors.

    Raises:
        RequestError: 400 if the model has no thoughts, or marks them with texts that are no tokens.
    """
    form = model.reply_format
    thought = _thought(form)
    if form is None or thought is None:
        _refuse(
            where,
            "how this model marks its thoughts is not known; name it with --reasoning-parser or "
            "LLM(reasoning_parser=...), or leave the limit out",
        )
    added = model.marker_ids.values()
    opens, closes = (model.tokenizer.encode(text, False) for text in (thought.open, thought.close))
    for text, ids in ((thought.open, opens), (thought.close, closes)):
        if ids[0] not in added:
            _refuse(where, f"the marker {text!r} of a thought does not begin with a token of its own")
    is_harmony = not isinstance(form, ResponseTemplate) and form.channels
    instead = [model.tokenizer.encode(text, False)[0] for text in HARMONY_ANSWERS] if is_harmony else []
    return ThoughtLimit(
        max_tokens,
        tuple(opens),
        tuple(closes),
        is_open=_is_open(form, thought, prompt),
        may_reopen=thought.anywhere or is_harmony,
        instead=tuple(instead),
    )


def _thought(form: ReplyFormat | None) -> Thought | None:
    """How thoughts are marked; None: there are none, or expressions say how."""
    if form is None:
        return None
    if not isinstance(form, ResponseTemplate):
        return HARMONY_CALL.thought if form.channels else form.thought
    for field in form.fields:
        if field.kind == "thought" and field.open is not None and field.close is not None:
            texts = field.open.text, field.close.text
            if texts[0] and texts[1]:
                return Thought(open=texts[0].strip(), close=texts[1].strip(), anywhere=True)
    return None


def _is_open(form: ReplyFormat, thought: Thought, prompt: str) -> bool:
    if isinstance(form, ResponseTemplate):
        return any(isinstance(event, Reasoning) for event in new_parser(form, prompt=prompt).feed("x"))
    return not form.channels and opens_thought(thought, prompt)


def _refuse(where: str, why: str) -> NoReturn:
    raise RequestError(400, "unsupported_parameter", f"{where} can't be used: {why}", where)
