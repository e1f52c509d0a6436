"""Arrival times of requests in the open loop, where requests do not wait for answers.

Promise: equal seeds give equal times, and times never decrease. Torch-free.
"""

import math

import numpy as np

from minisgl.errors import ConfigError


def poisson_arrivals(num_requests: int, rate_per_s: float, seed: int) -> list[float]:
    """Seconds from the start, with independent exponential gaps of mean 1 / `rate_per_s`, from 0 on.

    The rate only scales the gaps, so runs at several rates see the same bursts.
    """
    if math.isinf(rate_per_s):
        return [0.0] * num_requests
    gaps = np.random.default_rng((seed, 2)).exponential(1.0, num_requests)
    gaps[:1] = 0.0
    return (np.cumsum(gaps) / rate_per_s).tolist()


def constant_arrivals(num_requests: int, rate_per_s: float) -> list[float]:
    """One request every 1 / `rate_per_s` seconds, from 0 on."""
    return [0.0 if math.isinf(rate_per_s) else place / rate_per_s for place in range(num_requests)]


def parse_rates(text: str, flag: str) -> list[float]:
    """Positive numbers separated by commas; "inf" is one.

    Raises:
        ConfigError: `text` is anything else; the message names `flag`.
    """
    return [_positive(part, flag) for part in text.split(",")]


def parse_counts(text: str, flag: str) -> list[int]:
    """Positive whole numbers separated by commas.

    Raises:
        ConfigError: `text` is anything else; the message names `flag`.
    """
    numbers = parse_rates(text, flag)
    if not all(number.is_integer() for number in numbers):
        raise ConfigError(f"{flag} must be whole numbers separated by commas, got {text!r}")
    return [int(number) for number in numbers]


def _positive(text: str, flag: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise ConfigError(f"{flag} must be positive numbers separated by commas, got {text!r}")
    return number
