"""The text side of a model: tokenizer, chat template, and the format of its replies.

Promise: read once from the model folder, without torch, and never changed afterwards.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from minisgl.text.chat_template import ChatTemplate
from minisgl.text.formats.choose import choose_format
from minisgl.text.formats.parser import ReplyFormat
from minisgl.text.literals import special_tokens_pattern
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

    @property
    def special_tokens(self) -> re.Pattern[str] | None:
        """The texts that are no special tokens in messages; None: all texts may be."""
        ...


class LoadedText(NamedTuple):
    """A `ReplyModel`."""

    tokenizer: Tokenizer
    template: ChatTemplate
    reply_format: ReplyFormat | None
    kept_special: frozenset[int]
    marker_ids: Mapping[str, int]
    special_tokens: re.Pattern[str] | None
    tokenizer_config: Mapping[str, Any]  # tokenizer_config.json; never changed


def load_text(
    folder: Path,
    *,
    chat_template: str | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    special_tokens_in_content: bool = True,
) -> LoadedText:
    """Read tokenizer and chat template, and find out how replies are written.

    Args:
        chat_template: a file in place of the model's own template.
        tool_parser: how replies hold calls; None: the model's own way, or a guess.
        reasoning_parser: likewise, for thoughts.
        special_tokens_in_content: the texts of special tokens become these also in messages.

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
    kept_special: frozenset[int] = frozenset()
    marker_ids: dict[str, int] = {}
    if form is not None:
        kept_special = tokenizer.special_ids(form.keeps)
        added = tokenizer.added_tokens().items()
        marker_ids = {text: token_id for text, token_id in added if text.strip() and form.keeps(text)}
    special = None if special_tokens_in_content else special_tokens_pattern(tokenizer.special_texts())
    return LoadedText(tokenizer, template, form, kept_special, marker_ids, special, config)
