"""What one model computed of one sequence: values inside of every layer, and logits, at some positions.

Promise: both models' traces name the same places, in the order in which a forward pass reaches them.

T tokens of a sequence, K of them kept, M model width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

EMBEDDING, ATTENTION_INPUT, ATTENTION, MLP_INPUT, MLP, OUTPUT, LOGITS = (
    "embedding",
    "attention input",
    "attention",
    "MLP input",
    "MLP",
    "layer output",
    "logits",
)
PARTS = (EMBEDDING, ATTENTION_INPUT, ATTENTION, MLP_INPUT, MLP, OUTPUT, LOGITS)
"""In the order of a forward pass. The embedding belongs to layer 0, the logits to one behind the last."""


class Place(NamedTuple):
    """A place in a forward pass."""

    layer: int
    part: str  # one of PARTS

    @property
    def order(self) -> tuple[int, int]:
        """Sorts places as a forward pass reaches them."""
        return self.layer, PARTS.index(self.part)


Trace = dict[Place, Tensor]
"""Values on the host, [K, M] each, logits [K, V]."""


class Recorder:
    """Collects a trace from hooks of a model's modules; a context manager that removes them.

    Args:
        kept: the positions to keep, int64 [K].
    """

    def __init__(self, kept: np.ndarray) -> None:
        self.trace: Trace = {}
        self._kept = torch.from_numpy(kept)
        self._handles: list[RemovableHandle] = []

    def keep(self, place: Place, values: Tensor) -> None:
        """Record values, [T, M] or [1, T, M]."""
        values = values.reshape(-1, values.shape[-1])
        self.trace[place] = values[self._kept.to(values.device)].cpu()

    def watch_input(self, module: nn.Module, place: Place) -> None:
        """Record the hidden states that enter a module."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.keep(place, args[0] if args else kwargs["hidden_states"])

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def watch_output(
        self, module: nn.Module, place: Place, read: Callable[[Any], Tensor] = lambda out: first_tensor(out)
    ) -> None:
        """Record what leaves a module; `read` takes the hidden states from it."""
        self._handles.append(module.register_forward_hook(lambda _, args, out: self.keep(place, read(out))))

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()


def first_tensor(out: Any) -> Tensor:
    """The hidden states of an output that may be a tuple."""
    return out[0] if isinstance(out, tuple) else out


def kept_positions(num_prompt_tokens: int, num_tokens: int, most: int = 48) -> np.ndarray:
    """Positions to keep, int64 [K]: the first eight, evenly spread ones, all from the prompt's last on."""
    spread = np.linspace(0, num_prompt_tokens - 1, most).astype(np.int64)
    answer = np.arange(num_prompt_tokens - 1, num_tokens)
    return np.unique(np.concatenate([np.arange(min(8, num_tokens)), spread, answer]))


def places_in_order(traces: Sequence[Trace]) -> list[Place]:
    """The places that all of the traces have, in the order of a forward pass."""
    common = set.intersection(*(set(trace) for trace in traces))
    return sorted(common, key=lambda place: place.order)
