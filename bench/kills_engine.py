"""The engine's process for `bench/kills.py`: minisgl's own, which dies at one token of a poisonous request.

Its prompt begins with `POISON`. When its token `FATAL_PLACE` is booked, the process ends at once.
"""

import os
import sys
from typing import Any

from minisgl.engine import worker
from minisgl.scheduler.scheduler import Scheduler

POISON = [1, 2, 3, 4, 5]
"""The first token ids of its prompt."""
FATAL_PLACE = 12


def main() -> int:
    book = Scheduler._book_token

    def book_or_die(self: Scheduler, request: Any, token: int) -> Any:
        if request.prompt[: len(POISON)].tolist() == POISON and len(request.output) == FATAL_PLACE:
            os._exit(1)
        return book(self, request, token)

    Scheduler._book_token = book_or_die
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
