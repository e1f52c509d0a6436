"""Divides the KV pool between the groups of layers: how many pages each gets.

Promise: pure functions. No window group has more pages than the group that keeps all tokens, and with one
group the pool is all its.

The division suits requests of one length best: requests that are longer run out of the pages for all tokens
first, shorter ones of the windows'. It is made for the length at which both lose alike, at most half of what
the best division for them would hold.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minisgl.errors import ConfigError
from minisgl.kvcache.window_pages import most_row_pages
from minisgl.model_config.kv_groups import KVGroup

MOST_PLACES = 1 << 20
"""Of a model without a layer that keeps all tokens: pages of tokens that the prefix tree may remember. Each
takes the host about 150 bytes."""
STEP_SHARE = 0.25
"""Most of the pool that is set aside for the tokens of one step, which windows hold until the next."""


class PoolPart(NamedTuple):
    """A group's part of the pool."""

    window: int  # 0 = all tokens
    page_bytes: int
    num_pages: int  # with the scratch page

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes


class PoolLimits(NamedTuple):
    """What the pages of a pool are for."""

    page_size: int
    max_context_tokens: int
    max_rows: int
    max_step_tokens: int
    tile_tokens: int
    """See `WindowPages`."""

    @property
    def row_pages(self) -> int:
        """Pages of a row at full length."""
        return -(-self.max_context_tokens // self.page_size)

    def window_pages(self, window: int) -> int:
        """Most pages of a window that a decoding row holds."""
        return min(self.row_pages, most_row_pages(window, self.page_size, self.tile_tokens))

    @property
    def step_pages(self) -> int:
        """Pages of the new tokens of a step."""
        return -(-self.max_step_tokens // self.page_size)


def cache_groups(groups: Sequence[KVGroup], keep_windows: bool) -> tuple[KVGroup, ...]:
    """The groups that have page tables of their own; with `keep_windows`, all layers keep all tokens."""
    groups = [group for group in groups if not group.states]
    if not keep_windows or len(groups) + (groups[0].window > 0) == 1:
        return tuple(groups)
    layers = tuple(sorted(layer for group in groups for layer in group.layers))
    return (KVGroup(layers, 0, sum(group.elements_per_token for group in groups)),)


def divide_pool(
    free_bytes: int, page_bytes: Sequence[int], windows: Sequence[int], limits: PoolLimits
) -> list[int]:
    """The pages of each group, its scratch page included, if all of them may take `free_bytes`.

    Args:
        page_bytes: bytes of a page in each group.
        windows: of each group; 0 = it keeps all tokens, and only the first may.
    """
    row_pages = [limits.window_pages(window) if window else limits.row_pages for window in windows]
    most = [2 * limits.max_rows * pages + 1 for pages in row_pages]
    if len(windows) == 1 and not windows[0]:
        return [min(max(free_bytes, 0) // page_bytes[0], most[0])]
    most = [pages + limits.step_pages * (window > 0) for pages, window in zip(most, windows, strict=True)]
    if not windows[0]:
        most = [min(own, most[0]) for own in most]
    free_bytes -= sum(page_bytes)  # the scratch pages
    window_bytes = sum(size for size, window in zip(page_bytes, windows, strict=True) if window)
    step_pages = min(limits.step_pages, int(max(free_bytes, 0) * STEP_SHARE) // window_bytes)
    if not windows[0]:
        row_pages[0] = _design_pages(page_bytes, row_pages)
    # Rows of that length that fit beside the pages of one step.
    row_bytes = sum(size * pages for size, pages in zip(page_bytes, row_pages, strict=True))
    rows = max(free_bytes - step_pages * window_bytes, 0) / row_bytes
    pages = [
        int(rows * own) + step_pages * (window > 0) for own, window in zip(row_pages, windows, strict=True)
    ]
    if not windows[0] and max(pages[1:]) > pages[0]:
        pages = [max(free_bytes, 0) // sum(page_bytes)] * len(pages)
    pages = [min(own, cap - 1) for own, cap in zip(pages, most, strict=True)]
    # What a group can't use goes to the others, the first of all.
    for group, size in enumerate(page_bytes):
        used = sum(own * each for own, each in zip(pages, page_bytes, strict=True))
        more = min(max(free_bytes - used, 0) // size, most[group] - 1 - pages[group])
        if group and not windows[0]:
            more = min(more, pages[0] - pages[group])
        pages[group] += max(more, 0)
    return [own + 1 for own in pages]


def pages_beside(
    num_pages: int, page_bytes: Sequence[int], windows: Sequence[int], limits: PoolLimits
) -> list[int]:
    """The pages of each group if the first is to have `num_pages`, in the proportions of `divide_pool`."""
    if len(windows) == 1:
        return [num_pages]
    row_pages = [limits.window_pages(window) if window else limits.row_pages for window in windows]
    least = [own + 1 for own in row_pages]
    if not windows[0]:
        row_pages[0] = _design_pages(page_bytes, row_pages)
    shares = [-(-(num_pages - 1) * own // row_pages[0]) + 1 for own in row_pages]
    most = num_pages if not windows[0] else max(shares)
    return [
        num_pages,
        *(min(max(*pair), max(most, pair[1])) for pair in zip(shares[1:], least[1:], strict=True)),
    ]


def check_parts(parts: Sequence[PoolPart], limits: PoolLimits) -> None:
    """Check that a request fits into each group.

    Raises:
        ConfigError: a window group is too small for one request.
    """
    for part in parts:
        needed = limits.window_pages(part.window) + 1 if part.window else 2
        if part.window and part.num_pages < needed:
            raise ConfigError(
                f"the layers with a window of {part.window} tokens need {needed} pages of "
                f"{part.page_bytes / 2**20:.2f} MiB for one request and get {part.num_pages}; raise "
                "--memory-fraction or --num-pages, or lower --max-step-tokens"
            )


def num_places(parts: Sequence[PoolPart], limits: PoolLimits) -> int:
    """Pages of tokens that leases and the prefix tree can name, the scratch page included."""
    if not parts[0].window:
        return parts[0].num_pages
    return min(2 * limits.max_rows * limits.row_pages, max(MOST_PLACES, limits.row_pages)) + 1


def _design_pages(page_bytes: Sequence[int], row_pages: Sequence[int]) -> int:
    """The length, in pages, for which a pool with a group for all tokens is divided.

    For window pages w and bytes per page a (all) and b (windows), requests far longer are served by a * L of
    a * L + b * w, those within the window by w * (a + b) of the same: equal where a * L = w * (a + b).
    """
    longest = max(row_pages[1:])
    windows = sum(size * pages for size, pages in zip(page_bytes[1:], row_pages[1:], strict=True))
    return min(row_pages[0], longest + windows // page_bytes[0])
