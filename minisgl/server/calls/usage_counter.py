"""Counts the tokens of one call."""

import time
from collections.abc import Sequence

from minisgl.server.calls.call import Usage
from minisgl.server.http.middleware import CallFacts
from minisgl.server.open_choices import Delta


class UsageCounter:
    """Counts the tokens of one call, and writes the counts to its `CallFacts`. Each prompt counts once."""

    def __init__(self, num_choices: int, n: int, facts: CallFacts) -> None:
        self._facts = facts
        self._num_cached_tokens = [0] * num_choices
        self._n = n

    def count_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Count the tokens of the call's prompts."""
        self._facts.num_prompt_tokens = sum(map(len, prompts))

    def count(self, delta: Delta) -> None:
        """Count the tokens of a delta."""
        facts = self._facts
        facts.num_output_tokens += delta.num_tokens
        if facts.first_token_s is None:
            facts.first_token_s = time.monotonic() - facts.arrived_at
        cached = self._num_cached_tokens
        if delta.num_cached_tokens > cached[delta.choice]:
            if delta.choice % self._n == 0:
                facts.num_cached_tokens += delta.num_cached_tokens - cached[delta.choice]
            cached[delta.choice] = delta.num_cached_tokens
        if delta.finish_reason is not None:
            facts.finish_reasons[delta.choice] = delta.finish_reason

    def usage(self) -> Usage:
        """The totals. Cached tokens are those of each prompt's first choice; others may reuse its pages."""
        facts = self._facts
        return Usage(facts.num_prompt_tokens, facts.num_output_tokens, facts.num_cached_tokens)
