"""Sizes of steps that have a recorded graph; everything between is padded up to the next one."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from minisgl.config import ResolvedConfig


def decode_buckets(max_batch: int) -> tuple[int, ...]:
    """Ascending sizes up to `max_batch`: 2, 4, 8, then steps of 8 to 64, of 16 to 256, of 32 beyond.

    Padding costs at most a factor of two below 8 and an eighth to a quarter above. None of 1, for which
    torch.compile would compile once more, to save nothing: a step of two rows takes as long.
    """
    if max_batch < 1:
        return ()
    largest = max(max_batch, 2)
    sizes = {2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_batch + 32, 32)}
    return tuple(sorted({size for size in sizes if size < largest} | {largest}))


def bucket_for(batch: int, buckets: tuple[int, ...]) -> int | None:
    """The smallest bucket that holds `batch` rows; None when even the largest doesn't."""
    index = bisect_left(buckets, batch)
    return buckets[index] if index < len(buckets) else None


def first_sizes(sizes: Iterable[int]) -> frozenset[int]:
    """Those to record before serving: powers of two, and the largest, which can stand in for all others."""
    sizes = sorted(sizes)
    return frozenset({size for size in sizes if size & (size - 1) == 0} | set(sizes[-1:]))


class PrefillBucket(NamedTuple):
    """The most that one recorded prefill holds."""

    tokens: int
    rows: int


def prefill_buckets(max_tokens: int, max_rows: int) -> tuple[PrefillBucket, ...]:
    """Ascending buckets up to `max_tokens`; none if that is below 1.

    Up to 128 tokens by powers of two, where reading the weights is all the work; then with steps that pad
    by a half at most, and from 512 on by a quarter, because padding is computed. So are rows that are not
    there: each costs a share of the head's product and of the sampling, and in every layer a program of
    attention for each KV head, which finds nothing to do. There is one for every 32 tokens, 16 to 128 in all.
    """
    if max_tokens < 1:
        return ()
    sizes = {16, 32, 64, 128, 192, 256, 384}
    power = 512
    while power < max_tokens:
        sizes.update(range(power, 2 * power, power // 4))
        power *= 2
    sizes = sorted({size for size in sizes if size < max_tokens} | {max_tokens})
    return tuple(PrefillBucket(size, min(max(16, size // 32), 128, size, max_rows)) for size in sizes)


def prefill_bucket_for(
    num_tokens: int, num_rows: int, buckets: tuple[PrefillBucket, ...]
) -> PrefillBucket | None:
    """The smallest bucket that holds such a prefill.

    None when there is none, or when more than half of it (but for the smallest buckets) would be padding.
    """
    for bucket in buckets:
        if bucket.tokens > max(64, 2 * num_tokens):
            break
        if bucket.tokens >= num_tokens and bucket.rows >= num_rows:
            return bucket
    return None


class Buckets(NamedTuple):
    """The sizes of steps that get a graph, ascending."""

    decode: tuple[int, ...]
    prefill: tuple[PrefillBucket, ...]

    @property
    def num_graphs(self) -> int:
        return len(self.decode) + len(self.prefill)


def buckets_of(config: ResolvedConfig) -> Buckets:
    """The buckets that the settings ask for."""
    return Buckets(
        decode_buckets(config.max_graph_batch),
        prefill_buckets(config.max_graph_tokens, config.max_running_requests),
    )
