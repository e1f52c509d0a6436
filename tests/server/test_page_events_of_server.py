"""A real server with page events: a router learns what is cached, and what a flush takes."""

import json
import urllib.request
from pathlib import Path

import pytest
import zmq
from leaving_clients import FLAGS, info, served
from vllm_events import Router

LIMIT_MS = 20_000


def post(url: str, body: object) -> None:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def test_a_late_router_learns_by_replay_what_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--kv-events-endpoint", "tcp://*:0", "--kv-events-replay-endpoint", f"ipc://{tmp_path}/replay"]
    monkeypatch.setattr("leaving_clients.FLAGS", [*FLAGS, *flags])
    with served(tmp_path / "model") as url:
        at = info(url)["start"]["page_events"]
        assert at["endpoint"].startswith("tcp://0.0.0.0:")
        body = {"prompt": list(range(3, 13)), "max_tokens": 1, "cache_salt": "s", "temperature": 0}
        post(f"{url}/v1/completions", body)
        context = zmq.Context()
        replay = context.socket(zmq.DEALER)
        replay.connect(at["replay_endpoint"])
        router = Router()

        def read_from(first: int) -> int:
            replay.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                assert replay.poll(LIMIT_MS), "no answer came"
                _, _, seq, payload = replay.recv_multipart()
                if not payload:
                    return first
                assert int.from_bytes(seq, "big") == first
                router.read_batch(payload)
                first += 1

        seen = read_from(0)
        tokens = tuple(range(3, 13))
        assert router.prefixes == {("s", tokens[:4]), ("s", tokens[:8])}
        post(f"{url}/flush_cache", {})
        for _ in range(100):  # each answer shows that the engine went on
            seen = read_from(seen)
            if not router.prefixes:
                break
            info(url)
        assert router.prefixes == set()
        context.destroy(linger=0)
