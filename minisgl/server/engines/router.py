"""Chooses the engine for a call: the one with the longest cached prefix, unless it is too busy.

It has no I/O and no clock. What an engine has cached is not asked but remembered: the prompts that were sent
to it, in chunks, each hashed with all before it. An answer counts only once it is part of a later prompt.

Promise: an engine gets a call for its cache only while its load is at most `LOAD_FACTOR` times that of the
least loaded one plus `LOAD_SLACK`. The memory is bounded, whatever is sent.
"""

from collections import OrderedDict
from collections.abc import Sequence

CHUNK_TOKENS = 32
"""Two pages of the default size. Smaller chunks would find a few tokens more, for more time and memory."""
MAX_CHUNKS = 1 << 17
"""Of each engine: 4 million tokens, about 20 MB. The least recently used ones are forgotten beyond that, as
an engine evicts them."""
REQUEST_TOKENS = 256
"""An open request counts as so many tokens beside its prompt, for the answer that it will get."""
LOAD_FACTOR = 1.25
LOAD_SLACK = 8192
"""Tokens: a long prompt, or 32 requests with cached prompts. A decode step with 32 rows more takes hardly
longer on a GPU, while a prompt that is not cached costs a prefill."""


class Router:
    """The load of each engine, and what each is likely to have cached. Engines have numbers from 0."""

    def __init__(self, num_engines: int, *, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self._chunk_bytes = 4 * chunk_tokens
        self._engines = [_Engine() for _ in range(num_engines)]
        self._open: dict[int, tuple[int, int]] = {}  # request id -> engine and tokens

    def add(self) -> None:
        """One more engine, with the next number."""
        self._engines.append(_Engine())

    def load(self, engine: int) -> int:
        """Tokens that stand for the open requests of an engine."""
        return self._engines[engine].load

    def num_open(self, engine: int) -> int:
        """Open requests of an engine."""
        return self._engines[engine].num_open

    def num_chunks(self, engine: int) -> int:
        """Chunks that an engine is taken to have cached."""
        return len(self._engines[engine].chunks)

    def choose(self, prompts: Sequence[bytes], salt: str, candidates: Sequence[int]) -> int:
        """The engine for a call; changes nothing.

        Args:
            prompts: token ids as little-endian int32, each; all of them go to one engine.
            salt: prompts share cached pages only with those of the same salt.
            candidates: the engines to choose from, one at least. Among equal ones, the least loaded is
                chosen, then the one that remembers least, then the one with the lowest number.
        """
        chains = [self._chain(prompt, salt) for prompt in prompts]
        bound = LOAD_FACTOR * min(self.load(one) for one in candidates) + LOAD_SLACK

        def rank(number: int) -> tuple[int, int, int, int]:
            engine = self._engines[number]
            is_bearable = engine.load <= bound
            cached = sum(engine.match(chain) for chain in chains) if is_bearable else 0
            return -cached, engine.load, len(engine.chunks), number

        return min(candidates, key=rank)

    def begin(
        self, engine: int, first_id: int, prompts: Sequence[bytes], num_choices: int = 1, salt: str = ""
    ) -> None:
        """Count requests that are sent to an engine: `num_choices` for each prompt.

        Their ids go from `first_id` on. The tokens of a prompt count once, and only those not cached there.
        """
        target = self._engines[engine]
        for place, prompt in enumerate(prompts):
            chain = self._chain(prompt, salt)
            num_new = len(prompt) // 4 - target.match(chain) * (self._chunk_bytes // 4)
            target.remember(chain)
            for choice in range(num_choices):
                tokens = REQUEST_TOKENS + (0 if choice else num_new)
                self._open[first_id + place * num_choices + choice] = engine, tokens
                target.load += tokens
                target.num_open += 1

    def end(self, request_id: int) -> None:
        """A request has ended or left its engine. Ids that are not open are ignored."""
        engine, tokens = self._open.pop(request_id, (0, 0))
        if tokens:
            self._engines[engine].load -= tokens
            self._engines[engine].num_open -= 1

    def forget(self, engine: int) -> None:
        """The engine's cache is empty. Its open requests still count."""
        self._engines[engine].chunks.clear()

    def set_capacity(self, engine: int, num_tokens: int) -> None:
        """The engine's pages hold so many tokens, so it has no more of them cached."""
        target = self._engines[engine]
        target.most = max(1, min(MAX_CHUNKS, num_tokens * 4 // self._chunk_bytes))
        target.remember(())

    def check_invariants(self) -> None:
        """Recompute all sums.

        Raises:
            AssertionError: one is wrong.
        """
        for number, engine in enumerate(self._engines):
            own = [tokens for at, tokens in self._open.values() if at == number]
            assert (engine.load, engine.num_open) == (sum(own), len(own)), f"the load of engine {number}"
            assert len(engine.chunks) <= engine.most, f"engine {number} remembers too much"

    def _chain(self, prompt: bytes, salt: str) -> list[int]:
        """A hash for each full chunk of a prompt, and for all that stands before it."""
        size, chain, before = self._chunk_bytes, [], hash(salt)
        for start in range(0, len(prompt) - size + 1, size):
            before = hash((before, prompt[start : start + size]))
            chain.append(before)
        return chain


class _Engine:
    """What is known of one engine."""

    def __init__(self) -> None:
        self.load = 0
        self.num_open = 0
        self.most = MAX_CHUNKS
        self.chunks: OrderedDict[int, None] = OrderedDict()  # the most recently used ones last

    def match(self, chain: Sequence[int]) -> int:
        """How many chunks from the begin on are remembered."""
        for place, chunk in enumerate(chain):
            if chunk not in self.chunks:
                return place
        return len(chain)

    def remember(self, chain: Sequence[int]) -> None:
        # From the end to the begin, so that a prefix is never forgotten before what follows it.
        for chunk in reversed(chain):
            self.chunks[chunk] = None
            self.chunks.move_to_end(chunk)
        while len(self.chunks) > self.most:
            self.chunks.popitem(last=False)
