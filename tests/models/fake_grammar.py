"""Grammars without a library: which tokens may follow depends on the output alone, by a random rule."""

import random
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from minisgl.engine.engine import Engine
from minisgl.grammar.pending import PendingGrammars
from minisgl.grammar.spec import GrammarSpec

SHARE = 0.4
"""Of the vocabulary that may follow an output."""


def allowed(text: str, output: Sequence[int], vocab_size: int, eos: int) -> set[int]:
    """The tokens that may follow `output` in the grammar called `text`; in the end, only `eos`.

    The grammar called "after 7 x" is the grammar called "x" of what follows the first token 7.
    """
    if text.startswith("after "):
        _, token, text = text.split(" ")
        if int(token) not in output:
            return {one for one in range(vocab_size) if one != eos}
        output = output[list(output).index(int(token)) + 1 :]
    source = random.Random(f"{text}:{list(output)}")
    if source.random() < 0.03:
        return {eos}
    others = [token for token in range(vocab_size) if token != eos]
    return {*source.sample(others, int(SHARE * vocab_size)), *([eos] if source.random() < 0.3 else [])}


class FakeGrammar:
    """A compiled grammar, and a matcher of it."""

    def __init__(self, text: str, vocab_size: int, eos: int, output: tuple[int, ...] = ()) -> None:
        self.text = text
        self.vocab_size = vocab_size
        self.eos = eos
        self.output = output

    def matcher(self) -> "FakeGrammar":
        return FakeGrammar(self.text, self.vocab_size, self.eos, self.output)

    def fill_mask(self, mask: np.ndarray) -> None:
        for token in allowed(self.text, self.output, self.vocab_size, self.eos):
            mask.view("<u4")[token // 32] |= np.uint32(1 << (token % 32))

    def advance(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if token not in allowed(self.text, self.output, self.vocab_size, self.eos):
                raise ValueError(f"{token} does not follow {self.output}")
            self.output = (*self.output, token)


class FakeCompiler:
    """Compiles at once, or when `finish` is called."""

    def __init__(self, vocab_size: int, eos: int, *, at_once: bool = True) -> None:
        self.vocab_size = vocab_size
        self.eos = eos
        self.at_once = at_once
        self.open: list[tuple[GrammarSpec, Future[Any]]] = []
        self.may_refuse: list[bool] = []  # of each call of `compile`

    def compile(self, spec: GrammarSpec, *, may_refuse: bool = True) -> "Future[Any]":
        self.may_refuse.append(may_refuse)
        future: Future[Any] = Future()
        self.open.append((spec, future))
        if self.at_once:
            self.finish()
        return future

    def close(self) -> None:
        pass

    def prepare(self) -> None:
        pass

    def finish(self, error: Exception | None = None) -> None:
        """End the oldest compilation."""
        spec, future = self.open.pop(0)
        if not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(FakeGrammar(spec.text, self.vocab_size, self.eos))


def fill_one_by_one(rows: Sequence[tuple[int, Any]], masks: np.ndarray) -> list[tuple[int, Exception]]:
    """As `PendingGrammars.fill_masks`."""
    failed: list[tuple[int, Exception]] = []
    for index, matcher in rows:
        try:
            matcher.fill_mask(masks[index])
        except ValueError as error:  # noqa: PERF203
            failed.append((index, error))
    return failed


def use_fake_grammars(engine: Engine, compiler: Any) -> None:
    grammars: Any = PendingGrammars(lambda: compiler)
    grammars.fill_masks = fill_one_by_one
    engine._grammars = grammars
