"""The sizes of steps that get a recorded graph (buckets). Other steps are padded to the next bucket."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from minisgl.config import ResolvedConfig
from triton_kernels.launch import align_down, align_up

MAX_JOINED_TOKENS = 2048
"""Most tokens of a prefill bucket with room for decodes. Joining gains little in larger steps."""

MIN_STARTUP_TOKENS = 128
"""From this size on, a prefill's time grows with its tokens for every model."""

JOINED_DECODE_ROOMS = (32, 256)
"""Room for decodes in a prefill graph: for few and for many. Unused room costs time: attention splits keys as
if all rows were there, and head and sampling compute padding rows."""


def decode_buckets(max_batch: int) -> tuple[int, ...]:
    """Ascending sizes up to `max_batch`: 2, 4, 8, then steps of 8 to 64, of 16 to 256, of 32 beyond.

    Padding costs at most a factor of two below 8, and an eighth to a quarter above. There is no bucket of 1:
    torch.compile would compile it separately, and a step of two rows takes as long.
    """
    if max_batch < 1:
        return ()
    largest = max(max_batch, 2)
    sizes = {2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_batch + 32, 32)}
    return tuple(sorted({size for size in sizes if size < largest} | {largest}))


def bucket_for(batch: int, buckets: tuple[int, ...]) -> int | None:
    """The smallest bucket that holds `batch` rows; None if there is none."""
    index = bisect_left(buckets, batch)
    return buckets[index] if index < len(buckets) else None


def startup_sizes(sizes: Iterable[int]) -> frozenset[int]:
    """The sizes to record before serving: powers of two, and the largest, which can replace all others."""
    sizes = sorted(sizes)
    return frozenset({size for size in sizes if size & (size - 1) == 0} | set(sizes[-1:]))


class PrefillBucket(NamedTuple):
    """The capacity of one recorded prefill."""

    tokens: int  # of chunks and decodes together
    rows: int  # of chunks
    decodes: int = 0  # that join the chunks


def prefill_buckets(max_tokens: int, max_rows: int, max_decodes: int = 0) -> tuple[PrefillBucket, ...]:
    """Ascending buckets up to `max_tokens`; none if `max_tokens` is below 1.

    Up to 128 tokens, buckets are powers of two, because the time goes into reading the weights. Above,
    padding costs time: buckets pad by at most a half, from 512 tokens on by at most a quarter. Padding rows
    cost time in head, sampling and attention, so a bucket has one row per 32 tokens, 16 to 128 in all. Each
    size up to MAX_JOINED_TOKENS exists without decodes, with room for few and with room for many.

    Args:
        max_decodes: most decodes that may join chunks.
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
        for decodes in sorted({0, *[_decode_room(most, size, max_decodes) for most in JOINED_DECODE_ROOMS]})
    )


def _decode_room(most: int, size: int, max_decodes: int) -> int:
    """The number of decodes that a bucket of this size has room for."""
    return align_down(min(most, size, max_decodes)) if size <= MAX_JOINED_TOKENS else 0


def startup_prefills(buckets: Sequence[PrefillBucket]) -> list[PrefillBucket]:
    """The buckets to record before serving, all without room for decodes.

    They are the smallest, the largest, and the `startup_sizes` from MIN_STARTUP_TOKENS on.
    """
    sizes = startup_sizes(bucket.tokens for bucket in buckets if bucket.tokens >= MIN_STARTUP_TOKENS)
    sizes |= {buckets[0].tokens, buckets[-1].tokens}
    return [bucket for bucket in buckets if bucket.tokens in sizes and not bucket.decodes]


def prefill_bucket_for(size: PrefillBucket, buckets: Iterable[PrefillBucket]) -> PrefillBucket | None:
    """The smallest of ascending buckets that holds a prefill of this size.

    None if there is none, or if more than half of a bucket above 64 tokens would be padding.
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
        """Most graphs that can exist."""
        return len(self.decode) + len(self.prefill)


def max_joined_decodes(config: ResolvedConfig) -> int:
    """Most decodes that a prefill graph has room for; 0 = decodes never join chunks."""
    if not config.join_decodes:
        return 0
    # At least one row has a chunk.
    return align_up(min(JOINED_DECODE_ROOMS[-1], config.max_running_requests - 1))


def buckets_of(config: ResolvedConfig) -> Buckets:
    """The buckets that result from the settings."""
    return Buckets(
        decode_buckets(config.max_graph_batch),
        prefill_buckets(config.max_graph_tokens, config.max_running_requests, max_joined_decodes(config)),
    )
