"""Which edges of a recorded graph let a kernel start before the one in front of it has ended."""

import ctypes

import pytest

from minisgl.engine.graphs import early_starts
from minisgl.engine.graphs.early_starts import Edge, early_edges, instantiate_with_early_starts

NAMES = {1: "fill", 2: "_linear_kernel", 3: "_rope_store_kernel", 4: None, 5: "_linear_kernel", 6: "gather"}
EARLY = {"_linear_kernel": None, "_rope_store_kernel": "_linear_kernel"}


def chosen(*edges: Edge) -> list[Edge]:
    return early_edges(edges, NAMES.__getitem__, EARLY)


def test_kernels_that_wait_themselves_start_early_behind_any_kernel() -> None:
    edges = Edge(1, 2), Edge(2, 3)
    assert chosen(*edges) == list(edges)


def test_other_kernels_and_what_follows_a_copy_start_when_all_is_done() -> None:
    assert chosen(Edge(3, 6), Edge(6, 4), Edge(4, 5)) == []


def test_a_node_between_several_others_keeps_its_edges() -> None:
    assert chosen(Edge(1, 2), Edge(6, 2), Edge(2, 3)) == [Edge(2, 3)]
    assert chosen(Edge(1, 2), Edge(1, 3)) == []


def test_a_kernel_that_names_the_one_before_it_starts_early_behind_no_other() -> None:
    assert chosen(Edge(2, 3)) == [Edge(2, 3)]
    assert chosen(Edge(6, 3)) == []


def test_an_edge_that_is_special_already_stays_as_it_is() -> None:
    assert chosen(Edge(1, 2, is_plain=False)) == []


class Graph:
    """Stands in for a recorded torch.cuda.CUDAGraph of one edge, which is only there when it is asked for."""

    def __init__(self, library: "Library | None" = None, *, refuses: bool = False) -> None:
        self.library = library
        self.refuses = refuses
        self.instantiated: list[list[tuple[int, int, int]]] = []

    def raw_cuda_graph(self) -> int:
        return 1

    def instantiate(self) -> None:
        edges = [] if self.library is None else list(self.library.edges)
        if self.refuses and edges[0][2]:
            raise RuntimeError("invalid argument")
        self.instantiated.append(edges)


def instantiate(graph: Graph) -> bool:
    return instantiate_with_early_starts(graph, EARLY)  # pyright: ignore[reportArgumentType] (a stand-in)


def test_without_a_driver_a_graph_stays_as_it_is_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    graph = Graph()
    assert not instantiate(graph)
    assert len(graph.instantiated) == 1
    assert "which is slower: libcuda.so.1: no such file" in caplog.text


class Library:
    """Stands in for libcuda: a graph of one edge from kernel 7 to kernel 8, and what was asked of it."""

    def __init__(self, *, refuses: bool) -> None:
        self.refuses = refuses
        self.edges = [(7, 8, 0)]

    def cuGraphGetEdges_v2(self, graph, sources, targets, data, count) -> int:
        if sources is not None:
            (sources[0], targets[0], data[0].type), *_ = self.edges
        count._obj.value = len(self.edges)
        return 0

    def cuGraphNodeGetType(self, node, kind) -> int:
        kind._obj.value = 0
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, params) -> int:
        params._obj.func = node.value
        return 0

    def cuFuncGetName(self, name, function) -> int:
        name._obj.value = b"_linear_kernel"
        return 0

    def cuGraphRemoveDependencies_v2(self, graph, source, target, data, one) -> int:
        self.edges.remove((source._obj.value, target._obj.value, data._obj.type))
        return 0

    def cuGraphAddDependencies_v2(self, graph, source, target, data, one) -> int:
        if self.refuses and data._obj.type:
            return 801
        self.edges.append((source._obj.value, target._obj.value, data._obj.type))
        return 0


def test_an_edge_is_replaced_before_the_graph_is_instantiated(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(refuses=False)
    monkeypatch.setattr(early_starts.ctypes, "CDLL", lambda name: library)
    graph = Graph(library)
    assert instantiate(graph)
    assert graph.instantiated == [[(7, 8, 1)]]


@pytest.mark.parametrize("edge_is_refused", [True, False])
def test_where_the_driver_refuses_the_graph_is_instantiated_as_it_was_recorded(
    edge_is_refused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = Library(refuses=edge_is_refused)
    monkeypatch.setattr(early_starts.ctypes, "CDLL", lambda name: library)
    graph = Graph(library, refuses=not edge_is_refused)
    assert not instantiate(graph)
    assert graph.instantiated == [[(7, 8, 0)]]
    assert ("returned 801" if edge_is_refused else "invalid argument") in caplog.text
