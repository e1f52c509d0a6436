"""Sampling in plain torch: the reference, which sorts the vocabulary, and what a CPU runs.

sample.py says what is computed. R rows, V vocabulary, both at least 1.
"""

import torch
from torch import Tensor

NO_TOKEN = -1
"""The result for a row without a logit above -inf. It equals minisgl's `scheduler.plan.NO_LOGITS`, as
tests/engine/test_no_token.py checks."""
FLOAT_MAX = 3.4028234663852886e38
LOWEST_TEMPERATURE = 1e-10
_MASK32 = 0xFFFFFFFF


def sample_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """The same as `sample.sample`, by sorting the vocabulary of every row that is not greedy."""
    return _sample(logits, temperature, (top_k, top_p, min_p), seed, position)


def sample_cpu(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """The same as `sample_reference`, which sorts the vocabulary only if some row needs it."""
    is_limited = (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    limits = (top_k, top_p, min_p) if bool(is_limited.any()) else None
    return _sample(logits, temperature, limits, seed, position)


def support_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """(w float64 [R, V], kept bool [R, V]) of rows whose temperature is above 0, by sorting."""
    values = _tamed(logits)
    vocab = values.shape[1]
    ordered = values.sort(dim=1, descending=True).values
    largest = ordered[:, :1]
    weights = _weights(values, largest, temperature)

    count = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab).long()
    kept = values >= ordered.gather(1, count[:, None] - 1)

    kept_weights = weights * kept
    order = values.argsort(dim=1, descending=True)
    running = kept_weights.gather(1, order).cumsum(1)
    # The mass of all strictly larger logits.
    first_equal = torch.searchsorted(-ordered, -ordered, side="left")
    before = torch.where(first_equal == 0, 0.0, running.gather(1, (first_equal - 1).clamp(min=0)))
    inside = (before < top_p[:, None].double() * running[:, -1:]) | (top_p[:, None] >= 1) | (first_equal == 0)
    kept &= torch.empty_like(kept).scatter_(1, order, inside)

    kept &= (weights >= min_p[:, None].double()) | (values == largest)
    return weights, kept


def uniform_reference(seed: Tensor, position: Tensor) -> Tensor:
    """Philox-4x32-10 (Salmon et al. 2011): float32 [R] in [0, 1) of seed int64 [R], position int32 [R]."""
    key0, key1 = seed & _MASK32, (seed >> 32) & _MASK32
    c0, c1, c2, c3 = (position.long() & _MASK32, *(torch.zeros_like(seed) for _ in range(3)))
    for _ in range(10):
        high0, low0 = _multiply_high_low(0xD2511F53, c0)
        high1, low1 = _multiply_high_low(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & _MASK32, (key1 + 0xBB67AE85) & _MASK32
    return (c0 >> 8).float() * 2.0**-24


def last_true(mask: Tensor) -> Tensor:
    """Index of the last True of each row of mask [R, V]."""
    return mask.shape[1] - 1 - mask.flip(1).int().argmax(1)


def _sample(
    logits: Tensor,
    temperature: Tensor,
    limits: tuple[Tensor, Tensor, Tensor] | None,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """Sample with top_k, top_p and min_p, or without limits."""
    values = _tamed(logits)
    # torch.argmax promises no order among equals: take the lowest index of the largest value.
    largest = values.amax(1, keepdim=True)
    ids = (values == largest).int().argmax(1)
    drawn = (temperature > 0).nonzero().flatten()
    if drawn.numel():
        uniform = uniform_reference(seed[drawn], position[drawn]).double()[:, None]
        if limits is None:
            running = _weights(values[drawn], largest[drawn], temperature[drawn]).cumsum(1)
            first = torch.searchsorted(running, uniform * running[:, -1:], right=True).flatten()
            ids[drawn] = first.clamp(max=values.shape[1] - 1)
        else:
            weights, kept = support_reference(
                logits[drawn], temperature[drawn], *(limit[drawn] for limit in limits)
            )
            running = (weights * kept).cumsum(1)
            # The first id of the support whose running mass exceeds the target; the last if rounding
            # prevents it.
            beyond = (running > uniform * running[:, -1:]) & kept
            ids[drawn] = torch.where(beyond.any(1), beyond.int().argmax(1), last_true(kept))
    return ids.masked_fill_(largest[:, 0] == float("-inf"), NO_TOKEN).int()


def _tamed(logits: Tensor) -> Tensor:
    """Float32 logits [R, V]: NaN is -inf, +inf the largest number."""
    return logits.float().nan_to_num(nan=float("-inf"), posinf=FLOAT_MAX, neginf=float("-inf"))


def _weights(values: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """w float64 [R, V] of tamed logits [R, V] whose largest are [R, 1]."""
    spread = torch.where(largest == float("-inf"), 0.0, (values - largest).double())
    return spread.div_(temperature[:, None].clamp(min=LOWEST_TEMPERATURE).double()).exp_()


def _multiply_high_low(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of the product of two 32-bit numbers, in int64 arithmetic that cannot overflow."""
    high = ((constant * (x >> 16)) + ((constant * (x & 0xFFFF)) >> 16)) >> 16
    low = ((constant * (x & 0xFFFF)) + (((constant * (x >> 16)) & 0xFFFF) << 16)) & _MASK32
    return high, low
