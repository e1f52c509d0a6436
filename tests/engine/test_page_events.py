"""The events on the wire, their hashes, and subscribers that come late or read slowly."""

import hashlib
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from vllm_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, Router

from minisgl.engine import page_events
from minisgl.engine.page_events import PageEventEncoder, PageEventPublisher
from minisgl.errors import ConfigError
from minisgl.ipc.page_events import EventBatch
from minisgl.kvcache.page_changes import AllPagesCleared, PageChange, PagesRemoved, PagesStored

LIMIT_MS = 10_000
END = b"\xff" * 8


def stored(page: int, *tokens: int, parent: int | None = None, salt: str = "") -> PagesStored:
    return PagesStored(parent, salt, struct.pack(f"<{len(tokens)}i", *tokens), array("i", [page]))


def decoded(*changes: PageChange) -> KVEventBatch:
    encoder = PageEventEncoder(2)
    return Router().read_batch(msgspec.msgpack.encode(EventBatch(2.5, encoder.encode(changes))))


def documented_hash(parent: bytes, *tokens: int) -> bytes:
    """What docs/scaling.md says."""
    return hashlib.blake2b(parent + struct.pack(f"<{len(tokens)}i", *tokens), digest_size=8).digest()


def number(digest: bytes) -> int:
    return struct.unpack(">Q", digest)[0]


def test_the_events_have_vllms_fields() -> None:
    batch = decoded(stored(3, 1, 2), PagesRemoved(array("i", [3])), AllPagesCleared())
    first = number(documented_hash(hashlib.blake2b(b"", digest_size=8).digest(), 1, 2))
    assert batch.events == [
        BlockStored(
            [first],
            None,
            [1, 2],
            2,
            None,
            "GPU",
            None,
            [None],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        ),
        BlockRemoved([first], "GPU", group_idx=0),
        AllBlocksCleared(),
    ]
    assert (batch.ts, batch.data_parallel_rank) == (2.5, 0)


def test_a_hash_is_that_of_the_documentation_and_covers_salt_and_all_tokens_before() -> None:
    batch = decoded(
        PagesStored(None, "s", struct.pack("<4i", 1, 2, 3, 4), array("i", [5, 6])),
        stored(7, 3, 4, parent=6),
        stored(8, 1, 2),
    )
    first = documented_hash(hashlib.blake2b(b"s", digest_size=8).digest(), 1, 2)
    second = documented_hash(first, 3, 4)
    third = documented_hash(second, 3, 4)
    run, below, unsalted = batch.events
    assert isinstance(run, BlockStored)
    assert isinstance(below, BlockStored)
    assert isinstance(unsalted, BlockStored)
    assert run.block_hashes == [number(first), number(second)]
    assert run.extra_keys == [("s",), None]
    assert (below.parent_block_hash, below.block_hashes) == (number(second), [number(third)])
    assert unsalted.block_hashes != run.block_hashes[:1]


def test_a_reused_page_id_gets_the_hash_of_its_new_tokens() -> None:
    batch = decoded(
        stored(3, 1, 2), PagesRemoved(array("i", [3])), stored(3, 5, 6), stored(4, 1, 1, parent=3)
    )
    new, below = batch.events[2:]
    assert isinstance(new, BlockStored)
    assert isinstance(below, BlockStored)
    assert below.parent_block_hash == new.block_hashes[0]


class Subscriber:
    """Reads as a router does, and asks for what it missed."""

    def __init__(self, publisher: PageEventPublisher, topic: bytes = b"") -> None:
        self._context = zmq.Context()
        self._context.setsockopt(zmq.BLOCKY, 0)  # a test that fails leaves it open, and must not wait for it
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt(zmq.SUBSCRIBE, topic)
        self._events.connect(publisher.addresses["endpoint"].replace("0.0.0.0", "127.0.0.1"))
        self._questions = self._context.socket(zmq.DEALER)
        self._questions.connect(publisher.addresses["replay_endpoint"].replace("0.0.0.0", "127.0.0.1"))

    def receive(self) -> tuple[bytes, int, bytes]:
        assert self._events.poll(LIMIT_MS), "no event came"
        topic, seq, payload = self._events.recv_multipart()
        return topic, int.from_bytes(seq, "big"), payload

    def first(self, publisher: PageEventPublisher, page: int) -> tuple[int, bytes]:
        """Publish until a batch arrives: a subscription takes effect some time after `connect`."""
        for token in range(100_000):
            publisher.publish([stored(page, token, 0), PagesRemoved(array("i", [page]))])
            if self._events.poll(5):
                return self.receive()[1:]
        raise AssertionError("the subscription has no effect")

    def replay(self, start: int) -> list[tuple[bytes, int, bytes]]:
        self.ask(start.to_bytes(8, "big"))
        answers = []
        while True:
            assert self._questions.poll(LIMIT_MS), "no answer came"
            empty, topic, seq, payload = self._questions.recv_multipart()
            assert empty == b""
            if seq == END:
                assert (topic, payload) == (b"", b"")
                return answers
            answers.append((topic, int.from_bytes(seq, "big"), payload))

    def ask(self, *frames: bytes) -> None:
        self._questions.send_multipart([b"", *frames])

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture(params=["tcp", "ipc"])
def publisher(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PageEventPublisher]:
    made = open_publisher(request.param, tmp_path)
    yield made
    made.close()


