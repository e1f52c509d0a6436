"""A server with an API key file: who may do what, what limits answer, SIGHUP, usage, and shares of room."""

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from running_server import LIMIT_S, RunningServer, eventually
from small_model import make_folder
from test_service import ask

from minisgl.config.api_keys import KeyEntry, append_api_key, hash_of

FLAG_KEY, ADMIN = "flag-key", "admin-key"
ENTRIES: dict[str, dict[str, Any]] = {
    "alice": {},
    "bob": {"priority": 5},
    "low": {"priority": -2},
    "root": {"admin": True},
    "slow": {"requests_per_minute": 2},
    "few": {"tokens_per_minute": 60},
    "one": {"max_concurrent_requests": 2},
}


def key_of(name: str) -> str:
    return f"key-of-{name}"


def write_keys(file: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Write the file at once, as an editor does."""
    new = file.with_suffix(".new")
    for name, fields in entries.items():
        append_api_key(new, KeyEntry(name=name, key_sha256=hash_of(key_of(name)), **fields))
    new.replace(file)


class Guarded(NamedTuple):
    """A server and its files."""

    server: RunningServer
    keys: Path
    usage: Path

    def usage_lines(self, request_id: str) -> list[dict[str, Any]]:
        lines = map(json.loads, self.usage.read_text().splitlines())
        return [line for line in lines if line["request_id"] == request_id]

    def complete(
        self,
        key: str,
        prompt: str | None = "@say hello",
        path: str = "/v1/completions",
        name: str = "",
        **fields: Any,
    ) -> tuple[int, dict[str, str], Any]:
        """One call with this key: status, headers, body."""
        headers = {"Authorization": f"Bearer {key}"} | ({"X_Request_Id": name} if name else {})
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 50, **fields}
        status, answered, data = ask(self.server, path, "POST", body, **headers)
        return status, answered, json.loads(data)

    def counts(self) -> dict[str, int]:
        """The counts of keys in /metrics, by "name label"."""
        text = ask(self.server, "/metrics")[2].decode()
        found = re.findall(r'minisgl:key_\w+_total\{api_key="(.*?)",\w+="(.*?)",.*\} (\S+)', text)
        return {f"{name} {label}": int(float(value)) for name, label, value in found}

    def report(self) -> dict[str, Any]:
        return json.loads(self.complete(ADMIN, "@report", max_tokens=250)[2]["choices"][0]["text"])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("keys")
    keys, usage = folder / "keys.jsonl", folder / "usage.jsonl"
    write_keys(keys, ENTRIES)
    with RunningServer(
        make_folder(folder / "model"),
        api_key=(FLAG_KEY,),
        admin_key=(ADMIN,),
        api_keys_file=str(keys),
        usage_log=str(usage),
        max_queued_requests=8,
    ) as running:
        yield Guarded(running.ready(), keys, usage)


@pytest.mark.parametrize("key", [key_of("alice"), key_of("root"), FLAG_KEY, ADMIN])
def test_the_keys_of_the_file_and_those_of_the_flags_open_the_door(guarded: Guarded, key: str) -> None:
    assert guarded.complete(key)[0] == 200
    assert ask(guarded.server, "/v1/models", x_api_key=key)[0] == 200


@pytest.mark.parametrize("key", ["", "key-of-alic", "key-of-nobody", hash_of(key_of("alice")), "\xe9"])
def test_other_keys_do_not_and_neither_does_a_hash(guarded: Guarded, key: str) -> None:
    status, headers, answer = guarded.complete(key)
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert "x-ratelimit-limit-requests" not in headers


def test_only_admins_may_do_what_concerns_others(guarded: Guarded) -> None:
    for key, status in (
        (key_of("alice"), 403),
        (FLAG_KEY, 403),
        (key_of("root"), 200),
        (ADMIN, 200),
    ):
        assert ask(guarded.server, "/flush_cache", "POST", Authorization=f"Bearer {key}")[0] == status


def test_neither_keys_nor_hashes_are_anywhere_to_be_read(guarded: Guarded) -> None:
    guarded.complete(key_of("alice"))
    for path in ("/server_info", "/metrics", "/health", "/openapi.json", "/load"):
        text = ask(guarded.server, path, Authorization=f"Bearer {ADMIN}")[2].decode()
        assert key_of("alice") not in text
        assert hash_of(key_of("alice")) not in text


@pytest.mark.parametrize(
    ("name", "asked", "given"),
    [
        ("alice", None, 0),
        ("alice", -4, -4),
        ("bob", None, 5),
        ("bob", 2, 2),
        ("bob", 5, 5),
        ("low", None, -2),
    ],
)
def test_a_keys_priority_is_that_of_its_requests_unless_they_ask_for_less(
    guarded: Guarded, name: str, asked: int | None, given: int
) -> None:
    fields: dict[str, Any] = {} if asked is None else {"priority": asked}
    answer = guarded.complete(key_of(name), "@report", max_tokens=250, **fields)[2]
    assert json.loads(answer["choices"][0]["text"])["priority"] == given


@pytest.mark.parametrize(("name", "asked"), [("alice", 1), ("bob", 6), ("low", -1), ("low", 0)])
def test_no_request_has_more_than_its_keys_priority(guarded: Guarded, name: str, asked: int) -> None:
    status, _, answer = guarded.complete(key_of(name), priority=asked)
    assert (status, answer["error"]["param"]) == (403, "priority")
    assert f"a priority above {ENTRIES[name].get('priority', 0)}" in answer["error"]["message"]
    assert guarded.complete(key_of("root"), priority=9)[0] == 200


def test_the_engine_is_told_whose_a_request_is(guarded: Guarded) -> None:
    for key, user in ((key_of("alice"), "alice"), (FLAG_KEY, "--api-key"), (ADMIN, "--admin-key")):
        answer = guarded.complete(key, "@report", max_tokens=250)[2]
        assert json.loads(answer["choices"][0]["text"])["user"] == user


def test_a_limit_on_calls_answers_as_openai_does_and_its_client_understands(guarded: Guarded) -> None:
    status, headers, _ = guarded.complete(key_of("slow"))
    assert (status, headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == (
        200,
        "2",
        "1",
    )
    assert re.fullmatch(r"\d+s", headers["x-ratelimit-reset-requests"])
    client = openai.OpenAI(
        base_url=guarded.server.url("/v1"), api_key=key_of("slow"), max_retries=0, timeout=LIMIT_S
    )
    for _ in client.completions.create(model="tiny", prompt="@say hello", max_tokens=9, stream=True):
        pass
    with pytest.raises(openai.RateLimitError) as refused:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "@say hi"}])
    error = refused.value
    assert (error.code, error.type) == ("rate_limit_exceeded", "requests")
    assert 1 <= int(error.response.headers["retry-after"]) <= 30
    assert error.response.headers["x-ratelimit-remaining-requests"] == "0"
    client.close()
    status, headers, _ = guarded.complete(key_of("slow"), path="/v1/messages", messages=[], prompt=None)
    assert status == 400, "a malformed call is told so"
    anthropic = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "@say hi"}]}
    sent = {"x_api_key": key_of("slow")}
    status, _, body = ask(guarded.server, "/v1/messages", "POST", anthropic, **sent)
    assert (status, json.loads(body)["error"]["type"]) == (429, "rate_limit_error")
    assert guarded.counts()["slow requests_per_minute"] == 2


def test_a_limit_on_tokens_counts_prompt_and_output(guarded: Guarded) -> None:
    status, headers, answer = guarded.complete(key_of("few"), "@say the quick brown fox", name="few-1")
    used = answer["usage"]["total_tokens"]
    assert status == 200
    assert int(headers["x-ratelimit-limit-tokens"]) == 60
    (line,) = guarded.usage_lines("few-1")
    assert line["prompt_tokens"] + line["output_tokens"] == used
    status, headers, answer = guarded.complete(key_of("few"), "@say " + "the quick brown fox " * 30)
    assert (status, answer["error"]["code"]) == (400, "request_too_large")
    assert "can never pass" in answer["error"]["message"]
    statuses = [guarded.complete(key_of("few"), "@say jumps over the lazy dog")[0] for _ in range(9)]
    assert statuses[-1] == 429
    status, headers, answer = guarded.complete(key_of("few"))
    assert (status, answer["error"]["type"]) == (429, "tokens")
    assert int(headers["retry-after"]) >= 1
    assert headers["x-ratelimit-remaining-tokens"] == "0"


def hold(guarded: Guarded, pool: ThreadPoolExecutor, name: str, key: str) -> Future[Any]:
    """Open a call that waits for @go."""
    return pool.submit(guarded.complete, key, "@wait hello", name=name)


def num_open(guarded: Guarded) -> int:
    return guarded.server.health()[1]["open_requests"]


def test_requests_open_at_a_time_are_limited(guarded: Guarded) -> None:
    with ThreadPoolExecutor(2) as pool:
        held = hold(guarded, pool, "held", key_of("one"))
        eventually(lambda: num_open(guarded) == 1, "the call is open")
        status, _, answer = guarded.complete(key_of("one"), n=2)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        status, _, answer = guarded.complete(key_of("one"), n=3)
        assert (status, answer["error"]["code"]) == (400, "invalid_value")
        assert guarded.complete(key_of("one"))[0] == 200
        assert guarded.complete(key_of("alice"))[0] == 200
        guarded.complete(ADMIN, "@go")
        assert held.result(LIMIT_S)[0] == 200
    assert guarded.complete(key_of("one"), n=2)[0] == 200


def test_a_key_leaves_room_for_others_however_much_it_sends(guarded: Guarded) -> None:
    with ThreadPoolExecutor(8) as pool:
        held = []
        for number in range(4):  # half of --max-queued-requests
            held.append(hold(guarded, pool, f"held-{number}", key_of("alice")))
            eventually(lambda number=number: num_open(guarded) == number + 1, "the call is open")
        status, headers, answer = guarded.complete(key_of("alice"))
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (
            "4 requests open, and the 4 more that this server takes are for other keys"
            in answer["error"]["message"]
        )
        assert "retry-after" in headers
        for other in ("bob", "low", "root"):
            assert guarded.complete(key_of(other))[0] == 200
        guarded.complete(ADMIN, "@go")
        assert [one.result(LIMIT_S)[0] for one in held] == [200] * 4
    assert guarded.counts()["alice share_of_requests"] == 1


def test_counts_equal_the_usage_of_the_answers(guarded: Guarded) -> None:
    before = guarded.counts()
    sums: dict[str, int] = dict.fromkeys(("prompt", "cached", "output"), 0)
    for number, (prompt, fields) in enumerate(
        [
            ("@say hello world", {}),
            ("@cached the quick brown fox", {"stream": False}),
            ("@cached the quick brown fox", {"n": 3}),
            ("@say one two", {"stop": "two"}),
            ("@say the lazy dog", {"max_tokens": 2}),
        ]
    ):
        fields = {"return_cached_tokens_details": True, **fields}
        status, _, answer = guarded.complete(key_of("bob"), prompt, name=f"count-{number}", **fields)
        assert status == 200
        usage = answer["usage"]
        mine = {
            "prompt": usage["prompt_tokens"],
            "cached": (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            "output": usage["completion_tokens"],
        }
        (line,) = guarded.usage_lines(f"count-{number}")
        assert {kind: line[f"{kind}_tokens"] for kind in mine} == mine
        assert (line["key"], line["endpoint"], line["model"]) == ("bob", "/v1/completions", "tiny")
        reasons: dict[str, int] = {}
        for choice in answer["choices"]:
            reasons[choice["finish_reason"]] = reasons.get(choice["finish_reason"], 0) + 1
        assert line["finish_reasons"] == reasons
        sums = {kind: sums[kind] + mine[kind] for kind in sums}
    after = guarded.counts()
    assert sums["cached"] > 0
    assert {kind: after[f"bob {kind}"] - before.get(f"bob {kind}", 0) for kind in sums} == sums


def test_a_call_that_fails_or_is_aborted_has_its_line_too(guarded: Guarded) -> None:
    guarded.complete(key_of("root"), "@spoil hello", name="spoilt")
    (line,) = guarded.usage_lines("spoilt")
    assert line["finish_reasons"] == {"error": 1}
    with ThreadPoolExecutor(1) as pool:
        held = hold(guarded, pool, "to-abort", key_of("root"))
        eventually(lambda: num_open(guarded) == 1, "the call is open")
        for key, found in (("alice", 0), ("root", 1)):
            body = {"request_id": "to-abort"}
            sent = {"Authorization": f"Bearer {key_of(key)}"}
            answer = ask(guarded.server, "/abort", "POST", body, **sent)[2]
            assert json.loads(answer) == {"aborted": found}, "only calls of one's own key are found"
        assert held.result(LIMIT_S)[0] == 409
    (line,) = guarded.usage_lines("to-abort")
    assert line["finish_reasons"] == {"abort": 1}


def test_sighup_reads_the_file_again_and_opens_the_usage_log_again(guarded: Guarded) -> None:
    server, pid = guarded.server, guarded.server.process.pid
    before = guarded.counts()
    with ThreadPoolExecutor(1) as pool:
        held = hold(guarded, pool, "removed", key_of("low"))
        eventually(lambda: num_open(guarded) == 1, "the call is open")
        entries = {name: fields for name, fields in ENTRIES.items() if name != "low"}
        write_keys(guarded.keys, {**entries, "new": {}})
        renamed = guarded.usage.with_suffix(".old")
        guarded.usage.rename(renamed)
        os.kill(pid, signal.SIGHUP)
        eventually(lambda: guarded.complete(key_of("new"))[0] == 200, "the new key is taken")
        assert guarded.complete(key_of("low"))[0] == 401
        guarded.complete(ADMIN, "@go")
        assert held.result(LIMIT_S)[0] == 200, "open requests of a removed key end naturally"
    assert guarded.usage.exists()
    (line,) = guarded.usage_lines("removed")
    assert line["key"] == "low"
    after = guarded.counts()
    assert all(after[name] >= count for name, count in before.items()), "counters go on"
    guarded.keys.write_text('{"name": "broken"}\n')
    os.kill(pid, signal.SIGHUP)
    eventually(lambda: "the keys stay as they were" in server.errors.read_text(), "the log names the mistake")
    assert "missing required field `key_sha256`" in server.errors.read_text()
    assert guarded.complete(key_of("new"))[0] == 200
    assert guarded.complete(key_of("low"))[0] == 401
    assert key_of("alice") not in server.errors.read_text()


def test_a_file_that_cannot_be_used_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    keys = tmp_path / "keys.jsonl"
    keys.write_text("{}\n")
    with RunningServer(make_folder(tmp_path / "model"), api_keys_file=str(keys)) as server:
        assert server.process.wait(LIMIT_S) == 2
        (line,) = server.errors.read_text().splitlines()
        assert "line 1: Object missing required field `name`" in line


def test_without_a_file_calls_have_a_usage_log_and_no_user(tmp_path: Path) -> None:
    usage = tmp_path / "usage.jsonl"
    with RunningServer(make_folder(tmp_path / "model"), usage_log=str(usage), api_workers=2) as server:
        server.ready()
        for number in range(8):  # some of them go to each process
            server.call("/v1/completions", {"prompt": f"@say {number}", "max_tokens": 9})
        assert server.report()["user"] == ""
        old = usage.with_suffix(".old")
        eventually(lambda: len(usage.read_text().splitlines()) == 9, "a line for each call")
        usage.rename(old)
        os.kill(server.process.pid, signal.SIGHUP)
        eventually(usage.exists, "the log is opened again")
        server.complete("@say again")
        assert {json.loads(line)["key"] for line in old.read_text().splitlines()} == {None}
        assert "minisgl:key_" not in ask(server, "/metrics")[2].decode()
