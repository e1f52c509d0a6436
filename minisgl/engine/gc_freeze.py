"""Python's garbage collector in a process that is the engine's own.

A start leaves some hundred thousand objects that live as long as the process: modules, compiled code. Each
full collection would look at all of them, for a tenth of a second or two, also while requests run.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collect_once() -> Iterator[None]:
    """Around a start: collects garbage at its end only, and never looks again at what is left then."""
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()
