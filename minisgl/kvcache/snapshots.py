"""Snapshots of the states of linear attention at page ends, so that prefix hits can end there.

Promise: a snapshot belongs to one place and is the state after exactly the tokens that lead to that place's
end. A slot that the plan being made reads or writes is neither read nor written otherwise in that plan.

A state can't be cut, and a snapshot is as large as hundreds of pages, so few places have one. The least
valuable goes first: value is the tokens that a hit would save, and fades as others come (GreedyDual, Young
1994). All snapshots have the same size, so this is the value per byte.
"""

from array import array
from collections.abc import Iterable

from minisgl.kvcache.page_allocator import BrokenInvariantError

NO_SLOT = -1


class Snapshots:
    """The slots of one pool of snapshots.

    Args:
        num_slots: snapshots that fit.
        num_places: one more than the largest place.
    """

    def __init__(self, num_slots: int, num_places: int) -> None:
        self.num_slots = num_slots
        self._slot_of = array("i", [NO_SLOT]) * num_places  # by place
        self._free = list(range(num_slots - 1, -1, -1))
        self._saved_tokens: dict[int, int] = {}  # by place: tokens that a hit saves
        self._value: dict[int, int] = {}  # by place
        self._was_hit: set[int] = set()
        self._faded = 0  # value of the snapshot that went last
        self._busy: set[int] = set()  # slots of the plan being made

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def has(self, place: int) -> bool:
        return self._slot_of[place] != NO_SLOT

    def was_hit(self, place: int) -> bool:
        """Whether a request began from the place's snapshot."""
        return place in self._was_hit

    def load(self, place: int) -> int:
        """The slot of the place's snapshot, from which a row begins in the plan being made."""
        slot = self._slot_of[place]
        assert slot != NO_SLOT, "a hit ends at a snapshot"
        self._busy.add(slot)
        self._was_hit.add(place)
        self._value[place] = self._faded + self._saved_tokens[place]
        return slot

    def save(self, place: int, saved_tokens: int) -> int | None:
        """A slot to which the plan being made copies the state at the place's end; None: there is none.

        Args:
            saved_tokens: tokens that a hit would not compute again, counted from the snapshot before.
        """
        assert not self.has(place), "a place has one snapshot"
        free = next((slot for slot in reversed(self._free) if slot not in self._busy), None)
        if free is None:
            others = [one for one in self._value if self._slot_of[one] not in self._busy]
            if not others:
                return None
            worst = min(others, key=self._value.__getitem__)
            self._faded = self._value[worst]
            self._drop(worst)
            free = self._free[-1]
        self._free.remove(free)
        slot = self._slot_of[place] = free
        self._busy.add(slot)
        self._saved_tokens[place] = saved_tokens
        self._value[place] = self._faded + saved_tokens
        return slot

    def replace(self, place: int) -> None:
        """Drop the snapshot of a row's earlier page end, unless another request began from it."""
        if self.has(place) and place not in self._was_hit and self._slot_of[place] not in self._busy:
            self._drop(place)

    def exchange(self, own: int, tree: int) -> None:
        """Use the place `tree` instead of `own`, which has the same tokens."""
        if not self.has(own):
            return
        if self.has(tree):
            self._drop(own)
            return
        self._slot_of[tree], self._slot_of[own] = self._slot_of[own], NO_SLOT
        for figures in (self._saved_tokens, self._value):
            figures[tree] = figures.pop(own)
        if own in self._was_hit:
            self._was_hit.remove(own)
            self._was_hit.add(tree)

    def forget(self, places: Iterable[int]) -> None:
        """These places are free now."""
        for place in places:
            if self.has(place):
                self._drop(place)

    def planned(self) -> None:
        """The plan is made: later ones may use all slots, as their copies come behind its own."""
        self._busy.clear()

    def check_invariants(self, is_free: set[int]) -> None:
        """Recompute everything.

        Args:
            is_free: the places that nobody has.

        Raises:
            BrokenInvariantError: names the promise that is broken.
        """
        holders = {place: slot for place, slot in enumerate(self._slot_of) if slot != NO_SLOT}
        if sorted([*holders.values(), *self._free]) != list(range(self.num_slots)):
            raise BrokenInvariantError("a slot is free or has one place")
        if not holders.keys() == self._value.keys() == self._saved_tokens.keys() >= self._was_hit:
            raise BrokenInvariantError("every snapshot has a value")
        if holders.keys() & is_free:
            raise BrokenInvariantError("a free place has no snapshot")

    def _drop(self, place: int) -> None:
        self._free.append(self._slot_of[place])
        self._slot_of[place] = NO_SLOT
        del self._value[place], self._saved_tokens[place]
        self._was_hit.discard(place)
