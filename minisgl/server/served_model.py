"""The server process's view of the model: name, tokenizer, chat template, sampling defaults.

Promise: read once from the model folder, without torch, and never changed afterwards.
"""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minisgl.errors import ModelError, RequestError
from minisgl.fields import convert, shorten
from minisgl.replies.model import load_text
from minisgl.server.sampling_fields import SamplingDefaults, given_fields
from minisgl.text.chat_template import ChatTemplate
from minisgl.text.formats.parser import ReplyFormat
from minisgl.text.formats.response_template import ResponseTemplate
from minisgl.text.formats.table import THOUGHTS, Format
from minisgl.text.tokenizer import Tokenizer, read_json


class ServedModel(NamedTuple):
    """The model that the API serves."""

    name: str
    created: int  # Unix time, seconds
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: dict[str, Any]  # sampling fields that hold where a call leaves them out
    root: str = ""  # where the model comes from, for clients that look for its tokenizer
    reply_format: ReplyFormat | None = None  # how replies hold thoughts and calls; None: not known
    kept_special: frozenset[int] = frozenset()  # special tokens that `reply_format` needs in the text
    marker_ids: Mapping[str, int] = {}  # added tokens in its markers, text -> id; never changed
    special_tokens: re.Pattern[str] | None = None  # are no special tokens in messages; None: all may be
    tokenizer_config: Mapping[str, Any] = {}  # tokenizer_config.json; never changed

    @property
    def format_facts(self) -> dict[str, str | None]:
        """What the server knows of replies, for people: how calls and thoughts are marked."""
        match self.reply_format:
            case None:
                return {"tool_parser": None, "reasoning_parser": None}
            case ResponseTemplate():
                return dict.fromkeys(("tool_parser", "reasoning_parser"), "response_template")
            case Format(channels=True, name=name):
                return {"tool_parser": name, "reasoning_parser": name}
            case Format(calls=calls, thought=thought, name=name):
                own = next((key for key, value in THOUGHTS.items() if value == thought), None)
                return {"tool_parser": name if calls else None, "reasoning_parser": own}

    def check_name(self, name: str | None) -> None:
        """Refuse calls that name another model. None = the call names no model.

        Raises:
            RequestError: 404 if `name` is another model's.
        """
        if name is not None and name != self.name:
            raise RequestError(
                404,
                "model_not_found",
                f"there is no model {shorten(name)}; this is {shorten(self.name)}",
                "model",
            )


def load_served_model(
    folder: Path,
    name: str,
    sampling_defaults: str = "model",
    *,
    root: str | None = None,
    chat_template: str | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    special_tokens_in_content: bool = True,
) -> ServedModel:
    """Read tokenizer and chat template, and generation_config.json if `sampling_defaults` is "model".

    Args:
        root: where the model comes from; None: `folder`.

    The other arguments, and the errors, are those of `load_text`.
    """
    text = load_text(
        folder,
        chat_template=chat_template,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        special_tokens_in_content=special_tokens_in_content,
    )
    return ServedModel(
        name=name,
        created=int(time.time()),
        defaults=_read_defaults(folder / "generation_config.json") if sampling_defaults == "model" else {},
        root=root or str(folder),
        **text._asdict(),
    )


def served_name(chosen: str | None, model: str) -> str:
    """The model name that clients send: `chosen`, else --model; for a local path, its last part."""
    if chosen:
        return chosen
    local = Path(model).expanduser()
    if local.is_file():
        return local.stem
    return local.resolve().name if local.is_dir() else model


def served_root(model: str, folder: Path) -> str:
    """Where other programs find the model: a hub's name as --model has it, else an absolute path.

    Args:
        folder: where the server reads the model.
    """
    local = Path(model).expanduser()
    if local.exists():
        return str(local.resolve())
    return model if "/" in model else str(folder)


def _read_defaults(file: Path) -> dict[str, Any]:
    try:
        return given_fields(convert(read_json(file), SamplingDefaults))
    except RequestError as error:
        raise ModelError(f"{file}: {error}") from None
