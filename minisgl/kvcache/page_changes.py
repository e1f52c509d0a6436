"""What changes in the set of pages that a prompt can find, noted for routers (`--kv-events-endpoint`).

Promise: a page that was stored is removed once, or cleared with all others, before its id is stored again.
The notes name pages by their ids: nothing is hashed and nothing is sent here.
"""

from array import array
from collections.abc import Iterable
from typing import NamedTuple


class PagesStored(NamedTuple):
    """A run of pages can be found from now on."""

    parent: int | None
    """The page before the run; None: the run begins its prompts."""
    salt: str
    """The `cache_salt` of a run without a parent; its other pages have the same, and it is "" for others."""
    tokens: bytes
    """Little-endian int32, the same number for each page."""
    page_ids: array


class PagesRemoved(NamedTuple):
    """These pages can't be found any more."""

    page_ids: array


class AllPagesCleared(NamedTuple):
    """No page can be found any more."""


PageChange = PagesStored | PagesRemoved | AllPagesCleared


class PageChanges:
    """The changes since the last `take`, in order."""

    def __init__(self) -> None:
        self._changes: list[PageChange] = []
        self._stored: set[int] = set()

    def stored(self, parent: int | None, salt: str, tokens: bytes, page_ids: array) -> None:
        """Note a new run of pages; not if its parent can't be found, because it was detached."""
        if parent is not None and parent not in self._stored:
            return
        self._stored.update(page_ids)
        self._changes.append(PagesStored(parent, salt, tokens, page_ids))

    def removed(self, page_ids: Iterable[int]) -> None:
        """Note that pages are gone; those that could not be found anyway are ignored."""
        known = array("i", [page_id for page_id in page_ids if page_id in self._stored])
        if not known:
            return
        self._stored.difference_update(known)
        last = self._changes[-1] if self._changes else None
        if isinstance(last, PagesRemoved):
            last.page_ids.extend(known)
        else:
            self._changes.append(PagesRemoved(known))

    def cleared(self) -> None:
        """Note that no page can be found."""
        self._stored.clear()
        self._changes.append(AllPagesCleared())

    def take(self) -> list[PageChange]:
        """The changes since the last call."""
        changes, self._changes = self._changes, []
        return changes
