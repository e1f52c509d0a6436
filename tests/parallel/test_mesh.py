"""How ranks find out whether all of them can go on as planned."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from forked_ranks import run_on_ranks

from minisgl.engine.graphs import recording
from minisgl.errors import MinisglError
from minisgl.parallel import mesh
from minisgl.parallel.mesh import Ranks


def test_ranks_agree_only_when_all_values_are_the_same(tmp_path: Path) -> None:
    def ask(ranks: Ranks) -> tuple[bool, bool]:
        return ranks.agree(7), ranks.agree(7 + ranks.rank)

    assert run_on_ranks(2, tmp_path, ask) == [(True, False)] * 2


def fall_back(ranks: Ranks, place: str) -> str:
    try:
        recording._fall_back_together(ranks, place, "--compile-mode off", ValueError("no compiler"))
    except MinisglError as error:
        return str(error)
    return "together"


def test_ranks_that_all_fail_at_the_same_place_fall_back_together(tmp_path: Path) -> None:
    assert run_on_ranks(3, tmp_path, fall_back, "compile") == ["together"] * 3


def test_a_rank_that_fails_alone_says_so_without_waiting_for_a_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "REACH_TIMEOUT_S", 0.5)

    def fail_on_one(ranks: Ranks) -> str:
        said = fall_back(ranks, "compile") if ranks.rank else "fine"
        ranks.minimum(0)  # what the others would be waiting in
        return said

    fine, said = run_on_ranks(2, tmp_path, fail_on_one)
    assert fine == "fine"
    assert "rank 1 of --tp alone can't compile" in said
    assert "--compile-mode off" in said
    assert "no compiler" in said


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    def ask(ranks: Ranks) -> bool:
        threading.Timer(0.05, ranks.lost.set).start()
        began = time.monotonic()
        found = ranks.all_ranks_reach("never")
        assert time.monotonic() - began < mesh.REACH_TIMEOUT_S / 4
        return found

    assert run_on_ranks(1, tmp_path, lambda ranks: ask(replace(ranks, size=2))) == [False]
