"""The text side of a model: tokenizer, chat template, and the format of its replies.

Promise: read once from the model folder, without torch, and never changed afterwards.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from minisgl.text.chat_template import ChatTemplate
from minisgl.text.formats.choose import choose_format
from minisgl.text.formats.parser import ReplyFormat
from minisgl.text.tokenizer import Tokenizer, read_json


class ReplyModel(Protocol):
    """What plans and reads replies needs of a model. `LoadedText` has it, and the server's `ServedModel`."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def template(self) -> ChatTemplate: ...
    @property
    def reply_format(self) -> ReplyFormat | None:
        """How replies hold thoughts and calls; None: not known."""
        ...

    @property
    def kept_special(self) -> frozenset[int]:
        """Special tokens that `reply_format` needs in the text."""
        ...

    @property
    def marker_ids(self) -> Mapping[str, int]:
        """Added tokens in the format's markers, text -> id."""
        ...


class LoadedText(NamedTuple):
    """A `ReplyModel`."""

    tokenizer: Tokenizer
    template: ChatTemplate
    reply_format: ReplyFormat | None
    kept_special: frozenset[int]
    marker_ids: Mapping[str, int]


def load_text(
    folder: Path,
    *,
    chat_template: str | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> LoadedText:
    """Read tokenizer and chat template, and find out how replies are written.

    Args:
        chat_template: a file in place of the model's own template.
        tool_parser: how replies hold calls; None: the model's own way, or a guess.
        reasoning_parser: likewise, for thoughts.

    Raises:
        ModelError: the folder lacks a tokenizer, or one of its files is broken.
        ConfigError: a parser has an unknown name, or the template can't be read.
    """
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, tokenizer)
    if chat_template is not None:
        template = ChatTemplate.from_file(chat_template, tokenizer)
    config = read_json(folder / "tokenizer_config.json")
    form = choose_format(template.source, config, tool_parser, reasoning_parser)
    if form is None:
        return LoadedText(tokenizer, template, None, frozenset(), {})
    added = tokenizer.added_tokens().items()
    return LoadedText(
        tokenizer,
        template,
        form,
        tokenizer.special_ids(form.keeps),
        {text: token_id for text, token_id in added if text.strip() and form.keeps(text)},
    )
