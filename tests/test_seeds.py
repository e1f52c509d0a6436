"""Seeds for requests that bring none."""

import pytest

from minisgl.ipc.messages import AddRequest
from minisgl.request import SamplingParams
from minisgl.seeds import base_seed, request_seed


def test_seeds_differ_by_request_and_by_source_and_repeat() -> None:
    many = [request_seed(7, request_id) for request_id in range(500)]
    assert many == [request_seed(7, request_id) for request_id in range(500)]
    assert len({*many, request_seed(8, 0)}) == 501
    assert all(-(1 << 63) <= seed < 1 << 63 for seed in many)
    assert min(many) < 0 < max(many)


def test_a_source_without_a_seed_is_a_fresh_one() -> None:
    assert base_seed(-3) == -3
    assert len({base_seed(None) for _ in range(10)}) == 10


def test_no_request_that_samples_goes_to_an_engine_without_a_seed() -> None:
    with pytest.raises(AssertionError, match="needs a seed"):
        AddRequest(1, b"", SamplingParams(temperature=0.5))
    AddRequest(1, b"", SamplingParams(temperature=0.5, seed=4))
    AddRequest(1, b"", SamplingParams(temperature=0))
