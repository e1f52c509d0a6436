"""Clients that leave at any moment, against the real engine: afterwards nothing is held."""

import random
from pathlib import Path

from leaving_clients import held, info, leave, served
from running_server import eventually

NUM_REQUESTS = 250


def test_nothing_is_held_after_clients_left_at_random_moments(tmp_path: Path) -> None:
    with served(tmp_path / "model") as url:
        ends = leave(url, NUM_REQUESTS, random.Random(7))
        assert sum(ends.values()) == NUM_REQUESTS
        assert min(ends.values()) > NUM_REQUESTS / 8
        eventually(lambda: not any(held(url).values()), f"nothing is held, but {held(url)}")
        assert info(url)["engine"]["num_preemptions"] > 0
        assert info(url)["server"]["ended"]["abort"] > NUM_REQUESTS / 10
