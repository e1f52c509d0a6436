"""Log probabilities as they come from the device, read into what a request's outputs say."""

import numpy as np

from minisgl.request import TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON has no word for; the number that OpenAI uses."""


def read_logprobs(line: np.ndarray, token_id: int, num_top: int) -> TokenLogprobs:
    """One line (int32 [2 + 2 * k], `engine.logits.pack_logprobs`) with its first `num_top` top tokens."""
    k = (len(line) - 2) // 2
    values = line.view(np.float32)
    return TokenLogprobs(
        token_id,
        max(float(values[0]), LOWEST),
        int(line[1]) + 1,
        line[2 : 2 + min(num_top, k)].tolist(),
        [max(value, LOWEST) for value in values[2 + k : 2 + k + min(num_top, k)].tolist()],
    )
