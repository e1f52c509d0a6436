"""Snapshots of the states of linear attention at page ends, so that prefix hits can end there.

Promise: a snapshot belongs to one place and is the state after exactly the tokens that lead to that place's
end. A slot that the plan being made reads or writes is neither read nor written otherwise in that plan; one
that its step writes, as a chunk passes the place, is read by later plans only.

A state can't be cut, and a snapshot is as large as thousands of tokens, so few places have one. The least
valuable goes first: value is the tokens that a hit would save times how often snapshots of its kind, behind a
prompt or an answer, are hit, and fades as others come (GreedyDual, Young 1994). All have the same size, so
this is the value per byte. A snapshot that a conversation has left behind goes before all others, unless
several requests went on from it.
"""

from array import array
from collections.abc import Iterable, Sequence

from minisgl.kvcache.page_allocator import BrokenInvariantError

NO_SLOT = -1
RECENT = 2000
"""Snapshots and hits from which the chance of a hit is estimated, at most."""


class _Kind:
    """How often snapshots of one kind are hit."""

    __slots__ = ("num_hits", "num_saved")

    def __init__(self) -> None:
        self.num_saved = self.num_hits = 1

    @property
    def hits_per_snapshot(self) -> float:
        return self.num_hits / max(self.num_saved, 1)

    def count(self, saved: int, hits: int) -> None:
        """Add to both; the older ones weigh less and less."""
        self.num_saved += saved
        self.num_hits += hits
        if self.num_saved + self.num_hits > RECENT:
            self.num_saved, self.num_hits = -(-self.num_saved // 2), -(-self.num_hits // 2)


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
        self._value: dict[int, float] = {}  # by place
        self._num_users: dict[int, int] = {}  # by place: requests that went on from it
        self._kind_of: dict[int, _Kind] = {}  # by place
        self._of_prompts, self._of_answers = _Kind(), _Kind()
        self._faded = 0.0  # the largest value that went
        self._busy: set[int] = set()  # slots of the plan being made
        self._coming: set[int] = set()  # places whose snapshots the step being planned takes

    def __bool__(self) -> bool:
        return self.num_slots > 0

    def has(self, place: int) -> bool:
        return self._slot_of[place] != NO_SLOT

    def is_ready(self, place: int) -> bool:
        """Whether a row may begin with the place's snapshot in the plan being made."""
        return self.has(place) and place not in self._coming

    def load(self, place: int, saved_tokens: int) -> int:
        """The slot of the place's snapshot, from which a row begins in the plan being made.

        Args:
            saved_tokens: as for `save`, as far as is known now.
        """
        assert self.is_ready(place), "a hit ends at a snapshot"
        slot = self._slot_of[place]
        self._busy.add(slot)
        self._num_users[place] += 1
        self._kind_of[place].count(0, 1)
        self._value_anew(place, saved_tokens)
        return slot

    def save(
        self,
        place: int,
        saved_tokens: int,
        *,
        is_answer: bool = False,
        num_users: int = 0,
        is_coming: bool = False,
    ) -> int | None:
        """A slot that gets the state at the place's end in the plan being made; None: there is none.

        Args:
            saved_tokens: tokens that a hit would not compute again, counted from the snapshot before.
            is_answer: the row decodes; else, its prompt ends there or branches.
            num_users: requests that are known to go on from there.
            is_coming: the plan's step gives it the state; else, this is copied before the step.
        """
        assert not self.has(place), "a place has one snapshot"
        free = next((slot for slot in reversed(self._free) if slot not in self._busy), None)
        if free is None:
            others = [one for one in self._value if self._slot_of[one] not in self._busy]
            if not others:
                return None
            worst = min(others, key=self._value.__getitem__)
            self._faded = max(self._faded, self._value[worst])
            self._drop(worst)
            free = self._free[-1]
        self._free.remove(free)
        slot = self._slot_of[place] = free
        self._busy.add(slot)
        if is_coming:
            self._coming.add(place)
        self._num_users[place] = num_users
        self._kind_of[place] = kind = self._of_answers if is_answer else self._of_prompts
        kind.count(1, 0)
        self._value_anew(place, saved_tokens)
        return slot

    def pass_by(self, places: Sequence[int]) -> int:
        """Let the snapshots of these places go first, as their request goes on from a later one.

        Returns:
            The number of places up to the last one that stays; it stays because several requests used it.
        """
        kept = 0
        for number, place in enumerate(places, 1):
            if self.has(place):
                if self._num_users[place] > 1:
                    kept = number
                else:
                    self._value[place] = min(self._value[place], self._faded)
        return kept

    def replace(self, place: int) -> None:
        """Drop the snapshot of a row's earlier page end, unless another request began from it."""
        if self.has(place) and not self._num_users[place] and self._slot_of[place] not in self._busy:
            self._kind_of[place].count(-1, 0)
            self._drop(place)

    def exchange(self, own: int, tree: int) -> None:
        """Use the place `tree` instead of `own`, which has the same tokens."""
        if not self.has(own):
            return
        if self.has(tree):
            self._num_users[tree] += 1
            self._drop(own)
            return
        self._slot_of[tree], self._slot_of[own] = self._slot_of[own], NO_SLOT
        self._value[tree] = self._value.pop(own)
        self._num_users[tree] = self._num_users.pop(own)
        self._kind_of[tree] = self._kind_of.pop(own)

    def forget(self, places: Iterable[int]) -> None:
        """These places are free now."""
        for place in places:
            if self.has(place):
                self._drop(place)

    def planned(self) -> None:
        """The plan is made: later ones may use its slots, as their copies come behind its step.

        The next plan evicts no snapshot that this one's step takes: waiting requests begin from it there.
        """
        self._busy = {self._slot_of[place] for place in self._coming}
        self._coming.clear()

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
        if not holders.keys() == self._value.keys() == self._num_users.keys() == self._kind_of.keys():
            raise BrokenInvariantError("every snapshot has a value")
        if holders.keys() & is_free:
            raise BrokenInvariantError("a free place has no snapshot")

    def _drop(self, place: int) -> None:
        self._free.append(self._slot_of[place])
        self._slot_of[place] = NO_SLOT
        del self._value[place], self._num_users[place], self._kind_of[place]

    def _value_anew(self, place: int, saved_tokens: int) -> None:
        self._value[place] = self._faded + saved_tokens * self._kind_of[place].hits_per_snapshot
