"""Who calls: the users of the API key file, found by their key, and what they hold now.

Promise: the file is read whole or not at all: a file with a mistake changes nothing. A user that stays in the
file keeps its counts and its open calls, also when its key or its limits change.
"""

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from minisgl.config.api_keys import KeyEntry, read_api_keys
from minisgl.errors import ConfigError, RequestError
from minisgl.server.keys.limits import Bucket, LimitReachedError

log = logging.getLogger(__name__)

API_KEY = "--api-key"
ADMIN_KEY = "--admin-key"
"""The users of these flags. The names can't be in a file."""


class User:
    """One user: its limits, and what it holds now. Without an entry it has no limits.

    Attributes:
        name: for metrics, logs and the engine; "" where callers are not told apart.
        num_open: its requests that are open, each choice by itself.
        num_queued_tokens: prompt tokens of its requests that have no output token yet.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.num_open = 0
        self.num_queued_tokens = 0
        self.priority = 0
        self.is_admin = False
        self._clock = clock
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._max_open: int | None = None

    def set_limits(self, entry: KeyEntry) -> None:
        """Take the limits of an entry. What has been used stays used."""
        self.priority = entry.priority
        self.is_admin = entry.admin
        self._max_open = entry.max_concurrent_requests
        self._requests = self._resized(self._requests, entry.requests_per_minute)
        self._tokens = self._resized(self._tokens, entry.tokens_per_minute)

    def admit(self, num_requests: int) -> None:
        """Count a call of so many requests, before its prompts are known.

        Raises:
            LimitReachedError: 429; nothing was counted.
            RequestError: 400 if the call is too large for the limit.
        """
        most, bucket = self._max_open, self._requests
        if most is not None and num_requests > most:
            message = (
                f"{num_requests} requests in one call, this key may have {most} open; send fewer at a time"
            )
            raise RequestError(400, "invalid_value", message)
        if most is not None and self.num_open + num_requests > most:
            message = f"this key may have {most} requests open and has {self.num_open}; wait for an answer"
            raise LimitReachedError("max_concurrent_requests", "requests", message)
        self._check_tokens(1)
        if bucket is not None:
            if bucket.level < 1:
                wait_s = bucket.seconds_until(1)
                message = (
                    f"this key may make {bucket.per_minute} requests a minute; try again in {wait_s:.3g} s"
                )
                raise LimitReachedError("requests_per_minute", "requests", message, wait_s)
            bucket.take(1)
        self.num_open += num_requests

    def take_back(self) -> None:
        """Do not count a call that was admitted and then refused."""
        if self._requests is not None:
            self._requests.take(-1)

    def take_prompt(self, num_tokens: int) -> None:
        """Count the tokens of a call's prompts.

        Raises:
            LimitReachedError: 429; nothing was counted.
            RequestError: 400 if the prompts are larger than the limit, so that they can never pass.
        """
        bucket = self._tokens
        if bucket is None:
            return
        if num_tokens > bucket.per_minute:
            message = (
                f"the call has {num_tokens} prompt tokens and can never pass: this key may use "
                f"{bucket.per_minute} tokens a minute; shorten it"
            )
            raise RequestError(400, "request_too_large", message)
        self._check_tokens(num_tokens)
        bucket.take(num_tokens)

    def take_output(self, num_tokens: int) -> None:
        """Count output tokens (below 0: give tokens back). They are never refused; later calls are."""
        if self._tokens is not None:
            self._tokens.take(num_tokens)

    def headers(self) -> dict[str, str]:
        """OpenAI's headers about its limits."""
        requests = self._requests.headers("requests") if self._requests is not None else {}
        return requests | (self._tokens.headers("tokens") if self._tokens is not None else {})

    def _check_tokens(self, num_tokens: int) -> None:
        """Raise a 429 if there are fewer tokens left."""
        bucket = self._tokens
        if bucket is not None and bucket.level < num_tokens:
            wait_s = bucket.seconds_until(num_tokens)
            message = f"this key may use {bucket.per_minute} tokens a minute; try again in {wait_s:.3g} s"
            raise LimitReachedError("tokens_per_minute", "tokens", message, wait_s)

    def _resized(self, bucket: Bucket | None, per_minute: int | None) -> Bucket | None:
        if per_minute is None:
            return None
        if bucket is None:
            return Bucket(per_minute, self._clock)
        bucket.resize(per_minute)
        return bucket


class Users:
    """All users of the server. Everything runs on the event loop's thread.

    Args:
        file: the API key file; None = callers are not told apart, and nobody has limits.
        api_keys, admin_keys: those given as flags, which the file must not have.
        clock: gives seconds.

    Raises:
        ConfigError: the file can't be used.
    """

    def __init__(
        self,
        file: Path | None = None,
        api_keys: Sequence[str] = (),
        admin_keys: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.nobody = User("")
        self.of_api_key = User(API_KEY) if file else self.nobody
        self.of_admin_key = User(ADMIN_KEY) if file else self.nobody
        self.has_file = file is not None
        """Whether callers need a key."""
        self._file = file
        self._flag_keys = (*api_keys, *admin_keys)
        self._num_flag_users = bool(api_keys) + bool(admin_keys)
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._by_name: dict[str, User] = {}
        self._by_tag: dict[bytes, tuple[bytes, User]] = {}  # tag of a key's hash -> hash, user
        if file is not None:
            self._take(read_api_keys(file, self._flag_keys))

    @property
    def are_several(self) -> bool:
        """Whether users have to share the room for open requests."""
        return self.has_file and len(self._by_name) + self._num_flag_users > 1

    def find(self, key_sha256: bytes) -> User | None:
        """The user whose key has this hash.

        The hash is looked up by a keyed hash of it, so the time that this takes tells nothing about any key.
        """
        found = self._by_tag.get(self._tag(key_sha256))
        return found[1] if found is not None and hmac.compare_digest(found[0], key_sha256) else None

    def reload(self) -> None:
        """Read the file again. One with a mistake changes nothing, and the log says what is wrong."""
        if self._file is None:
            return
        try:
            entries = read_api_keys(self._file, self._flag_keys)
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error)
            return
        before = set(self._by_name)
        self._take(entries)
        after = set(self._by_name)
        log.info("%d API keys: %d new, %d removed", len(after), len(after - before), len(before - after))

    def _take(self, entries: Sequence[KeyEntry]) -> None:
        """Make these the users."""
        known, self._by_name, self._by_tag = self._by_name, {}, {}
        for entry in entries:
            user = self._by_name[entry.name] = known.get(entry.name) or User(entry.name, self._clock)
            user.set_limits(entry)
            key_sha256 = bytes.fromhex(entry.key_sha256)
            self._by_tag[self._tag(key_sha256)] = (key_sha256, user)

    def _tag(self, key_sha256: bytes) -> bytes:
        return hashlib.blake2b(key_sha256, key=self._secret, digest_size=16).digest()
