"""Page events as routers read them: the schema of vLLM 0.33's KV events, for msgpack.

A batch is an array, and an event a map with its name under "type". vLLM's fields that do not apply here are
left out, or None where its decoder requires them.
"""

import hashlib

import msgspec

FIRST_TIER = "GPU"
"""vLLM's name for the cache that the engine computes from, whatever the device."""
HASH_BYTES = 8


class BlockStored(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A run of pages can be reused from now on."""

    block_hashes: list[int]
    """One for each page, unsigned 64 bits."""
    parent_block_hash: int | None
    """The page before the run; None: the run begins its prompts."""
    token_ids: list[int]
    """`block_size` for each page."""
    block_size: int
    lora_id: int | None = None
    medium: str = FIRST_TIER
    lora_name: str | None = None
    extra_keys: list[tuple[str] | None]
    """One for each page: the `cache_salt` with the first page of a salted prompt, None with all others."""
    group_idx: int = 0
    kv_cache_spec_kind: str = "full_attention"


class BlockRemoved(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """These pages are gone."""

    block_hashes: list[int]
    medium: str = FIRST_TIER
    group_idx: int = 0


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    """All pages are gone."""


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """The events of one step, in order."""

    ts: float
    """Seconds since the epoch."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int = 0


def first_parent_hash(salt: str) -> bytes:
    """What takes the place of the parent's hash for a prompt's first page; 8 bytes."""
    return _hash(salt.encode("utf-8", "surrogatepass"))


def page_hash(parent: bytes, tokens: bytes) -> bytes:
    """The hash of a page; 8 bytes. The events have it as a big-endian number.

    Args:
        parent: the hash of the page before it, or `first_parent_hash`.
        tokens: the page's token ids as little-endian int32.
    """
    return _hash(parent + tokens)


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()
