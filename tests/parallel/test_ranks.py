"""An engine of several processes: the tokens of one, and what happens when a rank dies."""

import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from fake_grammar import FakeCompiler, use_fake_grammars
from forked_ranks import run_forked
from safetensors.torch import load_file
from tiny_models import VOCAB_SIZE, random_model

from minisgl.benchmark.kernels.kernel_timing import Ceilings
from minisgl.benchmark.steps.step import Points, measure_steps
from minisgl.config import DeviceFacts, EngineConfig, resolve_engine_config
from minisgl.engine.engine import Engine
from minisgl.engine.ranks import follower_link, rank_processes
from minisgl.engine.start.build import build_engine
from minisgl.errors import ConfigError, EngineDeadError
from minisgl.grammar.spec import GrammarSpec
from minisgl.ipc.messages import AddRequest
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.progress import no_progress
from minisgl.request import SamplingParams, ThoughtLimit
from minisgl.scheduler.plan import StepPlan

EOS = 2
LIMIT_S = 5.0
"""Within this all must be over after a rank has died."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More ranks than KV heads at --tp 4, and a vocabulary that does not come out."""
    folder = tmp_path_factory.mktemp("qwen3")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20}
    random_model(family="qwen3", num_hidden_layers=1, **heads).save_pretrained(folder)
    return folder


def build(folder: Path, tp: int, **settings: Any) -> Engine:
    """Small steps and few pages, so that prompts are fed in chunks and requests preempted."""
    settings = {"page_size": 4, "num_pages": 34, "max_step_tokens": 32, "output_reserve_tokens": 4} | settings
    config = EngineConfig(device="cpu", dtype="float32", tp=tp, **settings)
    return build_engine(config, folder, lambda name, duration_ms: None)


def add(engine: Engine, request_id: int, num_prompt_tokens: int, **params: Any) -> None:
    prompt = (np.arange(num_prompt_tokens, dtype="<i4") * 7 + request_id // 2) % VOCAB_SIZE
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True} | params)
    engine.add(AddRequest(request_id=request_id, prompt_ids=prompt.tobytes(), params=sampling))


def generate(engine: Engine) -> tuple[dict[int, list[int]], int]:
    """The tokens of requests that are greedy, sampled, long and equal in their beginnings; preemptions."""
    for request_id in range(6):
        add(engine, request_id, 9 + 8 * request_id, temperature=0.9 * (request_id % 2), top_p=0.9, seed=5)
    add(engine, 6, 5, repetition_penalty=1.3, logit_bias={3: 1.5})
    add(engine, 7, 6, logprobs=2)
    use_fake_grammars(engine, FakeCompiler(VOCAB_SIZE, EOS))
    for request_id in (8, 9):
        grammar = GrammarSpec("lark", str(request_id))
        add(
            engine,
            request_id,
            9 * request_id % 20,
            grammar=grammar,
            ignore_eos=False,
            seed=1,
            temperature=0.7,
        )
    limit = ThoughtLimit(4, (50,), (51, 52), is_open=True)
    add(engine, 10, 7, thought_limit=limit, temperature=0.7, seed=2)
    return run_to_the_end(engine), engine.status(0).num_preemptions


def run_to_the_end(engine: Engine) -> dict[int, list[int]]:
    """Each request's tokens."""
    tokens: dict[int, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def pids_of(engine: Engine) -> list[int]:
    assert engine._followers is not None
    return engine._followers.pids


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, list[int]]:
    engine = build(folder, 1)
    tokens, num_preemptions = generate(engine)
    engine.close()
    assert num_preemptions > 0, "more pages than the test wants"
    assert tokens[10][4:6] == [51, 52]
    return tokens


