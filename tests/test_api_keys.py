"""The file of API keys, and `minisgl api-key`, which makes its lines."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minisgl.cli import main
from minisgl.commands.api_key import run_api_key
from minisgl.config import ServerConfig, check_server_config
from minisgl.config.api_keys import KeyEntry, append_api_key, hash_of, new_key, read_api_keys
from minisgl.errors import ConfigError
from minisgl.scheduler.queue.policy import MAX_PRIORITY

A, B = hashlib.sha256(b"a").hexdigest(), hashlib.sha256(b"b").hexdigest()


def line(name: str = "alice", key_sha256: str = A, **fields: object) -> str:
    return json.dumps({"name": name, "key_sha256": key_sha256, **fields})


def read(tmp_path: Path, *lines: str, taken: tuple[str, ...] = ()) -> list[KeyEntry]:
    file = tmp_path / "keys.jsonl"
    file.write_text("\n".join(lines))
    return read_api_keys(file, taken)


def test_a_file_has_a_key_a_line_and_may_have_comments_and_empty_lines(tmp_path: Path) -> None:
    limits: dict[str, Any] = {
        "requests_per_minute": 60,
        "tokens_per_minute": 9000,
        "max_concurrent_requests": 4,
    }
    found = read(
        tmp_path, "# team one", line(**limits, priority=-3, admin=True), "", "  ", line("bob@x.org", B)
    )
    assert found == [
        KeyEntry(name="alice", key_sha256=A, **limits, priority=-3, admin=True),
        KeyEntry(name="bob@x.org", key_sha256=B),
    ]
    assert read(tmp_path) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("{", "line 2: it is not a JSON object"),
        ("[]", "line 2: Expected `object`, got `array`"),
        (line("bob", B, requests_per_min=5), "line 2: Object contains unknown field `requests_per_min`"),
        (json.dumps({"name": "bob"}), "line 2: Object missing required field `key_sha256`"),
        (line("bob", "1234"), "line 2: must be a SHA-256 as 64 small hexadecimal digits - at `key_sha256`"),
        (line("bob", B.upper()), "small hexadecimal digits"),
        (line("--api-key", B), "line 2: must be up to 64 letters, digits"),
        (line("two words", B), "at `name`"),
        (line("a" * 65, B), "at `name`"),
        (line("bob", B, requests_per_minute=0), "line 2: Expected `int` >= 1 - at `requests_per_minute`"),
        (line("bob", B, tokens_per_minute=1.5), "at `tokens_per_minute`"),
        (line("bob", B, max_concurrent_requests=1 << 40), "at `max_concurrent_requests`"),
        (line("bob", B, priority=101), "at `priority`"),
        (line("bob", B, admin=1), "at `admin`"),
        (line("alice", B), "line 2: line 1 has the name alice, too"),
        (line("bob", A), r"line 2 \(bob\): line 1 has the same key"),
    ],
)
def test_a_wrong_line_is_named_with_what_is_wrong(tmp_path: Path, wrong: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        read(tmp_path, line(), wrong)
    assert "--api-keys-file" in str(refused.value)


def test_a_key_given_as_a_flag_may_not_be_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 1 \(alice\): its key is also given with --api-key"):
        read(tmp_path, line(), taken=("b", "a"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl can't be read: No such file"):
        read_api_keys(tmp_path / "none.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_api_keys(tmp_path / "binary")


def test_the_bound_on_priorities_is_the_schedulers() -> None:
    KeyEntry(name="a", key_sha256=A, priority=MAX_PRIORITY)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": "a", "key_sha256": A, "priority": MAX_PRIORITY + 1}, KeyEntry)


def test_keys_are_random_and_long_and_only_their_hash_is_kept() -> None:
    keys = {new_key() for _ in range(50)}
    assert len(keys) == 50
    assert all(len(key) == 3 + 43 and key.startswith("sk-") for key in keys)  # 32 random bytes in base64
    assert hash_of("a") == A


def test_the_command_prints_a_line_for_the_file_and_the_key_beside_it() -> None:
    out, err = io.StringIO(), io.StringIO()
    run_api_key({"name": "alice", "tokens_per_minute": 5}, None, out, err)
    entry = msgspec.json.decode(out.getvalue(), type=KeyEntry)
    key = err.getvalue().split()[-1]
    assert entry == KeyEntry(name="alice", key_sha256=hash_of(key), tokens_per_minute=5)
    assert key not in out.getvalue()


def test_the_command_adds_lines_to_a_file_that_the_server_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.jsonl"
    words = ["--requests-per-minute", "60", "--max-concurrent-requests", "4", "--priority", "2", "--admin"]
    assert main(["api-key", "alice", "--file", str(file), *words]) == 0
    first = capsys.readouterr().out.strip()
    file.write_text(file.read_text().rstrip("\n"))  # as an editor may leave it
    assert main(["api-key", "bob", "--file", str(file)]) == 0
    second = capsys.readouterr().out.strip()
    limits: dict[str, Any] = {
        "requests_per_minute": 60,
        "max_concurrent_requests": 4,
        "priority": 2,
        "admin": True,
    }
    assert read_api_keys(file) == [
        KeyEntry(name="alice", key_sha256=hash_of(first), **limits),
        KeyEntry(name="bob", key_sha256=hash_of(second)),
    ]
    assert file.stat().st_mode & 0o777 == 0o600
    before = file.read_text()
    for words, needed in (
        (["alice", "--file", str(file)], "has a key named alice already"),
        (["a b", "--file", str(file)], "64 letters, digits"),
        (["carol", "--file", str(file), "--requests-per-minute", "0"], ">= 1"),
        (["carol", "--file", str(tmp_path / "no" / "folder")], "can't be written"),
    ):
        assert main(["api-key", *words]) == 2
        assert needed in capsys.readouterr().err
    assert file.read_text() == before


def test_a_broken_file_is_not_added_to(tmp_path: Path) -> None:
    file = tmp_path / "keys.jsonl"
    file.write_text("{}\n")
    with pytest.raises(ConfigError, match="line 1"):
        append_api_key(file, KeyEntry(name="a", key_sha256=A))
    assert file.read_text() == "{}\n"


def test_a_file_of_keys_goes_with_one_server_process() -> None:
    with pytest.raises(ConfigError, match="--api-keys-file needs --api-workers 1, got 2"):
        check_server_config(ServerConfig(api_keys_file="keys.jsonl", api_workers=2))
    for empty in (ServerConfig(api_keys_file=""), ServerConfig(usage_log="")):
        with pytest.raises(ConfigError, match="the name of a file"):
            check_server_config(empty)
    check_server_config(ServerConfig(api_keys_file="keys.jsonl", usage_log="usage.jsonl"))
