"""The router against a model that compares whole prefixes, and its bounds on load and memory."""

import random

import numpy as np
import pytest

from minisgl.server.engines.router import LOAD_FACTOR, LOAD_SLACK, REQUEST_TOKENS, Router

CHUNK = 4


def prompt(*token_ids: int) -> bytes:
    return np.asarray(token_ids, "<i4").tobytes()


class Model:
    """Remembers every prompt and request as they are, and searches all of them."""

    def __init__(self, num_engines: int) -> None:
        self.sent: list[list[tuple[str, list[int]]]] = [[] for _ in range(num_engines)]
        self.open: dict[int, tuple[int, int]] = {}

    def load(self, engine: int) -> int:
        return sum(tokens for at, tokens in self.open.values() if at == engine)

    def cached(self, engine: int, salt: str, ids: list[int]) -> int:
        """Tokens in full chunks that some prompt before has, too."""
        best = 0
        for other_salt, other in self.sent[engine]:
            same = 0
            while same < min(len(ids), len(other)) and ids[same] == other[same]:
                same += 1
            best = max(best, same // CHUNK * CHUNK if salt == other_salt else 0)
        return best

    def num_chunks(self, engine: int) -> int:
        return len(
            {
                (salt, tuple(ids[:end]))
                for salt, ids in self.sent[engine]
                for end in range(CHUNK, len(ids) + 1, CHUNK)
            }
        )

    def choose(self, salt: str, prompts: list[list[int]], candidates: list[int]) -> int:
        least = min(self.load(one) for one in candidates)
        bearable = [one for one in candidates if self.load(one) <= 1.25 * least + 8192]
        cached = dict.fromkeys(candidates, 0) | {
            one: sum(self.cached(one, salt, ids) for ids in prompts) for one in bearable
        }
        most = max(cached.values())
        best = [one for one in candidates if cached[one] == most]
        return sorted(best, key=lambda one: (self.load(one), self.num_chunks(one), one))[0]


@pytest.mark.parametrize("seed", range(6))
def test_it_chooses_as_a_search_of_all_prompts_does(seed: int) -> None:
    draw = random.Random(seed)
    num_engines = draw.randint(1, 4)
    router, model = Router(num_engines, chunk_tokens=CHUNK), Model(num_engines)
    next_id = 0
    for _ in range(120):
        salt = draw.choice(["", "a"])
        known = [ids for sent in model.sent for _, ids in sent]
        prompts = []
        for _ in range(draw.choice([1, 1, 1, 2])):
            stem = draw.choice(known)[: draw.randint(0, 40)] if known and draw.random() < 0.7 else []
            prompts.append(stem + [draw.randint(0, 2) for _ in range(draw.randint(1, 12))])
        candidates = sorted(draw.sample(range(num_engines), draw.randint(1, num_engines)))
        data, n = [prompt(*ids) for ids in prompts], draw.randint(1, 3)
        chosen = router.choose(data, salt, candidates)
        assert chosen == model.choose(salt, prompts, candidates)
        router.begin(chosen, next_id, data, n, salt)
        for ids in prompts:
            num_new = len(ids) - model.cached(chosen, salt, ids)
            model.sent[chosen].append((salt, ids))
            for choice in range(n):
                model.open[next_id] = chosen, REQUEST_TOKENS + (0 if choice else num_new)
                next_id += 1
        for number in draw.sample(sorted(model.open), draw.randint(0, min(2, len(model.open)))):
            router.end(number)
            router.end(number)
            del model.open[number]
        assert [router.load(one) for one in range(num_engines)] == [
            model.load(one) for one in range(num_engines)
        ]
        router.check_invariants()


def test_a_conversation_stays_until_its_engine_is_too_busy() -> None:
    router = Router(2, chunk_tokens=CHUNK)
    first, second = prompt(*range(16)), prompt(*range(100, 116))
    router.begin(0, 0, [first])
    router.begin(1, 1, [second])
    router.end(0)
    router.end(1)
    turn = prompt(*range(16), 1, 2, 3, 4)
    number = 2
    while router.choose([turn], "", [0, 1]) == 0:
        router.begin(0, number, [turn])
        number += 1
    assert router.load(0) > LOAD_SLACK >= router.load(0) - REQUEST_TOKENS - 4
    router.end(2)
    router.end(3)
    assert router.choose([turn], "", [0, 1]) == 0


def test_no_engine_starves_whatever_is_asked() -> None:
    router, turn = Router(3, chunk_tokens=CHUNK), prompt(*range(40))
    for number in range(600):
        router.begin(router.choose([turn], "", [0, 1, 2]), number, [turn])
        loads = [router.load(one) for one in range(3)]
        assert max(loads) <= LOAD_FACTOR * min(loads) + LOAD_SLACK + REQUEST_TOKENS + 40
    assert min(router.num_open(one) for one in range(3)) > 100


def test_new_conversations_spread_over_idle_engines() -> None:
    router = Router(3, chunk_tokens=CHUNK)
    chosen = []
    for number in range(6):
        own = [prompt(*range(100 * number, 100 * number + 8))]
        chosen.append(router.choose(own, "", [0, 1, 2]))
        router.begin(chosen[-1], number, own)
        router.end(number)
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_another_salt_shares_no_cache() -> None:
    router, own = Router(2, chunk_tokens=CHUNK), [prompt(*range(8))]
    router.begin(1, 0, own, salt="a")
    router.begin(0, 1, [prompt(7, 7, 7, 7)], salt="b")
    router.begin(0, 2, [prompt(8, 8, 8, 8)], salt="b")
    for number in range(3):
        router.end(number)
    router.begin(1, 3, [prompt(9)], salt="a")  # busier than the other
    assert router.choose(own, "a", [0, 1]) == 1
    assert router.choose(own, "b", [0, 1]) == 0


def test_memory_is_bounded_and_the_oldest_end_of_a_prompt_goes_first() -> None:
    router = Router(2, chunk_tokens=CHUNK)
    router.set_capacity(0, 4 * CHUNK)
    old, new = prompt(*range(16)), prompt(*range(100, 108))
    router.begin(0, 0, [old])
    router.begin(0, 1, [new])
    router.check_invariants()
    assert router.num_chunks(0) == 4
    router.end(0)
    router.end(1)
    router.begin(0, 2, [old])  # its first two chunks were kept
    assert router.load(0) == REQUEST_TOKENS + 16 - 2 * CHUNK
    router.set_capacity(0, CHUNK)
    router.check_invariants()
    assert router.num_chunks(0) == 1


def test_an_engine_that_began_anew_has_nothing_cached() -> None:
    router, own = Router(2, chunk_tokens=CHUNK), [prompt(*range(8))]
    router.begin(1, 0, own)
    router.end(0)
    assert router.choose(own, "", [0, 1]) == 1
    router.forget(1)
    assert router.num_chunks(1) == 0
    assert router.choose(own, "", [0, 1]) == 0
