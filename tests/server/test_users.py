"""Users, their limits by a clock of the test, what is counted, and the usage log."""

import asyncio
import contextlib
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from small_model import CONTEXT, make_folder

from minisgl.config import ServerConfig
from minisgl.config.api_keys import KeyEntry
from minisgl.errors import ConfigError, RequestError
from minisgl.request import FinishReason, SamplingParams
from minisgl.server.http.callers import allowed_hosts
from minisgl.server.http.errors import error_body, fault_of
from minisgl.server.http.middleware import Caller, Gate
from minisgl.server.keys import usage_log as usage_log_module
from minisgl.server.keys.limits import Bucket, LimitReachedError, duration
from minisgl.server.keys.meter import CallNote, Meters
from minisgl.server.keys.room import check_requests
from minisgl.server.keys.usage_log import UsageLog
from minisgl.server.keys.users import User, Users
from minisgl.server.metrics import exposition
from minisgl.server.stats import ServerStats
from minisgl.server.streams import Streams
from minisgl.text.tokenizer import Tokenizer

NOTE = CallNote("call-1", "/v1/completions", 0.0, "tiny")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def user_with(clock: Clock, **limits: Any) -> User:
    user = User("alice", clock)
    user.set_limits(KeyEntry(name="alice", key_sha256="0" * 64, **limits))
    return user


def refusal_of(call: Any) -> LimitReachedError:
    with pytest.raises(LimitReachedError) as refused:
        call()
    return refused.value


