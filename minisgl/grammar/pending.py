"""Compiles the grammars of calls in threads, tells which are ready, and fills masks.

Promise: nothing here holds a step for longer than a look at what is ready. A compilation that fails, or takes
too long, is an error of its call alone. The grammars' library is loaded with the first of them.
"""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

import numpy as np

from minisgl.errors import ModelError, RequestError
from minisgl.grammar.spec import GrammarSpec

if TYPE_CHECKING:
    from minisgl.grammar.compiler import GrammarCompiler
    from minisgl.grammar.matcher import Grammar, GrammarError, MaskFiller, Matcher

logger = logging.getLogger(__name__)

MAX_MASK_THREADS = 16
"""Most threads that fill masks. One fills 5 to 20 masks of 150,000 tokens in a millisecond."""
WAIT_S = 0.005
"""How long `wait` waits at most, so that new requests are seen soon."""


class PendingGrammars:
    """The grammars that are being compiled, by the id of their call's first request. Use it from one thread.

    Args:
        make_compiler: makes the compiler, on first use.
    """

    def __init__(self, make_compiler: "Callable[[], GrammarCompiler]") -> None:
        self._make_compiler = make_compiler
        self._made: GrammarCompiler | RequestError | None = None
        self._filler: MaskFiller | None = None
        self._futures: dict[int, Future[Grammar]] = {}

    def compile(self, request_id: int, spec: GrammarSpec, *, may_refuse: bool = True) -> None:
        """Start to compile a call's grammar. `take_compiled` will have it. `may_refuse`: see the compiler."""
        compiler = self._compiler()
        if isinstance(compiler, RequestError):
            failed: Future[Grammar] = Future()
            failed.set_exception(compiler)
            self._futures[request_id] = failed
        else:
            self._futures[request_id] = compiler.compile(spec, may_refuse=may_refuse)

    def cancel(self, request_id: int) -> None:
        """Nobody waits for a call's grammar any more: it is not compiled, unless that has begun."""
        future = self._futures.pop(request_id, None)
        if future is not None:
            future.cancel()

    def take_compiled(self) -> "list[tuple[int, Grammar | RequestError]]":
        """Take out the calls whose grammar is ready, or can't be compiled, in the order of `compile`."""
        if not self._futures:
            return []
        done = [request_id for request_id, future in self._futures.items() if future.done()]
        return [(request_id, _result(self._futures.pop(request_id))) for request_id in done]

    def prepare(self) -> None:
        """Build what the first grammar needs. It takes about a second, so call it while nothing runs."""
        compiler = self._compiler()
        if not isinstance(compiler, RequestError):
            compiler.prepare()

    def fill_masks(
        self, rows: "Sequence[tuple[int, Matcher]]", masks: np.ndarray
    ) -> "list[tuple[int, GrammarError]]":
        """Write the masks of matchers; see `MaskFiller.fill`."""
        if self._filler is None:
            from minisgl.grammar.matcher import MaskFiller

            self._filler = MaskFiller(max(1, min(MAX_MASK_THREADS, (os.cpu_count() or 1) - 2)))
        return self._filler.fill(rows, masks)

    def wait(self) -> None:
        """Wait until a grammar is ready, but not for long. Returns at once if none is being compiled."""
        if self._futures:
            wait(self._futures.values(), WAIT_S, FIRST_COMPLETED)

    def close(self) -> None:
        """Compile nothing more. Calls that still wait get no grammar."""
        if self._made is not None and not isinstance(self._made, RequestError):
            self._made.close()

    def _compiler(self) -> "GrammarCompiler | RequestError":
        if self._made is None:
            try:
                self._made = self._make_compiler()
            except (ModelError, OSError) as error:
                message = f"this model can't follow a grammar: {error}"
                self._made = RequestError(400, "no_grammar", message)
        return self._made


def _result(future: "Future[Grammar]") -> "Grammar | RequestError":
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, RequestError):
        return error
    logger.error("a grammar could not be compiled", exc_info=error)
    return RequestError(500, "grammar_failed", f"the grammar could not be compiled: {error}")
