"""Do streams survive kill -9 and hangs of the engine and of a rank, with the tokens they would have had?

    python bench/kills.py --rounds 2 --out bench/results/cpu/kills.json

It starts `minisgl serve` with the built-in model in float32 on the CPU. 64 calls stream at once: greedy and
seeded, with penalties, log probabilities, a grammar, two choices. Once undisturbed; then in rounds in which
the engine's process is killed or stopped at random moments; with --tp 3 also rank 1. Tokens, log
probabilities, ends and usage must be the same. A last round has a request that crashes the engine at a token:
it must end alone. The exit code is 1 if anything differs that is no tie, is lost, or is held afterwards.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import llguidance
import llguidance.hf
import torch
from kills_engine import POISON
from transformers import AutoModelForCausalLM, AutoTokenizer

from minisgl.benchmark.reports.report import format_table, make_report, write_report
from minisgl.weights.sources import resolve_model_folder
from triton_kernels.sample_reference import sample_reference

NUM_STREAMS = 64
TIE = 1e-4
NUM_TIE_TRIALS = 400
END_IDS = [0, 2]
"""Of the built-in model, whose end ids are <|endoftext|> and <|im_end|>."""
HEARTBEAT_S = 20.0
LIMIT_S = 900.0
SERVE = """
import sys, time
from pathlib import Path
started_at = time.monotonic()
from minisgl.config import EngineConfig, ServerConfig
from minisgl.log import setup_logging
from minisgl.server.engines.launch import run_server
from minisgl.weights.sources import resolve_model_folder
tp, heartbeat_s, worker = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
setup_logging("info", "server")
engine = EngineConfig(device="cpu", dtype="float32", tp=tp, cpu_threads=tp, num_pages=1200,
    max_running_requests=80, max_context_tokens=512, max_step_tokens=256, chunk_tokens=128)
server = ServerConfig(port=0, engine_restarts=20, heartbeat_timeout_s=heartbeat_s)
sys.exit(run_server(server, engine, Path(resolve_model_folder("smollm2-135m")), worker_command=worker or None,
    started_at=started_at))
"""


class Answer:
    """What one call got."""

    def __init__(self) -> None:
        self.token_ids: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.ends: dict[int, str] = {}
        self.usage: dict[str, Any] | None = None
        self.num_done = 0
        self.error: dict[str, Any] | None = None
        self.times: list[float] = []

    @property
    def is_whole(self) -> bool:
        return self.error is None and self.num_done == 1 and self.usage is not None


def calls(num_tokens: int, seed: int) -> list[dict[str, Any]]:
    """The bodies of the calls."""
    source = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.8, "logprobs": 2},
        {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.7, "min_tokens": 10},
        {"temperature": 0.7, "structured_outputs": {"regex": "([a-z]{2,9} ){4,30}end"}},
        {"temperature": 0.9, "n": 2},
        {"temperature": 0, "logprobs": 1},
    ]
    bodies = []
    for number in range(NUM_STREAMS):
        kind = kinds[number % len(kinds)]
        # Half of them share a beginning.
        prompt = [source.randrange(100, 40000) for _ in range(source.randrange(4, 30))]
        prompt = [*range(500, 540), *prompt] if number % 2 else prompt
        free = {} if "structured_outputs" in kind else {"ignore_eos": True}
        body = {"prompt": prompt, "max_tokens": num_tokens, "seed": number, "return_token_ids": True}
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        bodies.append(body | usage | free | kind)
    return bodies


class Server(NamedTuple):
    url: str
    process: subprocess.Popen[str]
    log: Path

    async def get(self, session: aiohttp.ClientSession, path: str) -> dict[str, Any]:
        async with session.get(self.url + path) as answer:
            return await answer.json()


@contextlib.contextmanager
def running(tp: int, poisoned: bool) -> Iterator[Server]:
    worker = [sys.executable, str(Path(__file__).with_name("kills_engine.py"))] if poisoned else []
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", SERVE, str(tp), str(HEARTBEAT_S), *worker],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            assert process.stdout is not None
            url = ""
            for line in process.stdout:
                found = re.match(r"curl (http://[^/]+)/", line)
                if found:
                    url = found[1]
                    break
            if not url:
                raise SystemExit(log.read_text())
            yield Server(url, process, log)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def read(session: aiohttp.ClientSession, url: str, body: dict[str, Any], answer: Answer) -> None:
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = (await response.json())["error"]
                return
            async for line in response.content:
                if line.startswith(b"data: "):
                    take(answer, line[6:].strip())
    except aiohttp.ClientError as error:
        answer.error = {"code": "connection", "message": str(error)}


def take(answer: Answer, data: bytes) -> None:
    if data == b"[DONE]":
        answer.num_done += 1
        return
    event = json.loads(data)
    if "error" in event:
        answer.error = event["error"]
        return
    for choice in event["choices"]:
        index = choice["index"]
        if choice.get("token_ids"):
            answer.times.append(time.monotonic())
            answer.token_ids.setdefault(index, []).extend(choice["token_ids"])
        if choice.get("logprobs"):
            answer.logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
        if choice["finish_reason"]:
            assert index not in answer.ends, "a choice ended twice"
            answer.ends[index] = choice["finish_reason"]
    answer.usage = event.get("usage") or answer.usage


def rank_of(engine: int) -> int:
    """The process of rank 1, a child of the engine's."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == engine and b"follower" in (file.parent / "cmdline").read_bytes():
                return int(file.parent.name)
    raise SystemExit(f"engine {engine} has no rank 1")


