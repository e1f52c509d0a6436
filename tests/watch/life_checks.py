"""What every life promises, recomputed."""

import pytest

from minisgl.lives import Life

FOLLOWING = {
    None: {"earlier", "restart", "server", "grammar", "queued"},
    "earlier": {"restart"},
    "restart": {"grammar", "queued"},
    "server": {"grammar", "queued"},
    "grammar": {"queued"},
    "queued": {"prompt"},
    "prompt": {"decoding", "preempted", "folded"},
    "decoding": {"preempted", "folded"},
    "preempted": {"prompt", "folded"},
    "folded": {"preempted"},
}


def check(life: Life) -> None:
    """Its phases follow each other, its waits and tokens add up."""
    kinds = [phase.kind for phase in life.phases]
    for before, kind in zip([None, *kinds], kinds, strict=False):
        assert kind in FOLLOWING[before], kinds
    begin_ms = 0.0
    for place, phase in enumerate(life.phases):
        assert phase.begin_ms == begin_ms
        is_open = phase.end_ms is None
        assert is_open == (life.end is None and place == len(life.phases) - 1)
        begin_ms = end_ms = life.total_ms if phase.end_ms is None else phase.end_ms
        assert end_ms >= phase.begin_ms
        if phase.kind in ("queued", "preempted"):
            assert sum(wait.ms for wait in phase.waits) == pytest.approx(end_ms - phase.begin_ms, abs=1e-6)
        else:
            assert not phase.waits
        ends = [end for end, _ in phase.chunks]
        assert ends == sorted(ends)
        assert all(phase.begin_ms <= end <= end_ms for end in ends)
    assert begin_ms == life.total_ms
    assert (life.state == "ended") == (life.end is not None)
    decoded = [phase.figures["tokens"] for phase in life.phases if phase.kind == "decoding"]
    if "folded" not in kinds and decoded:
        assert sum(decoded) == life.output_tokens
