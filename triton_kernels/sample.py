"""The next token of each row: temperature, top-k, top-p, min-p, one random number; exact argmax at temperature 0.

For one row, l = its logits in float32 (NaN counts as -inf, +inf as the largest finite number):

    temperature == 0:  argmax of l, the lowest id among equals
    otherwise:         w = exp((l - max l) / temperature), and the support shrinks in this order
      top_k (0 = off)    ids with l >= the k-th largest l                     (all that tie with it stay)
      top_p (>= 1 off)   of these, ids with mass(strictly larger l) < top_p * mass(all of these)
      min_p (0 = off)    of these, ids with w >= min_p                        (the largest w is 1)
    draw:              u in [0, 1); the first id, in vocabulary order, whose running mass exceeds u * mass

The largest logit always stays, so the support is never empty. u is the top 24 bits of the first word of
Philox-4x32-10 with key `seed` and counter `position`: a row's draw depends on nothing else in the batch.

R rows, V vocabulary.
"""

import torch
from torch import Tensor

_FLOAT_MAX = 3.4028234663852886e38
_MASK32 = 0xFFFFFFFF


def _multiply_high_low(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of the 64-bit product of two 32-bit numbers, in int64 arithmetic that cannot overflow."""
    high = ((constant * (x >> 16)) + ((constant * (x & 0xFFFF)) >> 16)) >> 16
    low = ((constant * (x & 0xFFFF)) + (((constant * (x >> 16)) & 0xFFFF) << 16)) & _MASK32
    return high, low


def uniform_reference(seed: Tensor, position: Tensor) -> Tensor:
    """Philox-4x32-10 (Salmon et al. 2011): float32 [R] in [0, 1) from seed int64 [R] and position int32 [R]."""
    key0, key1 = seed & _MASK32, (seed >> 32) & _MASK32
    c0, c1, c2, c3 = (position.long() & _MASK32, *(torch.zeros_like(seed) for _ in range(3)))
    for _ in range(10):
        high0, low0 = _multiply_high_low(0xD2511F53, c0)
        high1, low1 = _multiply_high_low(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & _MASK32, (key1 + 0xBB67AE85) & _MASK32
    return (c0 >> 8).float() * 2.0**-24


def support_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """(w float64 [R, V], kept bool [R, V]) of rows whose temperature is above 0, by sorting."""
    values = logits.float().nan_to_num(nan=float("-inf"), posinf=_FLOAT_MAX, neginf=float("-inf"))
    vocab = values.shape[1]
    ordered = values.sort(dim=1, descending=True).values
    largest = ordered[:, :1]
    spread = torch.where(largest == float("-inf"), 0.0, (values - largest).double())
    weights = torch.exp(spread / temperature[:, None].double())

    count = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab).long()
    kept = values >= ordered.gather(1, count[:, None] - 1)

    kept_weights = weights * kept
    order = values.argsort(dim=1, descending=True)
    running = kept_weights.gather(1, order).cumsum(1)
    # The mass before the first of the ids that tie with this one.
    first_equal = torch.searchsorted(-ordered, -ordered, side="left")
    before = torch.where(first_equal == 0, 0.0, running.gather(1, (first_equal - 1).clamp(min=0)))
    inside = (before < top_p[:, None].double() * running[:, -1:]) | (top_p[:, None] >= 1) | (first_equal == 0)
    kept &= torch.empty_like(kept).scatter_(1, order, inside)

    kept &= (weights >= min_p[:, None].double()) | (values == largest)
    return weights, kept


def sample_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """What sample means, in plain torch, by sorting the vocabulary of every row that is not greedy."""
    values = logits.float().nan_to_num(nan=float("-inf"), posinf=_FLOAT_MAX, neginf=float("-inf"))
    # torch.argmax promises no order among equals: take the lowest index of the largest value.
    ids = (values == values.amax(1, keepdim=True)).int().argmax(1)
    drawn_rows = (temperature > 0).nonzero().flatten()
    if drawn_rows.numel():
        weights, kept = support_reference(
            logits[drawn_rows],
            temperature[drawn_rows],
            top_k[drawn_rows],
            top_p[drawn_rows],
            min_p[drawn_rows],
        )
        running = (weights * kept).cumsum(1)
        uniform = uniform_reference(seed[drawn_rows], position[drawn_rows]).double()
        target = uniform[:, None] * running[:, -1:]
        # The first id of the support whose running mass exceeds the target; the last one if rounding hides it.
        beyond = (running > target) & kept
        first = torch.where(beyond.any(1), beyond.int().argmax(1), last_true(kept))
        ids[drawn_rows] = first
    return ids.int()


def last_true(mask: Tensor) -> Tensor:
    """Index of the last True of each row of mask [R, V]."""
    return mask.shape[1] - 1 - mask.flip(1).int().argmax(1)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """One token id per row, int32 [R], from logits [R, V] of any float dtype.

    temperature, top_p, min_p are float32 [R], top_k and position int32 [R], seed int64 [R].
    """
    return sample_reference(logits, temperature, top_k, top_p, min_p, seed, position)
