"""Results of launched steps on the host."""

from typing import NamedTuple

import numpy as np
from torch import Tensor


class HostTokens(NamedTuple):
    """Results of rows, copied to the host, and the places of those that count."""

    results: Tensor  # int32 [R] tokens, or [R, columns] as `sample_with_extras` returns
    places: list[int]

    def read(self) -> list[int]:
        """The tokens. Call it only after the copy has ended."""
        token_ids = (self.results if self.results.dim() == 1 else self.results[:, 0]).tolist()
        return [token_ids[place] for place in self.places]

    def logprobs(self) -> np.ndarray | None:
        """Log probabilities, int32 [places, 2 + 2 * k], or None. Call it only after the copy has ended."""
        if self.results.dim() == 1 or self.results.shape[1] == 1:
            return None
        return self.results[:, 1:].numpy()[self.places]


def join_logprobs(parts: list[HostTokens]) -> np.ndarray | None:
    """Join the log probabilities of all parts. Parts without any get zeros. None if no part has any."""
    lines = [part.logprobs() for part in parts]
    width = max((part.shape[1] for part in lines if part is not None), default=0)
    if not width:
        return None
    return np.concatenate(
        [
            np.zeros((len(part.places), width), dtype=np.int32) if found is None else found
            for part, found in zip(parts, lines, strict=True)
        ]
    )
