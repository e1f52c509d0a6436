"""The recorded graphs of one kind of step, by size: those that exist, and those that are still missing.

The life of a graph: it is missing until it is recorded. When one can't be recorded, all that are missing are
given up, and their steps run in larger graphs or uncaptured from then on.
"""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from minisgl.engine.graphs.buckets import PrefillBucket

Size = TypeVar("Size", int, PrefillBucket)
Graph = TypeVar("Graph")


class GraphTable(Generic[Size, Graph]):
    """Graphs by size.

    Args:
        record: records the graph of a size, on padding rows, after the work queued on the device.
        missing: the sizes to record, in this order.
    """

    def __init__(self, record: Callable[[Size], Graph], missing: Iterable[Size]) -> None:
        self._record = record
        self._missing = list(missing)
        self._graphs: dict[Size, Graph] = {}
        self.sizes: tuple[Size, ...] = ()
        """The recorded sizes, ascending."""

    def __getitem__(self, size: Size) -> Graph:
        return self._graphs[size]

    @property
    def num_missing(self) -> int:
        """Number of graphs that are still missing."""
        return len(self._missing)

    def want(self, size: Size | None) -> None:
        """Record this size next if it is missing, because a step could use it."""
        if size is not None and size in self._missing:
            self._missing.remove(size)
            self._missing.insert(0, size)

    def record(self, size: Size) -> Graph:
        """Record the graph of a size."""
        graph = self._record(size)
        self.add(size, graph)
        return graph

    def record_next(self) -> None:
        """Record the first missing graph. There must be one."""
        self.record(self._missing[0])

    def add(self, size: Size, graph: Graph) -> None:
        """Add a graph that was recorded elsewhere."""
        self._graphs[size] = graph
        self.sizes = tuple(sorted(self._graphs))
        if size in self._missing:
            self._missing.remove(size)

    def give_up(self, is_hopeless: Callable[[Size], bool] = lambda size: True) -> None:
        """Record no more missing graphs, or none of those sizes."""
        self._missing = [size for size in self._missing if not is_hopeless(size)]