async def disturb(
    server: Server,
    session: aiohttp.ClientSession,
    faults: list[str],
    source: random.Random,
    done: list[dict[str, Any]],
    num_given: Callable[[], int],
    num_all: int,
) -> None:
    """Inject the faults one after the other, each when a random share of all tokens is given.

    A fault while a suspect is alone would look like its crash, so the next one waits until all are running.
    """
    for number, fault in enumerate(faults):
        share = (number + source.uniform(0.7, 1.2)) / (len(faults) + 1)
        while num_given() < share * num_all:
            await asyncio.sleep(0.05)
        engine = (await server.get(session, "/health"))["engine_pid"]
        pid = rank_of(engine) if fault.endswith("rank") else engine
        at = time.monotonic()
        os.kill(pid, signal.SIGSTOP if fault.startswith("hang") else signal.SIGKILL)
        while True:
            await asyncio.sleep(0.2)
            health = await server.get(session, "/health")
            if health["status"] == "ok" and health["engine_restarts"] > number:
                break
        done.append({"fault": fault, "at": at, "back_s": round(time.monotonic() - at, 1)})


async def serve_all(
    server: Server, bodies: list[dict[str, Any]], faults: list[str], seed: int
) -> tuple[list[Answer], list[dict[str, Any]], dict[str, int]]:
    answers = [Answer() for _ in bodies]
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        readers = [read(session, server.url, *pair) for pair in zip(bodies, answers, strict=True)]
        done: list[dict[str, Any]] = []
        disturbing = asyncio.ensure_future(
            disturb(
                server,
                session,
                faults,
                random.Random(seed),
                done,
                lambda: sum(len(tokens) for one in answers for tokens in one.token_ids.values()),
                sum(body["max_tokens"] * body.get("n", 1) for body in bodies),
            )
        )
        await asyncio.gather(*readers)
        if not disturbing.cancel():
            disturbing.result()
        info = await server.get(session, "/server_info")
        restarts = info["engine_restarts"]
        held = {
            name: info["engine"][name]
            for name in ("num_held_pages", "num_held_rows", "num_running", "num_waiting")
        }
        held |= {"num_open_requests": info["server"]["num_open_requests"], "restarts": restarts}
    return answers, done, held


def pauses(answers: list[Answer], begin: float, end: float) -> list[float]:
    """Each call's longest time between two tokens, in seconds, of which the first came in this time.

    Calls without such tokens are left out. A token that was on its way at a fault comes after it, so the
    first gap behind a fault is not the pause.
    """
    gaps = [
        [after - before for before, after in pairwise(one.times) if begin <= before <= end] for one in answers
    ]
    return sorted(max(found) for found in gaps if found)