def live_in_four(folder: Path) -> dict[str, Any]:
    """Generate; then lose a rank in the middle of it."""
    engine = build(folder, 4)
    tokens, _ = generate(engine)
    pids = pids_of(engine)
    add(engine, 10, 9, max_tokens=100)
    for _ in range(5):
        engine.step()
    started = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(EngineDeadError) as error:
        run_to_the_end(engine)
    with pytest.raises(EngineDeadError):
        engine.step()
    left = alive(pids) and not _gone(pids, LIMIT_S)
    took_s = time.monotonic() - started
    engine.close()
    return {"tokens": tokens, "error": str(error.value), "took_s": took_s, "left": left, "end": alive(pids)}


def live_in_two(folder: Path, answer: Connection) -> None:
    """Generate, with a step in flight while the next is planned; measure steps; then wait to be killed."""
    torch.set_num_threads(1)
    engine = build(folder, 2, overlap=True)
    tokens, _ = generate(engine)
    assert engine._followers is not None
    points = Points(batches=(2,), contexts=(9,), prefills=(5,), prefixes=(4,), steps=3)
    report = measure_steps(engine, read_model_config(folder), points, Ceilings(1.0, 1.0), no_progress)
    others = [(start.rank, start.weights_bytes) for start in engine.wait_for_other_ranks()]
    answer.send((tokens, pids_of(engine), Path(engine._followers.store).parent, report.tables, others))
    signal.pause()


def test_four_ranks_give_the_tokens_of_one_and_the_loss_of_one_ends_all(
    folder: Path, expected: dict[int, list[int]]
) -> None:
    (seen,) = run_forked([lambda: live_in_four(folder)])
    assert seen["tokens"] == expected
    assert "rank 2 of --tp ended (killed by signal 9)" in seen["error"]
    assert seen["took_s"] < LIMIT_S
    assert not seen["left"]
    assert seen["end"] == []


def test_two_ranks_give_the_tokens_of_one_and_when_rank_0_is_killed_the_other_ends_and_leaves_no_file(
    folder: Path, expected: dict[int, list[int]]
) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    rank_0 = context.Process(target=live_in_two, args=(folder, theirs))
    rank_0.start()
    theirs.close()
    tokens, pids, ipc_dir, tables, others = ours.recv()
    assert alive(pids) == pids
    rank_0.kill()
    rank_0.join()
    assert _gone(pids, LIMIT_S)
    assert not ipc_dir.exists()
    assert tokens == expected
    assert [(row["batch"], row["context"]) for row in tables["decode"]] == [(2, 9)]
    assert [(row["new_tokens"], row["prefix"]) for row in tables["prefill"]] == [(5, 4)]
    # All but the norms is shared out, and a floor is that of a share.
    whole = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    ((rank, weights_bytes),) = others
    assert rank == 1
    assert whole / 2 < weights_bytes < 0.6 * whole
    assert 0 < tables["decode"][0]["floor_ms"] < 0.6e-9 * whole


REPORTER = """
import sys, msgspec
from minisgl.engine.ranks.follower_link import CHECKED_STEPS, Checksum, FollowerConfig, Joining
from minisgl.scheduler.plan import StepPlan
from minisgl.ipc.transport import FollowerSocket
config = msgspec.json.decode(sys.stdin.buffer.readline(), type=FollowerConfig)
socket = FollowerSocket(config.addresses)
socket.send(msgspec.msgpack.encode(Joining(config.rank)))
value = msgspec.msgpack.decode(socket.receive(), type=StepPlan).step_id
socket.send(msgspec.msgpack.encode(Checksum(config.rank, CHECKED_STEPS, value)))
while socket.receive():
    pass
socket.close()
"""
"""A rank that executes nothing: it reports the number of the first plan as its checksum."""


@pytest.mark.parametrize("off", [0, 1])
def test_tokens_that_differ_between_ranks_are_noticed(
    off: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "FOLLOWER", (sys.executable, "-c", REPORTER))
    checksum = follower_link.TokenChecksum()
    assert [step for step in range(follower_link.CHECKED_STEPS) if checksum.add([step, 7])] == [63]
    config = resolve_engine_config(
        EngineConfig(device="cpu", tp=2), read_model_config(folder), DeviceFacts(has_cuda=False)
    )
    link = follower_link.FollowerLink(config, folder, ipc_dir=None, on_lost=lambda *_: None)
    try:
        link.wait_for_all()
        for step in range(follower_link.CHECKED_STEPS):
            link.compare_tokens([step, 7])
        link.send(StepPlan(checksum.value + off, (), (), (), (), ()))
        with pytest.raises(EngineDeadError, match="disagree") if off else nullcontext():
            assert len(link._receive(timeout_ms=20_000)) == 1
    finally:
        link.close()
    assert alive(link.pids) == []


