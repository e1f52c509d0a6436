"""Sizes of steps that have a recorded graph; everything between is padded up to the next one."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from minisgl.config import ResolvedConfig
from triton_kernels.launch import align_down, align_up

JOINED_TOKENS = 2048
"""Steps of more hardly gain by it: what decodes read once more is a small part of them."""

FIRST_TOKENS = 128
"""From here on a prefill takes longer the more tokens it has, whatever the model."""

JOINED = (32, 256)
"""Decodes that may go with chunks in a graph: few and many. Where there is room for more than come, attention
cuts their keys as if all had come, and the head and the sampling compute what is not there."""


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

    tokens: int  # of chunks and decodes together
    rows: int  # of chunks
    decodes: int = 0  # that go with them


def prefill_buckets(max_tokens: int, max_rows: int, max_decodes: int = 0) -> tuple[PrefillBucket, ...]:
    """Ascending buckets up to `max_tokens`; none if that is below 1.

    Up to 128 tokens by powers of two, where reading the weights is all the work; then with steps that pad
    by a half at most, and from 512 on by a quarter, because padding is computed. So are rows that are not
    there: each costs a share of the head's product and of the sampling, and in every layer a program of
    attention for each KV head, which finds nothing to do. There is one for every 32 tokens, 16 to 128 in all.
    Each size up to JOINED_TOKENS comes without decodes and with room for few and many.

    Args:
        max_decodes: that may go with chunks.
    """
    if max_tokens < 1:
        return ()
    sizes = {16, 32, 64, 128, 192, 256, 384}
    power = 512
    while power < max_tokens:
        sizes.update(range(power, 2 * power, power // 4))
        power *= 2
    sizes = sorted({size for size in sizes if size < max_tokens} | {max_tokens})
    return tuple(
        PrefillBucket(size, min(max(16, size // 32), 128, size, max_rows), decodes)
        for size in sizes
        for decodes in sorted({0, *[_room(most, size, max_decodes) for most in JOINED]})
    )


def _room(most: int, size: int, max_decodes: int) -> int:
    """For how many decodes a bucket of this size has room."""
    return align_down(min(most, size, max_decodes)) if size <= JOINED_TOKENS else 0


def first_prefills(buckets: Sequence[PrefillBucket]) -> list[PrefillBucket]:
    """Those to record before serving, without room for decodes: the smallest, the largest, and of the
    `first_sizes` those that are not all about reading the weights."""
    sizes = first_sizes(bucket.tokens for bucket in buckets if bucket.tokens >= FIRST_TOKENS)
    sizes |= {buckets[0].tokens, buckets[-1].tokens}
    return [bucket for bucket in buckets if bucket.tokens in sizes and not bucket.decodes]


def prefill_bucket_for(size: PrefillBucket, buckets: Iterable[PrefillBucket]) -> PrefillBucket | None:
    """The smallest of ascending buckets that holds such a prefill.

    None when there is none, or when more than half of it (but for the smallest buckets) would be padding.
    """
    most_tokens = max(64, 2 * size.tokens)
    for bucket in buckets:
        tokens, rows, decodes = bucket
        if tokens > most_tokens:
            break
        if tokens >= size.tokens and rows >= size.rows and decodes >= size.decodes:
            return bucket
    return None


class Buckets(NamedTuple):
    """The sizes of steps that get a graph, ascending."""

    decode: tuple[int, ...]
    prefill: tuple[PrefillBucket, ...]

    @property
    def num_graphs(self) -> int:
        return len(self.decode) + len(self.prefill)


def max_joined(config: ResolvedConfig) -> int:
    """Decodes for which graphs of prefill have room, at most; 0 = none ever go with chunks."""
    if not config.join_decodes:
        return 0
    return align_up(min(JOINED[-1], config.max_running_requests - 1))  # one row has a chunk


def buckets_of(config: ResolvedConfig) -> Buckets:
    """The buckets that the settings ask for."""
    return Buckets(
        decode_buckets(config.max_graph_batch),
        prefill_buckets(config.max_graph_tokens, config.max_running_requests, max_joined(config)),
    )
