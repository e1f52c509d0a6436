"""Makes the phases of a life from its events, when somebody asks for them.

Promise: the phases follow each other without a gap, from the request's arrival to its end or until now, and
the waits of a phase add up to its length.
"""

from collections.abc import Sequence

import msgspec

from minisgl.engine.watch.queue_clock import Mark, waits_between
from minisgl.lives import Phase, PhaseKind, State
from minisgl.scheduler.journal import Added, Admitted, Computed, Ended, GrammarReady, Note, Preempted


class Folded(msgspec.Struct, frozen=True, gc=False):
    """Takes the place of a life's older events, where it has very many."""

    num_preemptions: int
    num_output_tokens: int
    """When they began."""


Event = tuple[int, Note | Folded, Mark | None]
"""Time in microseconds, what happened, and the queue's clock where a wait may begin or end."""


def state_of(events: Sequence[Event]) -> State:
    """What a request does after these events, of which it has one at least; it has not ended."""
    note = events[-1][1]
    if type(note) is Computed:
        return "decoding" if note.is_last else "prompt"
    if type(note) is Admitted:
        return "prompt"
    if type(note) is Added:
        return "grammar" if note.has_grammar else "queued"
    return "queued" if type(note) is GrammarReady else "preempted"


def phases_of(
    arrived_us: int,
    events: Sequence[Event],
    end_us: int | None,
    num_output_tokens: int,
    mark: Mark | None,
    waiting_since_us: int | None = None,
) -> list[Phase]:
    """The phases of a life.

    Args:
        events: the first is `Added`; a request that was refused has none.
        end_us: None = the last phase goes on.
        num_output_tokens: at the end, or so far.
        mark: the queue's clock now, if the request has not ended.
        waiting_since_us: when it began to wait for the engine to be started again; None = it did not.
    """
    phases: list[Phase] = []
    now = _Now("server", arrived_us, None, {})
    if waiting_since_us is not None:
        if waiting_since_us > arrived_us:
            phases.append(_Now("earlier", arrived_us, None, {}).told(arrived_us, waiting_since_us, None))
        now = _Now("restart", waiting_since_us, None, {})
    num_fed = num_told = 0  # tokens of the feed that are computed; of the output that are in a phase
    for at_us, note, at_mark in events:
        if isinstance(note, Computed):
            now.chunks.append((at_us, note.num_fed_tokens - num_fed))
            num_fed = note.num_fed_tokens
            if not note.is_last:
                continue
        if isinstance(note, Preempted | Folded):
            if now.kind == "decoding":
                now.figures = {"tokens": note.num_output_tokens - num_told}
            num_told = note.num_output_tokens
        if at_us > arrived_us or now.kind != "server":
            phases.append(now.told(arrived_us, at_us, at_mark))
        if isinstance(note, Added):
            num_told = note.num_output_tokens
        if isinstance(note, Ended):
            return phases
        figures: dict[str, int] = {}
        if isinstance(note, Admitted):
            num_fed = note.num_cached_tokens
            figures = {"cached_tokens": num_fed}
        elif isinstance(note, Preempted):
            figures = {"by": note.by, "held_pages": note.num_held_pages}
        elif isinstance(note, Folded):
            figures = {"preemptions": note.num_preemptions}
        kind = "folded" if isinstance(note, Folded) else state_of([(at_us, note, at_mark)])
        assert kind != "ended"
        now = _Now(kind, at_us, at_mark, figures)
    if now.kind == "decoding":
        now.figures = {"tokens": num_output_tokens - num_told}
    phases.append(now.told(arrived_us, end_us, mark))
    return phases


def fold(events: list[Event]) -> None:
    """Shorten a list of events in place: of neighbouring chunks every second goes, of preemptions the older
    half becomes one `Folded`."""
    kept: list[Event] = []
    for index, event in enumerate(events):
        note, following = event[1], events[index + 1][1] if index + 1 < len(events) else None
        is_inner = isinstance(note, Computed) and not note.is_last and isinstance(following, Computed)
        if not (is_inner and index % 2):
            kept.append(event)
    places = [index for index, event in enumerate(kept) if isinstance(event[1], Preempted | Folded)]
    if len(places) >= 4:
        begin, end = places[0], places[len(places) // 2]
        at_us, first, mark = kept[begin]
        assert isinstance(first, Preempted | Folded)
        folded = Folded(num_preemptions(kept[begin:end]), first.num_output_tokens)
        kept[begin:end] = [(at_us, folded, mark)]
    events[:] = kept


def num_preemptions(events: Sequence[Event]) -> int:
    """How often the request lost its row."""
    losses = [note for _, note, _ in events if isinstance(note, Preempted | Folded)]
    return sum(one.num_preemptions if isinstance(one, Folded) else 1 for one in losses)


class _Now:
    """The phase that goes on."""

    def __init__(self, kind: PhaseKind, begin_us: int, mark: Mark | None, figures: dict[str, int]) -> None:
        self.kind: PhaseKind = kind
        self.begin_us = begin_us
        self.mark = mark
        self.figures = figures
        self.chunks: list[tuple[int, int]] = []  # (end, tokens)

    def told(self, arrived_us: int, end_us: int | None, end_mark: Mark | None) -> Phase:
        waits = []
        if self.kind in ("queued", "preempted") and self.mark is not None and end_mark is not None:
            waits = waits_between(self.mark, end_mark)
        figures = self.figures
        if self.chunks:
            figures = figures | {"tokens": sum(tokens for _, tokens in self.chunks)}
        return Phase(
            kind=self.kind,
            begin_ms=(self.begin_us - arrived_us) / 1e3,
            end_ms=None if end_us is None else (end_us - arrived_us) / 1e3,
            waits=waits,
            chunks=[((at_us - arrived_us) / 1e3, tokens) for at_us, tokens in self.chunks],
            figures=figures,
        )
