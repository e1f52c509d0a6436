"""GET /debug/timeline and POST /debug/profile, through the server to the engine and back."""

from collections.abc import Iterator

import pytest
from running_server import RunningServer
from small_model import make_folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(make_folder(tmp_path_factory.mktemp("debug") / "model")) as running:
        yield running.ready()


def test_the_timeline_comes_as_the_engine_made_it(server: RunningServer) -> None:
    status, body, headers = server.call("/debug/timeline")
    assert (status, body) == (200, {"traceEvents": []})
    assert headers["Content-Type"].startswith("application/json")


def test_a_profile_is_asked_for_by_its_number_of_steps(server: RunningServer) -> None:
    assert server.call("/debug/profile?steps=3", method="POST")[:2] == (
        200,
        {"steps": 3, "file": "/traces/3"},
    )
    assert server.call("/debug/profile", method="GET")[0] == 405


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("x", "whole number"),
        ("0", "from 1 to 1000"),
        ("1001", "from 1 to 1000"),
        ("1_0", "whole number"),
        ("9" * 5000, "whole number"),
        ("1e9", "whole number"),
        ("", "whole number"),
    ],
)
def test_a_number_of_steps_out_of_range_is_refused_is_refused_in_words(
    server: RunningServer, steps: str, message: str
) -> None:
    status, body, _ = server.call(f"/debug/profile?steps={steps}", method="POST")
    assert status == 400
    assert message in body["error"]["message"]


def test_what_the_engine_cannot_do_now_is_a_conflict(server: RunningServer) -> None:
    status, body, _ = server.call("/debug/profile?steps=9", method="POST")
    assert (status, body["error"]["message"]) == (409, "too many")
