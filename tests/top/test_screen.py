"""What `minisgl top` draws, as text."""

import io

import msgspec
import pytest
from made_up import made_request, made_snapshot
from rich.console import Console

from minisgl.server.watch.history import Sample
from minisgl.top.screen import draw
from minisgl.top.state import State
from minisgl.top.terminal import parse_keys


def drawn(state: State, width: int = 80, height: int = 24) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(draw(state, width, height))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_screen_has_the_servers_figures() -> None:
    text = "\n".join(drawn(State(snapshot=made_snapshot([made_request(1)]))))
    for part in ("made-up", "serving", "output 123 tok/s", "running 3", "waiting 2", "cache hits 25 %"):
        assert part in text
    for part in ("pages in use 40 %", "cached 10 %", "first token p50 41 ms", "step p50 7.5 ms"):
        assert part in text
    assert "a step took 90 ms" in text
    assert "call-1" in text
    assert "312 ms for pages" in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 10), (132, 50)])
def test_the_screen_fits_the_terminal(width: int, height: int) -> None:
    requests = [made_request(number, why="x" * 200) for number in range(100)]
    state = State(snapshot=made_snapshot(requests))
    lines = drawn(state, width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) <= max(height, 14)


def test_two_engines_are_added_up_and_shown_one_by_one() -> None:
    snapshot = made_snapshot([made_request(1), made_request(2)], num_engines=2)
    engines = snapshot.engines.engines
    sample = Sample(time=0.0, output_tokens_per_s=7.0, running=1)
    engines[1] = msgspec.structs.replace(engines[1], state="restarting", sample=sample)
    histories = snapshot.history.engines
    histories[1] = msgspec.structs.replace(histories[1], columns={"output_tokens_per_s": [100.0]})
    state = State(snapshot=snapshot)
    lines = drawn(state)
    text = "\n".join(lines)
    assert "made-up  2 engines on cpu  1 serving" in lines[0]
    assert "output 130 tok/s   prompts 456 tok/s   running 4   waiting 2" in text
    assert any(line.startswith("engine 0 serving    output   123 tok/s") for line in lines)
    assert any(line.startswith("engine 1 restarting output     7 tok/s") for line in lines)
    assert any(line.endswith("▁▃█") for line in lines)
    assert [line.split()[:3] for line in lines if line.startswith("call-")] == [
        ["call-2", "1", "decoding"],
        ["call-1", "0", "decoding"],
    ]
    state.take("e")
    lines = drawn(state)
    assert "made-up  engine 0 of 2 on cpu  serving" in lines[0]
    assert [line.split()[:2] for line in lines if line.startswith("call-")] == [["call-1", "decoding"]]


@pytest.mark.parametrize("num_engines", [2, 8])
def test_a_screen_of_several_engines_fits_the_terminal(num_engines: int) -> None:
    requests = [made_request(number, why="x" * 200) for number in range(100)]
    lines = drawn(State(snapshot=made_snapshot(requests, num_engines)))
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24


def test_the_list_scrolls_to_the_chosen_request() -> None:
    state = State(snapshot=made_snapshot([made_request(number) for number in range(100)]), chosen=5)
    assert any("call-5 " in line for line in drawn(state))


def test_a_request_is_explained_with_what_helps() -> None:
    state = State(snapshot=made_snapshot([made_request(1)]), chosen=1, explains=True)
    text = "\n".join(drawn(state))
    assert "312 ms for pages: 12 needed, 3 free" in text
    assert "--memory-fraction" in text


def test_a_server_that_is_away_is_said_and_the_last_figures_stay() -> None:
    state = State(snapshot=made_snapshot([made_request(1)]), problem="Connection refused")
    text = "\n".join(drawn(state))
    assert "Connection refused" in text
    assert "call-1" in text


def test_keys_that_come_together_are_told_apart() -> None:
    data = b"\x1b[A\x1b[Bs\xc3\xa4\x1b[6~\x1b"
    assert parse_keys(data) == ["up", "down", "s", "ä", "page-down", "escape"]
