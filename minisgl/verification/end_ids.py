"""Which tokens end an answer: ours, transformers', and those of the tokenizer and the chat template."""

from pathlib import Path
from typing import NamedTuple

from minisgl.errors import RequestError
from minisgl.model_config.config import ModelConfig
from minisgl.text.chat_template import ChatTemplate
from minisgl.text.tokenizer import Tokenizer
from minisgl.verification.explain import Finding

CHECK = "end of sequence"
PROBE = "minisgl probe"


class EndIds(NamedTuple):
    """Token ids that end an answer."""

    ours: tuple[int, ...]
    transformers: tuple[int, ...]
    tokenizer: int | None
    """The tokenizer's eos_token."""
    template: int | None
    """What the chat template writes behind an answer of the assistant, where that is a special token."""


def find_end_ids(folder: Path, config: ModelConfig) -> EndIds:
    """Read them all.

    Raises:
        ModelError: the folder's tokenizer is broken.
    """
    tokenizer_id = template_id = None
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_folder(folder)
        text = tokenizer.special_tokens.get("eos_token")
        if text is not None:
            ids = tokenizer.encode(text, False)
            tokenizer_id = ids[0] if len(ids) == 1 else None
        template_id = _end_of_turn(ChatTemplate.from_folder(folder, tokenizer), tokenizer)
    return EndIds(config.eos_token_ids, _transformers_ids(folder), tokenizer_id, template_id)


def check_end_ids(found: EndIds, vocab_size: int) -> tuple[list[Finding], list[str]]:
    """What is wrong, and what the user should know though it may be meant."""
    wrong: list[Finding] = []
    notes: list[str] = []

    def fail(what: str, likely: str) -> None:
        wrong.append(Finding(CHECK, None, "", what, likely))

    missing = sorted(set(found.transformers) - set(found.ours))
    if missing:
        fail(
            f"transformers ends an answer at {missing} and minisgl does not (ours: {list(found.ours)})",
            "eos_token_id in generation_config.json and config.json is read wrongly; please report it",
        )
    extra = sorted(set(found.ours) - set(found.transformers))
    if extra and found.transformers:
        notes.append(
            f"minisgl also ends an answer at {extra}, which config.json names and generation_config.json "
            "does not; transformers reads the latter alone"
        )
    outside = [token_id for token_id in found.ours if not 0 <= token_id < vocab_size]
    if outside:
        fail(f"{outside} is outside of the vocabulary of {vocab_size}", "eos_token_id in the model's files")
    named = {token_id for token_id in (found.tokenizer, found.template) if token_id is not None}
    if named and not named & set(found.ours):
        fail(
            f"no answer would end: minisgl waits for {list(found.ours)}, but the tokenizer's eos_token is "
            f"{found.tokenizer} and the chat template ends a turn with {found.template}",
            "a wrong eos_token_id in generation_config.json or config.json",
        )
    elif found.template is not None and found.template not in found.ours:
        notes.append(
            f"the chat template ends a turn with token {found.template}, which does not end an answer "
            f"({list(found.ours)} do): answers of chats may run on; if they do, add it to eos_token_id in "
            "generation_config.json"
        )
    return wrong, notes


def _transformers_ids(folder: Path) -> tuple[int, ...]:
    """What `generate` of transformers ends at: generation_config.json's ids, or without it config.json's."""
    import transformers  # slow to import

    if (folder / "generation_config.json").is_file():
        generation = transformers.GenerationConfig.from_pretrained(folder)
    else:
        config = transformers.AutoConfig.from_pretrained(folder)
        generation = transformers.GenerationConfig.from_model_config(config)
    ids = generation.eos_token_id
    return () if ids is None else tuple(ids) if isinstance(ids, list | tuple) else (ids,)


def _end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """The special token that the template writes right behind an answer."""
    if not template.is_usable:
        return None
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": PROBE}]
    try:
        text = template.render(messages, False)
    except RequestError:
        return None
    behind = tokenizer.encode(text.rpartition(PROBE)[2].lstrip(), False)
    return behind[0] if behind and tokenizer.is_special(behind[0]) else None
