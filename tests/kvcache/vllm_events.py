"""A router that reads vLLM's KV events and knows nothing of minisgl, and what it should then know.

The structs have the fields, types, defaults and encodings of vllm/distributed/kv_events.py in vLLM 0.33.0
(its source archive on PyPI).
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from minisgl.kvcache.manager import KVCacheManager

Hash = bytes | int
Prefix = tuple[str, tuple[int, ...]]
"""A cache salt, and the tokens from the beginning of a prompt to the end of a page."""


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Router:
    """Knows the cached prefixes from the events alone. An event that can't be is an error."""

    def __init__(self) -> None:
        self._pages: dict[Hash, Prefix] = {}

    @property
    def prefixes(self) -> set[Prefix]:
        assert len(set(self._pages.values())) == len(self._pages), "one prefix has two hashes"
        return set(self._pages.values())

    def read(self, events: Sequence[Any]) -> None:
        """Apply the events of a step, over the wire's encoding."""
        self.read_batch(msgspec.msgpack.encode([1.5, list(events), 0]))

    def read_batch(self, payload: bytes) -> KVEventBatch:
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for page in event.block_hashes:
                        del self._pages[page]
                case AllBlocksCleared():
                    self._pages.clear()
        return batch

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        keys = event.extra_keys or [None] * len(event.block_hashes)
        assert len(keys) == len(event.block_hashes)
        salt, tokens = "", ()
        if event.parent_block_hash is not None:
            salt, tokens = self._pages[event.parent_block_hash]
        elif keys[0] is not None:
            (salt,) = keys[0]
        for place, page in enumerate(event.block_hashes):
            assert page not in self._pages, "a page is stored twice"
            tokens += tuple(event.token_ids[place * size : (place + 1) * size])
            self._pages[page] = (salt, tokens)


def cached_prefixes(manager: KVCacheManager) -> set[Prefix]:
    """What a prompt can find now, read from the tree node by node."""
    found: set[Prefix] = set()
    pending = [
        (salt, (), child) for salt, root in manager.tree.roots.items() for child in root.children.values()
    ]
    while pending:
        salt, tokens, node = pending.pop()
        for page in np.array(node.tokens, np.int32).reshape(-1, manager.page_size).tolist():
            tokens += tuple(page)
            found.add((salt, tokens))
        pending += [(salt, tokens, child) for child in node.children.values()]
    return found
