"""How far two traces are from transformers in float32, and whether that is too far.

Promise: the bars depend on the dtypes and on transformers' own error alone. A value that is not finite counts
as infinitely far.

K kept positions, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.verification.traces import LOGITS, Place, Trace, places_in_order

BAR_16_BITS = 2.0
"""Engine in 16 bits: at most this many times as far off as transformers is in the same dtype."""
BAR_FLOAT32 = 0.25
"""Engine in float32: at most this share of transformers' error in bfloat16 (TF32 has an eighth of it)."""
PLACE_SLACK = 4.0
"""A single place differs if it is this many times as far off; rounding is uneven over the places."""
EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-12}
"""Distances up to twice this are rounding anywhere; float32's allows for TF32."""


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference; infinite if something is not finite."""
    difference = float((ours.double() - reference.double()).norm())
    scale = float(reference.double().norm())
    if not math.isfinite(difference):
        return math.inf
    return difference / scale if scale else (math.inf if difference else 0.0)


def gap(logits: Tensor, best: Tensor, chosen: Tensor) -> float:
    """How far the worst of the chosen tokens [T] lies below the best logit [T]; logits [T, V]."""
    if not len(chosen):
        return 0.0
    return float((best - logits.gather(1, chosen[:, None])[:, 0]).max())


class LogitErrors(NamedTuple):
    """One sequence: our logits and tokens beside transformers' own in fewer bits."""

    ours: float
    """Relative error."""
    theirs: float
    our_gap: float
    """How far our worst token is below the best one, in units of logits."""
    their_gap: float
    rms_theirs: float
    """Root mean square of transformers' error of a logit, less what all logits of a position share."""
    num_equal: int
    """Tokens that are transformers' best in float32."""


class PlaceError(NamedTuple):
    """One place, over all sequences."""

    place: Place
    ours: float
    theirs: float


class Bars(NamedTuple):
    """How far off is too far."""

    dtype: str  # the engine's

    @property
    def factor(self) -> float:
        """What transformers' own error is multiplied by."""
        return BAR_FLOAT32 if self.dtype == "float32" else BAR_16_BITS

    def logits_bar(self, errors: Sequence[LogitErrors]) -> float:
        """The largest relative error that passes."""
        return self.factor * max(one.theirs for one in errors)

    def gap_bar(self, errors: Sequence[LogitErrors]) -> float:
        """The largest gap that passes. Near ties are rare, so transformers' typical error counts, too."""
        return self.factor * max(max(one.their_gap, 2 * one.rms_theirs) for one in errors)

    def place_bar(self, theirs: float) -> float:
        """The largest relative error of a place that passes."""
        return max(PLACE_SLACK / BAR_16_BITS * self.factor * theirs, 2 * EPSILON[self.dtype])


def logit_errors(ours: Trace, precise: Trace, coarse: Trace, answer: list[int]) -> LogitErrors:
    """The errors of a sequence that ends with `answer`; the last kept positions are the answer's."""
    place = max(precise, key=lambda place: place.order)
    assert place.part == LOGITS
    reference, own, peer = precise[place].float(), ours[place].float(), coarse[place].float()
    steps = slice(len(reference) - 1 - len(answer), len(reference) - 1)
    best = reference[steps].max(1).values
    chosen = torch.tensor(answer, dtype=torch.int64)
    return LogitErrors(
        ours=relative_error(own, reference),
        theirs=relative_error(peer, reference),
        our_gap=gap(reference[steps], best, chosen),
        their_gap=gap(reference[steps], best, peer[steps].argmax(1)),
        rms_theirs=_spread(peer - reference),
        num_equal=int((reference[steps].argmax(1) == chosen).sum()),
    )


def _spread(errors: Tensor) -> float:
    """Root mean square of what tells logits of a position [K, V] apart: a common shift changes no choice."""
    return float((errors - errors.mean(1, keepdim=True)).square().mean().sqrt())


def place_errors(
    ours: Sequence[Trace], precise: Sequence[Trace], coarse: Sequence[Trace]
) -> list[PlaceError]:
    """The largest errors of every place over the sequences, in the order of a forward pass."""
    found = []
    for place in places_in_order([*ours, *precise, *coarse]):
        pairs = [(a[place], b[place], c[place]) for a, b, c in zip(ours, precise, coarse, strict=True)]
        found.append(
            PlaceError(
                place,
                max(relative_error(own, reference) for own, reference, _ in pairs),
                max(relative_error(peer, reference) for _, reference, peer in pairs),
            )
        )
    return found


def row_errors(ours: Tensor, reference: Tensor) -> Tensor:
    """The relative error of each position, float64 [K]; infinite where something is not finite."""
    difference = (ours.double() - reference.double()).norm(dim=1)
    return (difference / reference.double().norm(dim=1).clamp(min=1e-30)).nan_to_num(math.inf)