def open_publisher(kind: str, folder: Path, buffer_steps: int = 1000) -> PageEventPublisher:
    at = {"tcp": ("tcp://*:0", "tcp://*:0"), "ipc": (f"ipc://{folder}/events", f"ipc://{folder}/replay")}
    return PageEventPublisher(
        endpoint=at[kind][0],
        replay_endpoint=at[kind][1],
        topic="kv@here",
        buffer_steps=buffer_steps,
        page_size=2,
    )


def test_a_late_subscriber_gets_everything_by_replay(publisher: PageEventPublisher) -> None:
    publisher.publish([stored(1, 1, 2)])
    publisher.publish([stored(2, 3, 4, parent=1)])
    early = Subscriber(publisher)
    while len(early.replay(0)) < 3:  # its own and these two are sent before anybody subscribes
        pass
    early.close()
    late = Subscriber(publisher, b"kv@")
    seq, _ = late.first(publisher, 9)
    assert seq > 2, "it came too late for the first ones"
    missed = late.replay(0)
    assert [one[1] for one in missed[:4]] == [0, 1, 2, 3]
    assert {topic for topic, _, _ in missed} == {b"kv@here"}
    router = Router()
    assert isinstance(router.read_batch(missed[0][2]).events[0], AllBlocksCleared)
    for _, _, payload in missed[1:]:
        router.read_batch(payload)
    assert router.prefixes == {("", (1, 2)), ("", (1, 2, 3, 4))}
    assert [one[1] for one in late.replay(2)[:2]] == [2, 3]
    late.close()


def test_numbers_go_on_without_a_gap(publisher: PageEventPublisher) -> None:
    early = Subscriber(publisher)
    seq, _ = early.first(publisher, 9)
    for page in range(20, 30):
        publisher.publish([stored(page, page, 0)])
    publisher.publish([])  # nothing has changed: no batch
    publisher.publish([stored(30, 30, 0)])
    last = [early.receive() for _ in range(11)]
    while b"GPU" in last[-1][2] and not _is_page(last[-1][2], 30):
        last = [*last[1:], early.receive()]
    assert [one[1] for one in last] == list(range(last[0][1], last[0][1] + 11))
    assert last[0][1] > seq
    early.close()


def _is_page(payload: bytes, token: int) -> bool:
    event = Router().read_batch(payload).events[0]
    return isinstance(event, BlockStored) and event.token_ids == [token, 0]


def test_a_replay_has_the_newest_batches_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = open_publisher("ipc", tmp_path, buffer_steps=3)
    for page in range(1, 8):
        few.publish([stored(page, page, 0)])
    router = Subscriber(few)
    assert [one[1] for one in router.replay(0)] == [5, 6, 7]
    assert router.replay(8) == []
    assert router.replay(1 << 60) == []
    monkeypatch.setattr(page_events, "MAX_KEPT_BYTES", 400)
    few.publish([stored(8, 8, 0)])
    kept = router.replay(0)
    assert 1 <= len(kept) < 3
    assert sum(len(payload) for _, _, payload in kept) <= 400
    router.close()
    few.close()


def test_a_question_that_is_none_is_ignored(publisher: PageEventPublisher) -> None:
    router = Subscriber(publisher)
    router.ask()
    router.ask(b"1", b"2")
    router.ask(b"")  # number 0
    assert [one[1] for one in router.replay(0)][:1] == [0]
    router.close()


def test_a_subscriber_that_does_not_read_holds_up_nobody(tmp_path: Path) -> None:
    few = open_publisher("ipc", tmp_path, buffer_steps=10)
    slow = Subscriber(few)
    slow.first(few, 9)
    for token in range(5000):
        few.publish([stored(10 + token, token, 0)])
    newest = slow.replay(0)  # it is answered though thousands of its events wait or were dropped
    assert len(newest) == 10
    few.publish([PagesRemoved(array("i", [10]))])
    assert slow.replay(newest[-1][1] + 1)[0][1] == newest[-1][1] + 1
    slow.close()
    few.close()


@pytest.mark.parametrize("flag", ["endpoint", "replay_endpoint"])
def test_an_address_in_use_is_refused_by_its_flag(tmp_path: Path, flag: str) -> None:
    first = open_publisher("tcp", tmp_path)
    taken = first.addresses["endpoint"].replace("0.0.0.0", "*")
    others = {"endpoint": "tcp://*:0", "replay_endpoint": None} | {flag: taken}
    with pytest.raises(ConfigError, match=f"--kv-events-{flag.replace('_', '-')} .* can't be used"):
        PageEventPublisher(topic="", buffer_steps=1, page_size=2, **others)  # pyright: ignore
    first.close()


def test_closing_sends_what_was_published_and_may_be_repeated(tmp_path: Path) -> None:
    publisher = open_publisher("tcp", tmp_path)
    reader = Subscriber(publisher)
    reader.first(publisher, 9)
    publisher.publish([stored(77, 7, 7)])
    publisher.close()
    publisher.close()
    publisher.publish([AllPagesCleared()])
    for _ in range(100_000):
        event = Router().read_batch(reader.receive()[2]).events[0]
        if isinstance(event, BlockStored) and event.token_ids == [7, 7]:
            break
    reader.close()
