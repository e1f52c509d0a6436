"""Lets kernels of a recorded CUDA graph start before their predecessor has ended.

torch.compile can't use programmatic dependent launch, but edges of a graph can express it. An edge from a
kernel's programmatic port lets its target start when all programs of its source have allowed it or ended.
The targets are kernels that wait for their inputs themselves: triton_kernels/early_start.py.

Promise: if the driver refuses, the graph is instantiated as it was recorded, which is only slower.
"""

import ctypes
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)

_KERNEL_NODE = 0


class Edge(NamedTuple):
    """A dependency between two nodes, which are given by their addresses."""

    source: int
    target: int
    is_plain: bool = True  # the target starts after the end of the source


def instantiate_with_early_starts(graph: torch.cuda.CUDAGraph, early: Mapping[str, str | None]) -> bool:
    """Change the edges to `early` kernels, and instantiate. False: the driver can't, all edges stay plain.

    Args:
        graph: recorded with keep_graph, not instantiated.
        early: some of early_start.EARLY_KERNELS.

    Raises:
        RuntimeError: the graph can't even be instantiated as it was recorded.
    """
    changed: list[Edge] = []
    driver = None
    try:
        driver = _Driver()
        handle = graph.raw_cuda_graph()
        for edge in early_edges(driver.edges(handle), driver.kernel_name, early):
            driver.replace(handle, edge, _PLAIN, _EARLY)
            changed.append(edge)
        graph.instantiate()
    except (OSError, AttributeError, RuntimeError) as error:
        logger.warning("kernels start one after the other, which is slower: %s", error)
        for edge in changed:
            assert driver is not None
            driver.replace(graph.raw_cuda_graph(), edge, _EARLY, _PLAIN)
        graph.instantiate()
        return False
    return True


def early_edges(
    edges: Iterable[Edge], kernel_name: Callable[[int], str | None], early: Mapping[str, str | None]
) -> list[Edge]:
    """The plain edges from a kernel to one of the `early` kernels, if neither end has another such edge.

    The source must have no other outgoing edge, and the target no other incoming edge.

    Args:
        kernel_name: returns the name of a node's kernel, or None if the node is no kernel.
        early: kernel name -> the name of the only allowed predecessor; None = any predecessor.
    """
    edges = list(edges)
    leaving = Counter(edge.source for edge in edges)
    arriving = Counter(edge.target for edge in edges)

    def is_early(source: str | None, target: str | None) -> bool:
        if source is None or target is None or target not in early:
            return False
        return early[target] in (None, source)

    return [
        edge
        for edge in edges
        if edge.is_plain
        and leaving[edge.source] == arriving[edge.target] == 1
        and is_early(kernel_name(edge.source), kernel_name(edge.target))
    ]


class _EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


_PLAIN = _EdgeData()
_EARLY = _EdgeData(from_port=1, type=1)  # the programmatic port, a programmatic edge


class _KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid_block_shared", ctypes.c_uint * 7),
        ("kernel_params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    )


class _Driver:
    """The driver calls that torch does not offer. They need CUDA 12.3 or later."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            raise RuntimeError(f"{name} returned {result}")

    def edges(self, graph: int) -> list[Edge]:
        """All edges of a graph."""
        handle, count = ctypes.c_void_p(graph), ctypes.c_size_t(0)
        self._call("cuGraphGetEdges_v2", handle, None, None, None, ctypes.byref(count))
        sources, targets = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
        data = (_EdgeData * count.value)()
        self._call("cuGraphGetEdges_v2", handle, sources, targets, data, ctypes.byref(count))
        return [
            Edge(source, target, one.type == one.from_port == one.to_port == 0)
            for source, target, one in zip(sources, targets, data, strict=True)
        ]

    def kernel_name(self, node: int) -> str | None:
        """The name of a node's kernel; None if the node is no kernel."""
        handle, kind = ctypes.c_void_p(node), ctypes.c_int(-1)
        self._call("cuGraphNodeGetType", handle, ctypes.byref(kind))
        if kind.value != _KERNEL_NODE:
            return None
        params, name = _KernelNodeParams(), ctypes.c_char_p()
        self._call("cuGraphKernelNodeGetParams_v2", handle, ctypes.byref(params))
        if params.func:
            self._call("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(params.func))
        else:
            self._call("cuKernelGetName", ctypes.byref(name), ctypes.c_void_p(params.kern))
        return (name.value or b"").decode()

    def replace(self, graph: int, edge: Edge, old: _EdgeData, new: _EdgeData) -> None:
        """Replace an edge by another kind of edge between the same nodes. On failure the old edge stays."""
        ends = ctypes.byref(ctypes.c_void_p(edge.source)), ctypes.byref(ctypes.c_void_p(edge.target))
        where, one = (ctypes.c_void_p(graph), *ends), ctypes.c_size_t(1)
        self._call("cuGraphRemoveDependencies_v2", *where, ctypes.byref(old), one)
        try:
            self._call("cuGraphAddDependencies_v2", *where, ctypes.byref(new), one)
        except RuntimeError:
            self._call("cuGraphAddDependencies_v2", *where, ctypes.byref(old), one)
            raise
