"""Batch sizes that have a recorded graph; everything between is padded up to the next one."""

from bisect import bisect_left


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
