"""Finds the first part of the model whose values differ, and says in plain words what is likely wrong."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from minisgl.model_config.config import ModelConfig
from minisgl.verification.compare import Bars, PlaceError, row_errors
from minisgl.verification.traces import (
    ATTENTION,
    ATTENTION_INPUT,
    EMBEDDING,
    LOGITS,
    MLP,
    MLP_INPUT,
    OUTPUT,
    Place,
    Trace,
    places_in_order,
)

LARGEST = {"float16": 65504.0, "bfloat16": 3.39e38, "float32": 3.40e38}
GROWTH = 3.0
"""An error that grows with the position is this many times larger at the last ones than at the first ones."""


class Finding(NamedTuple):
    """One thing that is wrong."""

    check: str
    """What failed: "logits", "tokens", "overflow", "end of sequence" ..."""
    layer: int | None
    part: str
    """Where, in words; empty: nowhere in particular."""
    what: str
    """What was seen."""
    likely: str
    """The likely cause, or what to try."""

    def sentence(self) -> str:
        """The finding as one line."""
        where = f" in {self.part}" if self.part else ""
        return f"{self.check}{where}: {self.what}. Likely: {self.likely}"


class Traces(NamedTuple):
    """One sequence as all three computed it."""

    kept: np.ndarray  # int64 [K]
    ours: Trace
    precise: Trace
    coarse: Trace


def find_overflow(traces: Sequence[Traces], dtype: str) -> Finding | None:
    """The first place where our values are not finite though transformers' in float32 are."""
    for place in places_in_order([trace for one in traces for trace in one[1:]]):
        for one in traces:
            bad = int((~torch.isfinite(one.ours[place])).sum())
            if not bad or not bool(torch.isfinite(one.precise[place]).all()):
                continue
            largest = float(one.precise[place].abs().max())
            what = f"{bad} values are infinite or NaN; in float32 the largest is {largest:.3g}"
            if bool(torch.isfinite(one.coarse[place]).all()):
                likely = (
                    f"a sum or product beyond {dtype}'s range ({LARGEST[dtype]:.3g}) in minisgl's kernels, "
                    f"since transformers in 16 bits stays finite: please report it, and serve with "
                    "--dtype float32 until then"
                )
            else:
                likely = (
                    f"the model needs a wider range than {dtype}'s ({LARGEST[dtype]:.3g}), as transformers "
                    "in 16 bits overflows, too: serve it with --dtype bfloat16 or float32"
                )
            return Finding("overflow", place.layer, name_of(place), what, likely)
    return None


def find_no_reference(traces: Sequence[Traces], peer_dtype: str) -> Finding | None:
    """Why there is nothing to compare with: transformers' own values are not finite.

    Without this, their distance would be an infinite bar, under which everything passes.
    """
    computed = (("float32", [one.precise for one in traces]), (peer_dtype, [one.coarse for one in traces]))
    for name, theirs in computed:
        for place in places_in_order(theirs):
            if all(bool(torch.isfinite(trace[place]).all()) for trace in theirs):
                continue
            what = f"transformers in {name} computes values that are infinite or NaN"
            if name == "float32":
                likely = "damaged weights: download the model again"
            else:
                likely = f"the model needs a wider range than {name}'s: use --dtype bfloat16 or float32"
            return Finding("reference", place.layer, name_of(place), what, likely)
    return None


def find_difference(
    errors: Sequence[PlaceError], traces: Sequence[Traces], bars: Bars, config: ModelConfig
) -> Finding | None:
    """The first place that is further off than transformers' rounding explains."""
    first = next((one for one in errors if one.ours > bars.place_bar(one.theirs)), None)
    if first is None:
        return None
    what = f"relative error {first.ours:.3g}; transformers' own rounding gives {first.theirs:.3g}"
    pattern = _pattern(first.place, traces, bars)
    likely = _likely(first.place, pattern, config)
    if pattern.first_bad > 0:
        what += f"; the positions before {pattern.first_bad} are right"
    return Finding("logits", first.place.layer, name_of(first.place), what, likely)


def name_of(place: Place) -> str:
    """The place in words."""
    layer = place.layer
    return {
        EMBEDDING: "the embedding",
        ATTENTION_INPUT: f"the norm before attention of layer {layer}",
        ATTENTION: f"attention of layer {layer}",
        MLP_INPUT: f"the norm before the MLP of layer {layer}",
        MLP: f"the MLP of layer {layer}",
        OUTPUT: f"the output of layer {layer}",
        LOGITS: "the final norm or the head",
    }[place.part]


class _Pattern(NamedTuple):
    """At which positions a place differs."""

    first_bad: int  # -1: no single position stands out
    grows: bool  # the error is larger at later positions


def _pattern(place: Place, traces: Sequence[Traces], bars: Bars) -> _Pattern:
    """From the sequence with the most positions."""
    one = max(traces, key=lambda one: int(one.kept[-1]))
    errors = row_errors(one.ours[place], one.precise[place])
    peers = row_errors(one.coarse[place], one.precise[place])
    is_bad = [
        error > bars.place_bar(peer) for error, peer in zip(errors.tolist(), peers.tolist(), strict=True)
    ]
    if not any(is_bad):
        return _Pattern(-1, False)
    begin, end = errors[1:5].mean(), errors[-len(errors) // 2 :].mean()
    return _Pattern(int(one.kept[is_bad.index(True)]), bool(end > GROWTH * begin))


def _likely(place: Place, pattern: _Pattern, config: ModelConfig) -> str:
    if place.part == ATTENTION:
        return _likely_in_attention(place.layer, pattern, config)
    norm = f"its weight or eps ({config.rms_norm_eps:g}), a norm that is missing"
    return {
        EMBEDDING: "the rows of the embedding, or its scale",
        ATTENTION_INPUT: f"{norm}, or the residual before it",
        MLP_INPUT: f"{norm}, or the residual before it",
        MLP: "gate and up exchanged, the activation, or the down projection",
        OUTPUT: "a norm behind attention or MLP, the residual, or the experts and their router"
        if config.experts is None
        else "the norm before the experts, their router, or their weights",
        LOGITS: "the final norm, the head's weights (tied or not), or the soft cap of the logits",
    }[place.part]


def _likely_in_attention(layer: int, pattern: _Pattern, config: ModelConfig) -> str:
    window = config.windows[layer] if config.windows else 0
    local = layer in config.local_rope_layers
    theta = config.local_rope_theta if local else config.rope_theta
    scaling = "none" if local or config.rope_scaling is None else config.rope_scaling.kind
    norms = ", the norms of q and k" if config.qk_norm else ""
    if window and pattern.first_bad >= window // 2:
        return f"the sliding window ({window} tokens)"
    # The first token attends to itself alone: its output has neither scores nor rotations in it.
    if pattern.first_bad > 0 and pattern.grows:
        return f"RoPE, as the error grows with the position: its base ({theta:g}) or scaling ({scaling})"
    if pattern.first_bad > 0:
        return (
            f"what makes the scores: the order of the heads of q or k{norms}, the scale, or RoPE (base "
            f"{theta:g}, scaling {scaling})"
        )
    return "the v or output projection, the order of the heads, or which KV head a query head reads"