def test_rank_0_no_longer_waits_in_the_store_when_another_rank_has_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        rank_processes, "FOLLOWER", (sys.executable, "-c", "import sys; sys.stdin.readline()")
    )
    config = resolve_engine_config(
        EngineConfig(device="cpu", tp=2), read_model_config(folder), DeviceFacts(has_cuda=False)
    )
    for joins_before in (True, False):
        ranks = Mock(lost=threading.Event())
        link = follower_link.FollowerLink(config, folder, ipc_dir=None, on_lost=lambda *_: None)
        try:
            if joins_before:
                link.set_ranks(ranks)
            else:
                assert link._lost_event.wait(20)
                link.set_ranks(ranks)
            assert ranks.lost.wait(20)
        finally:
            link.close()


def test_a_rank_that_can_not_start_is_the_starts_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "FOLLOWER", (sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(EngineDeadError, match=r"rank 1 of --tp ended \(exit code 3\)"):
        build(folder, 2)


REFUSER = """
import sys
from minisgl import errors
from minisgl.engine.start import build
from minisgl.engine.ranks import follower
def refuse(*arguments, **settings):
    raise {error}
build.build_follower = refuse
sys.exit(follower.main())
"""
"""A rank whose engine can't be built."""


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        ('errors.ConfigError("lower --tp")', ConfigError, "rank 1 of --tp: lower --tp"),
        ('errors.ModelError("no weights")', ConfigError, "rank 1 of --tp: no weights"),
        ('OSError("no disk")', EngineDeadError, "rank 1 of --tp: the engine failed: OSError: no disk"),
    ],
)
def test_a_users_mistake_that_another_rank_notices_is_a_mistake_at_rank_0_too(
    error: str, kind: type[Exception], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "FOLLOWER", (sys.executable, "-c", REFUSER.format(error=error)))
    with pytest.raises(kind) as raised:
        build(folder, 2)
    assert str(raised.value) == message


def test_a_start_that_fails_leaves_no_rank_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links: list[follower_link.FollowerLink] = []
    init = follower_link.FollowerLink.__init__

    def note(self: follower_link.FollowerLink, *args: Any, **kwargs: Any) -> None:
        links.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(follower_link.FollowerLink, "__init__", note)
    monkeypatch.setattr(rank_processes, "FOLLOWER", (sys.executable, "-c", "import sys; sys.stdin.read()"))
    monkeypatch.setattr(follower_link, "START_TIMEOUT_S", 0.2)
    with pytest.raises(EngineDeadError, match="rank 1 of --tp was not ready"):
        build(folder, 2)
    (link,) = links
    assert alive(link.pids) == []
    assert not Path(link.store).parent.exists()


@pytest.mark.parametrize(
    ("tp", "what"),
    [(3, "4 attention heads evenly; it can be 1, 2, 4"), (8, "4 attention heads"), (0, "between 1 and 64")],
)
def test_a_size_that_does_not_suit_the_model_is_refused_with_those_that_do(
    folder: Path, tp: int, what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        build(folder, tp)


def _gone(pids: list[int], limit_s: float) -> bool:
    """Whether the processes, which need not be children of this one, end within the time."""
    deadline = time.monotonic() + limit_s
    for descriptor in _descriptors(pids):
        if not select.select([descriptor], [], [], max(0, deadline - time.monotonic()))[0]:
            return False
    return True


def _descriptors(pids: list[int]) -> Iterator[int]:
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            yield descriptor
        finally:
            os.close(descriptor)
