"""Every batch size has a graph."""

import pytest

from minisgl.engine.graphs.buckets import bucket_for, decode_buckets


@pytest.mark.parametrize("max_batch", [1, 2, 3, 7, 8, 9, 64, 65, 100, 256, 257, 1000, 4096])
def test_every_batch_size_has_a_bucket_that_wastes_at_most_half(max_batch: int) -> None:
    buckets = decode_buckets(max_batch)
    assert buckets == tuple(sorted(set(buckets)))
    assert buckets[-1] == max(max_batch, 2)
    for batch in range(1, max_batch + 1):
        bucket = bucket_for(batch, buckets)
        assert bucket is not None
        assert batch <= bucket <= 2 * batch


def test_a_batch_beyond_the_largest_bucket_has_none() -> None:
    assert bucket_for(9, decode_buckets(8)) is None
    assert decode_buckets(0) == ()
    assert bucket_for(1, ()) is None
