"""How much of the prompts do N engines find in their caches, by routing and by chance, against one engine?

    python bench/routing.py --out bench/results/cpu/routing.json

A simulation: the router of the server, and for each engine a cache of whole pages that evicts the least
recently used ones. Conversations begin with one of several system prompts and go on for some turns; each turn
is a call whose prompt is all that was said before. The one engine has as many pages as the N have together.
The exit code is 1 if routing hits less than 0.95 times as often as one engine, or, in a case with a bar, less
than 1.5 times as often as chance. Long chats over two engines have no such bar: chance finds most of their
turns, too, because each engine soon has an older part of each chat.
"""

import argparse
import itertools
import random
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.benchmark.reports.report import format_table, make_report, write_report
from minisgl.server.engines.router import Router

PAGE = 16
LEAST_OF_ONE = 0.95
LEAST_OF_RANDOM = 1.5
USUAL_TOKENS = {"chats": 1200, "documents": 2600}
"""Of a conversation in the end."""


class Cache:
    """Pages of one engine, each named by all tokens up to its end."""

    def __init__(self, num_tokens: int) -> None:
        self._most = num_tokens // PAGE
        self._pages: OrderedDict[bytes, None] = OrderedDict()

    def take(self, prompt: bytes) -> int:
        """Put a prompt's pages in; returns how many of its tokens were there, but never all of them."""
        ends = range(4 * PAGE, len(prompt) + 1, 4 * PAGE)
        names = [prompt[:end] for end in ends]
        found = 0
        while found < len(names) and names[found] in self._pages:
            found += 1
        for name in reversed(names):
            self._pages[name] = None
            self._pages.move_to_end(name)
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)
        return min(found * PAGE, len(prompt) // 4 - 1)


class Talk:
    """A conversation: a system prompt, in some a document, then turns."""

    def __init__(self, draw: random.Random, systems: list[list[int]], kind: str) -> None:
        self.tokens = list(draw.choice(systems))
        self.num_turns = draw.randint(4, 10) if kind == "chats" else draw.randint(2, 4)
        if kind == "documents":
            self.say(draw, 1000, 3000)

    def say(self, draw: random.Random, least: int, most: int) -> None:
        self.tokens += [draw.randrange(50_000) for _ in range(draw.randint(least, most))]


class Outcome:
    """What a run counted."""

    def __init__(self, num_engines: int) -> None:
        self.num_tokens = self.num_cached = 0
        self.calls = [0] * num_engines
        self.most_open = 0

    @property
    def hit_rate(self) -> float:
        return self.num_cached / self.num_tokens


def run(kind: str, num_engines: int, pages_tokens: int, num_open: int, num_calls: int, by: str) -> Outcome:
    """Simulate calls of `num_open` conversations at a time, over engines that hold so many tokens each."""
    draw, chance = random.Random(0), random.Random(1)
    systems = [[draw.randrange(50_000) for _ in range(draw.randint(128, 512))] for _ in range(8)]
    router, outcome = Router(num_engines), Outcome(num_engines)
    caches = [Cache(pages_tokens) for _ in range(num_engines)]
    for engine in range(num_engines):
        router.set_capacity(engine, pages_tokens)
    numbers = list(range(num_engines))
    choose: dict[str, Callable[[bytes], int]] = {
        "routed": lambda prompt: router.choose([prompt], "", numbers),
        "random": lambda _: chance.randrange(num_engines),
    }
    talks = [Talk(draw, systems, kind) for _ in range(num_open)]
    running = [-1] * num_open  # the open request of each conversation
    for call in range(num_calls):
        place = draw.randrange(num_open)
        router.end(running[place])
        if running[place] >= 0:
            talks[place].say(draw, 32, 192)  # the answer
            talks[place].num_turns -= 1
        if not talks[place].num_turns:
            talks[place] = Talk(draw, systems, kind)
        talk = talks[place]
        talk.say(draw, 16, 128)
        prompt = np.asarray(talk.tokens, "<i4").tobytes()
        engine = choose[by](prompt)
        router.begin(engine, call, [prompt])
        running[place] = call
        outcome.num_tokens += len(talk.tokens)
        outcome.num_cached += caches[engine].take(prompt)
        outcome.calls[engine] += 1
        outcome.most_open = max(outcome.most_open, router.num_open(engine))
    router.check_invariants()
    return outcome


def main() -> int:
    """Run all cases; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args()
    rows: list[dict[str, Any]] = []
    is_good = True
    for kind, num_engines, share in itertools.product(("chats", "documents"), (2, 4), (0.75, 2.0)):
        num_open = 32 * num_engines
        each = int(share * 32 * USUAL_TOKENS[kind])
        one = run(kind, 1, each * num_engines, num_open, settings.calls, "routed")
        routed = run(kind, num_engines, each, num_open, settings.calls, "routed")
        by_chance = run(kind, num_engines, each, num_open, settings.calls, "random")
        row = {
            "kind": kind,
            "engines": num_engines,
            "conversations": num_open,
            "tokens_of_pages_each": each,
            "hit_rate_one": round(one.hit_rate, 4),
            "hit_rate_routed": round(routed.hit_rate, 4),
            "hit_rate_random": round(by_chance.hit_rate, 4),
            "to_one": round(routed.hit_rate / one.hit_rate, 3),
            "to_random": round(routed.hit_rate / by_chance.hit_rate, 3),
            "least_calls_of_an_engine": min(routed.calls),
            "most_calls_of_an_engine": max(routed.calls),
        }
        has_bar = (kind, num_engines) != ("chats", 2)
        is_good &= row["to_one"] >= LEAST_OF_ONE and (not has_bar or row["to_random"] >= LEAST_OF_RANDOM)
        rows.append(row)
    print(format_table(rows))
    if settings.out is not None:
        metrics = {f"least_{name}": min(row[name] for row in rows) for name in ("to_one", "to_random")}
        report = make_report(
            "routing", arguments={"calls": settings.calls}, metrics=metrics, tables={"cases": rows}
        )
        write_report(settings.out, report)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