def compare(body: dict[str, Any], found: Answer, expected: Answer) -> list[str]:
    """What differs."""
    if not found.is_whole:
        return [f"no whole answer: {found.error}, {found.num_done} ends"]
    wrong = []
    for index, tokens in expected.token_ids.items():
        ours = found.token_ids.get(index, [])
        if ours != tokens:
            place = next((p for p, (a, b) in enumerate(zip(ours, tokens, strict=False)) if a != b), len(ours))
            parts = f"{ours[place : place + 1]} instead of {tokens[place : place + 1]}"
            wrong.append(f"choice {index}: token {place} of {len(tokens)} differs, {parts}")
    if wrong:
        return wrong
    for index, values in expected.logprobs.items():
        ours = found.logprobs.get(index, [])
        if len(ours) != len(values) or any(abs(a - b) > 1e-3 for a, b in zip(ours, values, strict=True)):
            wrong.append(f"choice {index}: log probabilities differ")
    if found.ends != expected.ends:
        wrong.append(f"ends {found.ends} instead of {expected.ends}")
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found.usage is not None
        assert expected.usage is not None
        if found.usage[name] != expected.usage[name]:
            wrong.append(f"usage {name}: {found.usage[name]} instead of {expected.usage[name]}")
    return wrong


class Ties:
    """Tells ties from differences, with transformers' logits of the same model.

    Sampling in float32 draws from sums of probabilities, so where a tail token is drawn, rounding chooses
    between neighbours. A tie is a place where logits that differ by TIE / 2 at most give both tokens, under
    the call's penalties and grammar.
    """

    def __init__(self) -> None:
        self._model: Any = None
        self._tokenizer: Any = None

    def is_tie(self, body: dict[str, Any], found: Answer, expected: Answer) -> bool:
        """Whether each choice that differs parts at a tie."""
        if not found.is_whole:
            return False
        for index, theirs in expected.token_ids.items():
            ours = found.token_ids.get(index, [])
            if ours != theirs and not self._parts_at_a_tie(body, index, ours, theirs):
                return False
        return True

    def _parts_at_a_tie(self, body: dict[str, Any], index: int, ours: list[int], theirs: list[int]) -> bool:
        place = next((p for p, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if place is None:
            return False
        if self._model is None:
            folder = resolve_model_folder("smollm2-135m")
            self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            self._tokenizer = llguidance.hf.from_tokenizer(AutoTokenizer.from_pretrained(folder))
        tokens = [*body["prompt"], *theirs[:place]]
        with torch.inference_mode():
            logits = self._model(torch.tensor([tokens])).logits[0, -1]
        noise = torch.empty(NUM_TIE_TRIALS, len(logits))
        noise.uniform_(-TIE / 2, TIE / 2, generator=torch.Generator().manual_seed(0))

        def column(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((NUM_TIE_TRIALS,), value, dtype=dtype)

        drawn = sample_reference(
            self._ruled(logits + noise, body, theirs[:place]),
            column(body["temperature"], torch.float32),
            column(0, torch.int32),
            column(body.get("top_p", 1.0), torch.float32),
            column(0.0, torch.float32),
            column(body["seed"] + index, torch.int64),
            column(len(tokens), torch.int32),
        ).tolist()
        return ours[place] in drawn and theirs[place] in drawn

    def _ruled(self, logits: torch.Tensor, body: dict[str, Any], output: list[int]) -> torch.Tensor:
        """With penalties as OpenAI and Keskar et al. (2019) define them, without what the call excludes."""
        counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=logits.shape[1])
        seen = counts.clone()
        seen[torch.tensor(body["prompt"])] += 1
        penalty = body.get("repetition_penalty", 1.0)
        logits = torch.where(seen > 0, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        logits = logits - body.get("frequency_penalty", 0.0) * counts
        logits = logits - body.get("presence_penalty", 0.0) * (counts > 0)
        if len(output) < body.get("min_tokens", 0):
            logits[:, END_IDS] = float("-inf")
        if "structured_outputs" in body:
            regex = llguidance.LLMatcher.grammar_from_regex(body["structured_outputs"]["regex"])
            matcher = llguidance.LLMatcher(self._tokenizer, regex)
            matcher.consume_tokens(output)
            bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
            allowed = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
            logits = logits.masked_fill(allowed.flatten()[: logits.shape[1]] == 0, float("-inf"))
        return logits


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds with --tp 1")
    parser.add_argument("--rank-rounds", type=int, default=1, help="rounds with --tp 3")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-poison", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    bodies = calls(arguments.tokens, arguments.seed)
    source = random.Random(arguments.seed)
    rounds: list[dict[str, Any]] = []
    fault_rows: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    num_wrong = num_ties = 0
    tie_check = Ties()

    def book(
        server: Server,
        kind: str,
        expected: list[Answer],
        part: tuple[list[Answer], list[dict[str, Any]], dict[str, int]],
    ) -> None:
        nonlocal num_wrong, num_ties
        answers, faults, held = part
        ties = different = 0
        for number, (body, found, wanted) in enumerate(zip(bodies, answers, expected, strict=True)):
            wrong = compare(body, found, wanted)
            if wrong and tie_check.is_tie(body, found, wanted):
                ties += 1
            elif wrong:
                different += 1
                differences.append({"round": len(rounds), "call": number, "what": "; ".join(wrong)})
                print(format_table(differences[-1:]), flush=True)
        num_ties += ties
        restarts = held.pop("restarts")
        num_wrong += different + any(held.values())
        for fault in faults:
            at = fault.pop("at")
            gaps = pauses(answers, at - 0.1, at + fault["back_s"])
            fault |= {"round": len(rounds), "streams_paused": len(gaps)}
            if gaps:
                fault |= {"pause_p50_s": round(gaps[len(gaps) // 2], 1), "pause_max_s": round(gaps[-1], 1)}
            fault_rows.append(fault)
        rounds.append(
            {
                "kind": kind,
                "calls": len(bodies),
                "whole": sum(one.is_whole for one in answers),
                "different": different,
                "ties": ties,
                "restarts": restarts,
                "held": sum(held.values()),
            }
        )
        print(format_table(rounds[-1:]), flush=True)

    began = time.perf_counter()
    expected: list[Answer] = []
    for tp, num_rounds in ((1, arguments.rounds), (3, arguments.rank_rounds)):
        for number in range(num_rounds + 1 if num_rounds else 0):
            with running(tp, poisoned=False) as server:
                if number == 0:
                    part = asyncio.run(serve_all(server, bodies, [], 0))
                    if tp == 1:
                        expected = part[0]
                    book(server, f"tp {tp}, undisturbed", expected or part[0], part)
                    expected = expected or part[0]
                    continue
                kinds = (
                    ["kill engine", "kill rank"] if tp == 3 else ["kill engine", "hang engine", "kill engine"]
                )
                source.shuffle(kinds)
                part = asyncio.run(serve_all(server, bodies, kinds, source.randrange(1 << 30)))
                book(server, f"tp {tp}, " + ", ".join(kinds), expected, part)
    poison: list[dict[str, Any]] = []
    if not arguments.no_poison:
        with running(1, poisoned=True) as server:
            own = {
                "prompt": [*POISON, 7],
                "max_tokens": 30,
                "temperature": 0,
                "stream": True,
                "ignore_eos": True,
            }
            bodies.insert(20, own | {"return_token_ids": True})
            del bodies[-1]
            answers, _, held = asyncio.run(serve_all(server, bodies, [], 0))
            code = (answers[20].error or {}).get("code")
            others = [one for place, one in enumerate(answers) if place != 20]
            wanted = expected[:-1]
            pairs = list(zip([*bodies[:20], *bodies[21:]], others, wanted, strict=True))
            different = [compare(*pair) for pair in pairs]
            ties = [
                bool(wrong) and tie_check.is_tie(*pair) for wrong, pair in zip(different, pairs, strict=True)
            ]
            num_different = sum(bool(wrong) and not tie for wrong, tie in zip(different, ties, strict=True))
            restarts = held.pop("restarts")
            is_right = code == "request_crashes_engine" and not any(held.values()) and not num_different
            num_wrong += not is_right
            poison.append(
                {
                    "poison_ended_with": code,
                    "others_whole": sum(one.is_whole for one in others),
                    "others": len(others),
                    "different": num_different,
                    "ties": sum(ties),
                    "restarts": restarts,
                    "held": sum(held.values()),
                }
            )
            print(format_table(poison), flush=True)
            for wrong in different:
                if wrong:
                    print(wrong, flush=True)
    tables = {"rounds": rounds, "faults": fault_rows, "poison": poison, "differences": differences}
    for rows in tables.values():
        if rows:
            print(format_table(rows))
    if arguments.out:
        options = {
            "rounds": arguments.rounds,
            "rank_rounds": arguments.rank_rounds,
            "tokens": arguments.tokens,
        }
        report = make_report(
            "kills",
            arguments=options | {"seed": arguments.seed},
            metrics={"seconds": round(time.perf_counter() - began), "wrong": num_wrong, "ties": num_ties},
            tables=tables,
        )
        write_report(arguments.out, report)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