def test_a_bucket_refills_at_a_constant_rate_up_to_a_minutes_worth() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(60)
    for seconds, level in ((0, 0.0), (1, 1.0), (0.5, 1.5), (30, 31.5), (1000, 60.0)):
        clock.now += seconds
        assert bucket.level == pytest.approx(level)
    bucket.take(90)
    assert bucket.level == -30
    assert bucket.seconds_until(1) == pytest.approx(31)
    assert bucket.headers("tokens") == {
        "x-ratelimit-limit-tokens": "60",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m30s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0201, "21ms"), (1, "1s"), (59.2, "1m0s"), (360, "6m0s"), (3601, "60m1s"), (12.5, "13s")],
)
def test_durations_are_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_calls_a_minute_are_limited_and_the_refusal_says_when_to_come_back() -> None:
    clock = Clock()
    user = user_with(clock, requests_per_minute=6)
    for _ in range(6):
        user.admit(1)
    clock.now += 4
    refused = refusal_of(lambda: user.admit(1))
    assert (refused.status, refused.code, refused.limit) == (
        429,
        "rate_limit_exceeded",
        "requests_per_minute",
    )
    assert refused.retry_after_s == 6
    error = json.loads(error_body(fault_of(refused)))["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert user.headers()["x-ratelimit-remaining-requests"] == "0"
    clock.now += 6
    user.admit(1)
    assert user.num_open == 7


def test_output_counts_against_the_tokens_of_a_minute_and_later_calls_wait_for_it() -> None:
    clock = Clock()
    user = user_with(clock, tokens_per_minute=600)
    user.admit(1)
    user.take_prompt(200)
    user.take_output(450)  # never refused
    refused = refusal_of(lambda: user.admit(1))  # before anything is tokenized
    assert (refused.limit, refused.kind, refused.retry_after_s) == ("tokens_per_minute", "tokens", 6)
    clock.now += 10
    user.admit(1)
    assert refusal_of(lambda: user.take_prompt(100)).retry_after_s == 5
    user.take_prompt(50)
    assert user.headers()["x-ratelimit-remaining-tokens"] == "0"


def test_what_can_never_pass_is_a_400_that_says_so() -> None:
    user = user_with(Clock(), tokens_per_minute=100, max_concurrent_requests=3)
    with pytest.raises(RequestError, match="can never pass: this key may use 100 tokens a minute") as refused:
        user.take_prompt(101)
    assert refused.value.status == 400
    with pytest.raises(RequestError, match="4 requests in one call, this key may have 3 open") as refused:
        user.admit(4)
    assert refused.value.status == 400
    user.take_prompt(100)


def test_open_requests_are_limited_with_each_choice_by_itself() -> None:
    user = user_with(Clock(), max_concurrent_requests=3)
    meters = Meters(ServerStats(), None)
    with meters.call(user, 2, 2, NOTE):
        assert refusal_of(lambda: user.admit(2)).limit == "max_concurrent_requests"
        with meters.call(user, 1, 1, NOTE):
            assert user.num_open == 3
        assert user.num_open == 2
    assert user.num_open == 0


def test_a_user_without_an_entry_has_no_limits_and_no_headers() -> None:
    user = User("")
    for _ in range(1000):
        user.admit(10)
    user.take_prompt(1 << 40)
    assert user.headers() == {}


def test_a_call_that_a_limit_refuses_takes_nothing_from_the_other_limits() -> None:
    clock, stats = Clock(), ServerStats()
    user = user_with(clock, requests_per_minute=10, tokens_per_minute=100)
    meters = Meters(stats, None)
    with meters.call(user, 1, 1, NOTE) as meter:
        meter.take_prompts(60)
        meter.count_sent()
    with pytest.raises(LimitReachedError), meters.call(user, 1, 1, NOTE) as meter:
        meter.take_prompts(60)
    with meters.call(user, 1, 1, NOTE) as meter:
        meter.take_prompts(30)  # and then the server had no room for it
    assert user.headers()["x-ratelimit-remaining-tokens"] == "40"
    assert user.headers()["x-ratelimit-remaining-requests"] == "8"  # the last one was no limit of the key's
    assert stats.key_refusals == {"alice tokens_per_minute": 1}


def test_usage_is_counted_as_the_answer_says_it_and_once() -> None:
    stats = ServerStats()
    user = user_with(Clock(), tokens_per_minute=1000)
    with Meters(stats, None).call(user, 4, 2, NOTE) as meter:  # two prompts with two choices each
        meter.take_prompts(30)
        meter.count_sent()
        for choice, cached in enumerate((16, 16, 0, 8)):
            meter.count_output(choice, 1, cached)
            meter.count_output(choice, 4, cached)
            meter.count_end(FinishReason.STOP if choice else FinishReason.LENGTH)
    assert stats.key_tokens == {"alice prompt": 30, "alice output": 20, "alice cached": 16}
    assert stats.key_requests == {"alice stop": 3, "alice length": 1}
    assert user.headers()["x-ratelimit-remaining-tokens"] == "950"
    text = exposition("tiny", stats, []).decode()
    labels = 'model_name="tiny"'
    assert f'minisgl:key_tokens_total{{api_key="alice",kind="cached",{labels}}} 16.0' in text
    assert f'minisgl:key_requests_total{{api_key="alice",finished_reason="stop",{labels}}} 3.0' in text


def keys_file(tmp_path: Path, *entries: KeyEntry) -> Path:
    file = tmp_path / "keys.jsonl"
    lines = [
        {
            name: getattr(entry, name)
            for name in KeyEntry.__struct_fields__
            if getattr(entry, name) is not None
        }
        for entry in entries
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def entry(name: str, key: str, **fields: Any) -> KeyEntry:
    return KeyEntry(name=name, key_sha256=digest(key).hex(), **fields)


def test_a_key_finds_its_user_and_no_other_key_does(tmp_path: Path) -> None:
    users = Users(keys_file(tmp_path, entry("alice", "a-key"), entry("bob", "b-key")))
    found = users.find(digest("a-key"))
    assert found is not None
    assert (found.name, users.are_several, users.has_file) == ("alice", True, True)
    assert users.find(digest("a-kex")) is None
    assert Users().find(digest("a-key")) is None


def test_reading_again_keeps_counts_and_removes_and_adds_users(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    file = keys_file(tmp_path, entry("alice", "a", tokens_per_minute=100), entry("bob", "b"))
    users = Users(file, clock=clock)
    alice, bob = users.find(digest("a")), users.find(digest("b"))
    assert alice is not None
    assert bob is not None
    alice.admit(1)
    alice.take_prompt(70)
    keys_file(tmp_path, entry("alice", "new", tokens_per_minute=200, priority=3), entry("carol", "c"))
    with caplog.at_level(logging.INFO):
        users.reload()
    assert "2 API keys: 1 new, 1 removed" in caplog.text
    assert users.find(digest("new")) is alice
    assert users.find(digest("a")) is users.find(digest("b")) is None
    assert (alice.num_open, alice.priority) == (1, 3)
    assert alice.headers()["x-ratelimit-remaining-tokens"] == "130"  # 70 of 200 are used
    keys_file(tmp_path, entry("alice", "new"))
    users.reload()
    assert alice.headers() == {}


def test_a_file_with_a_mistake_changes_nothing_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = keys_file(tmp_path, entry("alice", "a"))
    users = Users(file, admin_keys=("root",))
    for text in ('{"name": "bob"}', json.dumps({"name": "x", "key_sha256": digest("root").hex()})):
        file.write_text(text)
        users.reload()
        assert users.find(digest("a")) is not None
        assert "the keys stay as they were: --api-keys-file" in caplog.text
        assert "line 1" in caplog.text
        caplog.clear()
    file.unlink()
    users.reload()
    assert users.find(digest("a")) is not None
    with pytest.raises(ConfigError):
        Users(file)


def lines_of(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_usage_log_has_a_line_for_every_call_that_the_engine_got(tmp_path: Path) -> None:
    file = tmp_path / "usage.jsonl"
    log = UsageLog(file)
    meters = Meters(ServerStats(), log)
    for user in (User("alice"), User("")):
        with meters.call(user, 2, 2, NOTE) as meter:
            meter.take_prompts(7)
            meter.count_sent()
            meter.count_output(0, 3, 4)
            meter.count_end(FinishReason.STOP)
            meter.count_end(FinishReason.ABORT)
    with meters.call(User("alice"), 1, 1, NOTE):
        pass  # refused before the engine got it
    log.close()
    lines = lines_of(file)
    assert [line["key"] for line in lines] == ["alice", None]
    assert (
        lines[0].items()
        >= {
            "request_id": "call-1",
            "endpoint": "/v1/completions",
            "model": "tiny",
            "prompt_tokens": 7,
            "cached_tokens": 4,
            "output_tokens": 3,
            "finish_reasons": {"stop": 1, "abort": 1},
        }.items()
    )
    assert lines[0].keys() >= {"time", "duration_s"}


def test_a_renamed_usage_log_is_opened_again_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "usage.jsonl"
    log = UsageLog(file)
    log.write({"n": 1})
    file.rename(tmp_path / "old")
    log.write({"n": 2})
    log.reopen()
    log.write({"n": 3})
    assert (lines_of(tmp_path / "old"), lines_of(file)) == ([{"n": 1}, {"n": 2}], [{"n": 3}])
    file.unlink()
    (tmp_path / "usage.jsonl").mkdir()
    log.reopen()  # fails; the old file goes on
    log.write({"n": 4})
    log.close()


def test_a_full_disk_is_told_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = UsageLog(tmp_path / "usage.jsonl")
    real, room = usage_log_module.os.write, [5]

    def write(fd: int, data: bytes) -> int:
        taken = data[: room[0]]
        room[0] -= len(taken)
        if not taken:
            raise OSError(28, "No space left on device")
        return real(fd, taken)

    monkeypatch.setattr(usage_log_module.os, "write", write)
    for number in range(4):
        log.write({"n": number})
    assert caplog.text.count("its lines are lost") == 1
    room[0] = 1000
    log.write({"n": 9})
    assert "4 lines were lost" in caplog.text
    *_, last = (tmp_path / "usage.jsonl").read_text().splitlines()
    assert json.loads(last) == {"n": 9}
    log.close()


def test_a_usage_log_that_cannot_be_written_is_a_mistake_of_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--usage-log .* can't be written: No such file"):
        UsageLog(tmp_path / "no" / "usage.jsonl")


def test_a_user_queues_no_more_prompt_tokens_than_it_leaves_to_others(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path / "model"))
    meters = Meters(ServerStats(), None)
    flood, quiet = User("flood"), User("quiet")

    async def queue(streams: Streams, user: User, num_tokens: int, stack: contextlib.ExitStack) -> None:
        meter = stack.enter_context(meters.call(user, 1, 1, NOTE))
        stream = stack.enter_context(streams.open(1, meter=meter))
        await stream.submit(stream.prepare([[5] * num_tokens], SamplingParams(max_tokens=2)))

    async def main() -> None:
        streams = Streams(
            lambda _: None, tokenizer, 100, 60.0, max_queued_tokens=200, users_share=lambda: True
        )
        streams.accept_requests(CONTEXT)
        with contextlib.ExitStack() as stack:
            await queue(streams, flood, 60, stack)
            await queue(streams, flood, 40, stack)
            with pytest.raises(LimitReachedError) as refused:
                await queue(streams, flood, 30, stack)
            assert (refused.value.limit, refused.value.kind) == ("share_of_queued_tokens", "tokens")
            await queue(streams, quiet, 100, stack)
            assert (flood.num_queued_tokens, quiet.num_queued_tokens) == (100, 100)
        assert (flood.num_queued_tokens, quiet.num_queued_tokens) == (0, 0)
        assert (flood.num_open, quiet.num_open, streams.num_open) == (0, 0, 0)

    asyncio.run(main())


def test_two_users_that_flood_leave_a_third_of_the_room_to_the_next() -> None:
    def num_taken(users: list[User], most: int) -> list[int]:
        """How many requests each gets, if they ask in turns until all are refused."""
        asking = list(users)
        while asking:
            for user in list(asking):
                free = most - sum(other.num_open for other in users)
                user.num_open += 1
                try:
                    check_requests(user, 1, free, lambda _: None)
                except LimitReachedError:
                    user.num_open -= 1
                    asking.remove(user)
        return [user.num_open for user in users]

    assert num_taken([User("a")], 90) == [45]
    assert num_taken([User("a"), User("b")], 90) == [30, 30]
    assert num_taken([User(name) for name in "abcde"], 90) == [15] * 5


def test_without_an_admin_key_callers_of_the_file_are_no_admins_and_those_of_the_flag_still_are(
    tmp_path: Path,
) -> None:
    file = keys_file(tmp_path, entry("alice", "a"), entry("root", "r", admin=True))
    users = Users(file, api_keys=("flag",))
    gate = Gate(api_keys=("flag",), users=users)

    def caller(key: str) -> Caller | None:
        return gate._caller(make_mocked_request("GET", "/", headers={"Authorization": f"Bearer {key}"}))

    assert caller("a") == Caller(False, "alice", users.find(digest("a")))
    assert caller("r") == Caller(True, "root", users.find(digest("r")))
    assert caller("flag") == Caller(True, "--api-key 0", users.of_api_key)
    assert caller("none") is None
    assert Gate(users=Users(keys_file(tmp_path)))._caller(make_mocked_request("GET", "/")) is None


def test_a_server_with_a_file_of_keys_answers_under_every_name() -> None:
    assert allowed_hosts(ServerConfig(api_keys_file="keys.jsonl")) == {"*"}
