"""Ranks on several hosts, which are process groups on this one: tokens, what ends whom, and who is let in."""

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ranks import LIMIT_S, _gone, add, alive, build, run_to_the_end
from tiny_models import random_model

from minisgl.config import EngineConfig, ResolvedConfig, resolve_engine_config
from minisgl.engine.engine import Engine
from minisgl.engine.ranks import node_link
from minisgl.engine.ranks.node_link import Hello, NodeListener, RankEnded, Welcome, connect
from minisgl.engine.start.device import find_device_facts
from minisgl.errors import ConfigError, EngineDeadError
from minisgl.model_config.config import ModelConfig
from minisgl.model_config.hf_config import read_model_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    random_model(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2).save_pretrained(folder)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def second_node(folder: Path, tp: int, rdzv: str) -> Iterator[subprocess.Popen[str]]:
    """`minisgl serve --node-rank 1`, with half of the ranks."""
    flags = ["--device", "cpu", "--tp", str(tp), "--nnodes", "2", "--node-rank", "1", "--rdzv", rdzv]
    process = subprocess.Popen(
        [sys.executable, "-m", "minisgl", "serve", "--model", str(folder), *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def generate(engine: Engine) -> dict[int, list[int]]:
    add(engine, 0, 9)
    add(engine, 1, 40, temperature=0.9, seed=1)
    return run_to_the_end(engine)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def first_node(folder: Path, tp: int, rdzv: str, link: Connection) -> None:
    """The other half: generate, then run on until a rank is lost, and say what that was; or end in order."""
    torch.set_num_threads(1)
    engine = build(folder, tp, nnodes=2, rdzv=rdzv)
    assert engine._followers is not None
    link.send((generate(engine), engine._followers.pids))
    if link.recv() == "close":
        engine.close()
        link.send("closed")
        return
    add(engine, 10, 9, max_tokens=100)
    try:
        while True:
            run_to_the_end(engine)
            add(engine, 10, 9, max_tokens=100)
    except EngineDeadError as error:
        link.send(str(error))
    engine.close()


@contextmanager
def two_nodes(
    folder: Path, tp: int = 2
) -> Iterator[tuple[Any, Connection, Any, dict[int, list[int]], list[int]]]:
    """Both running; what node 0 generated, and the processes of rank 1 and on."""
    rdzv = f"127.0.0.1:{free_port()}"
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    node_0 = context.Process(target=first_node, args=(folder, tp, rdzv, theirs))
    with second_node(folder, tp, rdzv) as node_1:
        node_0.start()
        theirs.close()
        try:
            tokens, local = ours.recv()
            yield node_0, ours, node_1, tokens, [*local, *children_of(node_1.pid)]
        finally:
            node_0.kill()
            node_0.join()


def test_two_nodes_give_the_tokens_of_one_rank_and_end_in_order(folder: Path) -> None:
    engine = build(folder, 1)
    expected = generate(engine)
    engine.close()
    with two_nodes(folder, 4) as (_, link, node_1, tokens, pids):
        assert tokens == expected
        assert len(alive(pids)) == 3
        link.send("close")
        assert link.recv() == "closed"
        _, said = node_1.communicate(timeout=LIMIT_S)
        assert node_1.returncode == 0, said
        assert "node 1: ranks 2, 3" in said
        assert _gone(pids, LIMIT_S)


@pytest.mark.parametrize("victim", ["a rank of node 1", "node 1"])
def test_the_loss_of_a_rank_or_a_node_is_node_0s_error_and_ends_all(victim: str, folder: Path) -> None:
    with two_nodes(folder) as (node_0, link, node_1, _, pids):
        link.send("go on")
        began = time.monotonic()
        os.kill(pids[-1] if victim == "a rank of node 1" else node_1.pid, signal.SIGKILL)
        error = link.recv()
        assert time.monotonic() - began < LIMIT_S
        wanted = r"rank 1 of --tp ended \(killed by signal 9\)|node 1 of --nnodes is gone"
        assert re.search(wanted, error), error
        assert _gone(pids, LIMIT_S)
        node_1.communicate(timeout=LIMIT_S)
        assert node_1.returncode != 0
        node_0.join(LIMIT_S)
        assert node_0.exitcode == 0


def test_when_node_0_is_killed_the_other_node_says_so_and_ends(folder: Path) -> None:
    with two_nodes(folder) as (node_0, _, node_1, _, pids):
        node_0.kill()
        _, said = node_1.communicate(timeout=LIMIT_S)
        assert node_1.returncode == 1
        assert "node 0 has ended" in said
        assert _gone(pids, LIMIT_S)


class Node0:
    """A node 0 without ranks."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.ended: list[tuple[int, RankEnded | None]] = []
        self.told = threading.Event()
        self.config = resolved(folder, rdzv=f"127.0.0.1:{free_port()}", **settings)
        self.listener = NodeListener(
            self.config, folder, lambda node: Welcome(store=f"for {node}"), self.on_end
        )

    def on_end(self, node: int, ended: RankEnded | None) -> None:
        self.ended.append((node, ended))
        self.told.set()

    def hello(self, folder: Path, **other: Any) -> Hello:
        expected = Hello(node_link.__version__, 2, 4, node_link.model_digest(folder), 1)
        return Hello(**{name: getattr(expected, name) for name in Hello.__struct_fields__} | other)


def resolved(folder: Path, **settings: Any) -> ResolvedConfig:
    config = EngineConfig(**{"device": "cpu", "tp": 4, "nnodes": 2} | settings)
    model: ModelConfig = read_model_config(folder)
    return resolve_engine_config(config, model, find_device_facts())


@pytest.fixture
def node_0(folder: Path) -> Iterator[Node0]:
    node_0 = Node0(folder)
    yield node_0
    node_0.listener.close(0)


def test_a_node_is_told_what_to_start_and_its_end_is_noticed(node_0: Node0, folder: Path) -> None:
    assert node_0.config.rdzv is not None
    assert node_0.listener.missing() == [1]
    connection, welcome = connect(node_0.config.rdzv, node_0.hello(folder), 1)
    assert welcome.store == "for 1"
    assert node_0.listener.missing() == []
    connection.send(RankEnded(3, "exit code 3"))
    assert node_0.told.wait(LIMIT_S)
    assert node_0.ended == [(1, RankEnded(3, "exit code 3"))]
    assert connection.receive(Welcome) is None, "the end of one is the end of all"


def test_a_node_that_vanishes_is_noticed(node_0: Node0, folder: Path) -> None:
    assert node_0.config.rdzv is not None
    connection, _ = connect(node_0.config.rdzv, node_0.hello(folder), 1)
    connection.close()
    assert node_0.told.wait(LIMIT_S)
    assert node_0.ended == [(1, None)]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"tp": 8}, "--tp must be the same on all nodes: node 0 has 4, this one 8"),
        ({"nnodes": 4}, "--nnodes must be the same"),
        ({"node_rank": 2}, "--node-rank 2 is none of 1 to 1"),
        ({"version": "0.0.1"}, "minisgl's version must be the same"),
        ({"model_digest": "another"}, "config.json must be the same"),
    ],
)
def test_a_node_with_other_settings_is_refused_by_name(
    other: dict[str, Any], why: str, node_0: Node0, folder: Path
) -> None:
    assert node_0.config.rdzv is not None
    with pytest.raises(ConfigError, match=re.escape(why)):
        connect(node_0.config.rdzv, node_0.hello(folder, **other), 1)
    assert node_0.listener.missing() == [1]
    assert node_0.ended == []


def test_the_same_node_can_not_join_twice(node_0: Node0, folder: Path) -> None:
    assert node_0.config.rdzv is not None
    connection, _ = connect(node_0.config.rdzv, node_0.hello(folder), 1)
    with pytest.raises(ConfigError, match="--node-rank 1 has joined already"):
        connect(node_0.config.rdzv, node_0.hello(folder), 1)
    assert node_0.ended == []
    connection.close()


def test_strangers_are_sent_away(node_0: Node0) -> None:
    with socket.create_connection(node_link.split_rdzv(node_0.config.rdzv or "")) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\n")
        assert stranger.recv(100) == b""
    assert node_0.ended == []


def test_what_does_not_answer_is_no_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_link, "ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        rdzv = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(EngineDeadError, match="ended, or is no minisgl"):
            connect(rdzv, Hello("", 2, 2, "", 1), 1)


def test_without_a_node_0_a_node_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_link, "RETRY_S", 0.01)
    rdzv = f"127.0.0.1:{free_port()}"
    with pytest.raises(EngineDeadError, match=f"node 0 did not answer at --rdzv {rdzv}"):
        connect(rdzv, Hello("", 2, 2, "", 1), 0.05)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"tp": 4, "nnodes": 3, "rdzv": "a:1"}, "--nnodes must be a divisor of tp"),
        ({"tp": 4, "nnodes": 2}, "--nnodes needs --rdzv"),
        ({"tp": 4, "nnodes": 2, "rdzv": "host"}, "--rdzv must be host:port"),
        ({"tp": 4, "nnodes": 2, "rdzv": "host:70000"}, "--rdzv must be host:port"),
        ({"tp": 4, "nnodes": 2, "node_rank": 2, "rdzv": "a:1"}, "--node-rank must be between 0 and nnodes"),
    ],
)
def test_settings_that_fit_no_nodes_are_refused(settings: dict[str, Any], what: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=what):
        resolved(folder, **settings)


def test_an_engine_is_used_on_node_0(folder: Path) -> None:
    with pytest.raises(ConfigError, match="minisgl serve"):
        build(folder, 2, nnodes=2, node_rank=1, rdzv="127.0.0.1:1")


def test_an_address_of_another_host_is_refused_on_node_0(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--rdzv must name node 0"):
        build(folder, 2, nnodes=2, rdzv="192.0.2.1:29500")


def test_an_ipv6_address_is_in_brackets() -> None:
    assert node_link.split_rdzv("[::1]:29500") == ("::1", 29500)
