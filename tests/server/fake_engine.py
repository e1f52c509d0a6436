"""An engine process without a model: it speaks the real protocol and does what the prompt says.

A prompt's last `@word rest` is a command; one without is answered with "ok":
  @say TEXT      TEXT, one token a step, then end-of-sequence
  @burst TEXT    the same in one step
  @chars TEXT    the same, a token for each byte of text that no special token is
  @wait TEXT     TEXT, then nothing until somebody sends @go
  @go            ends every waiting request (they say "!") and itself
  @report        JSON of what arrived so far
  @settings      JSON of some of its settings
  @refuse        an error answer: status 422, code "refused"
  @spoil TEXT    TEXT, one token a step, then an error: status 500, code "no_finite_logits"
  @ghost TEXT    TEXT, and after its end more outputs for this and for unknown ids
  @cached TEXT   TEXT, with half of the prompt found in the cache
  @crash         dies at once (SIGKILL)
  @break TEXT    TEXT, one token a step, then it dies (SIGKILL)
  @freeze        stops answering anything (SIGSTOP)
  @fatal         says Fatal and exits
  @fault TEXT    says Fatal with TEXT and exits, as after a GPU fault; without TEXT it only exits

SIGUSR1 does what @go does, for tests that may not send a request any more. A waiting request that comes after
the signal ends, too: no test has to know whether one has arrived again in an engine that was restarted.

`fake.json` in the model folder: {"start": "ok" | "hang" | "fatal" | "refuse" | "exit", "context": tokens,
"pace_ms": milliseconds of a step, "device": what it says that it runs on,
"only_with": the max_running_requests with which "start" holds; with others it is "ok"}.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from minisgl.engine.parent_watch import ParentWatch
from minisgl.engine.watch.request_times import RequestTimes
from minisgl.engine.worker import ToServerSocket
from minisgl.errors import DEVICE_FAULT_EXIT_CODE
from minisgl.ipc.messages import AbortRequest, AddRequest, Fatal, Ready, Shutdown, StartupStage, StepOutput
from minisgl.ipc.questions import (
    AskProfile,
    AskRequests,
    AskTimeline,
    CacheFlushed,
    DebugAnswer,
    FlushCache,
    Ping,
    Status,
)
from minisgl.ipc.transport import EngineSocket
from minisgl.lives import STEP_BOUNDS_MS, STEP_PARTS, Life, LivesAnswer, Moment, Phase, Wait
from minisgl.request import FinishReason, RequestOutput, SamplingParams
from minisgl.text.tokenizer import Tokenizer

COMMAND = re.compile(r"@(\w+) ?(.*?)(?=<\|im_end\|>|\Z)", re.DOTALL)


class Answer:
    """A running request and the tokens it still has to give."""

    def __init__(self, params: SamplingParams, token_ids: list[int], num_cached_tokens: int) -> None:
        self.params = params
        self.num_prompt_tokens = 0
        self.arrived_s = self.added_s = self.first_token_s = 0.0
        self.token_ids = token_ids
        self.num_cached_tokens = num_cached_tokens
        self.num_given = 0
        self.waits = False
        self.fails = False  # when its tokens are given
        self.breaks = False  # the engine dies then

    def step(self, request_id: int, eos: int, most: int) -> RequestOutput | None:
        """Up to `most` tokens, as the real engine gives them."""
        given: list[int] = []
        reason = None
        assert self.params.max_tokens is not None  # the server always decides
        while self.token_ids and len(given) < most and reason is None:
            given.append(self.token_ids.pop(0))
            self.num_given += 1
            if given[-1] == eos or given[-1] in self.params.stop_token_ids:
                reason = FinishReason.STOP
            elif self.num_given == self.params.max_tokens:
                reason = FinishReason.LENGTH
        return RequestOutput(request_id, given, reason, self.num_cached_tokens) if given else None


class FakeEngine:
    """The loop of the engine process."""

    def __init__(
        self, socket: ToServerSocket, tokenizer: Tokenizer, close: Callable[[], None] = lambda: None
    ) -> None:
        self.socket = socket
        self.close = close
        self.tokenizer = tokenizer
        self.eos = self.encode("<|im_end|>")[0]
        ids = range(tokenizer.vocab_size)
        self.byte_ids = {data[0]: one for one in ids if len(data := tokenizer.token_bytes(one)) == 1}
        self.pace_ms = 0  # a step takes so long, if no message comes
        self.running: dict[int, Answer] = {}
        self.bursts: set[int] = set()
        self.seen: dict[str, Any] = {"added": 0, "aborted": 0, "params": []}
        self.settings: dict[str, Any] = {}
        self.extra: list[RequestOutput] = []
        self.num_steps = 0
        self.names: dict[int, str] = {}
        self.ended: deque[Life] = deque(maxlen=1000)
        self.times = RequestTimes()
        self.is_told_to_go = False

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def in_bytes(self, text: str) -> list[int]:
        """The text in the tokens that say least: special ones, and one for each other byte."""
        found: list[int] = []
        for token_id in self.encode(text):
            data = self.tokenizer.token_bytes(token_id)
            is_one = token_id in self.tokenizer.added_tokens().values()
            found += [token_id] if is_one else [self.byte_ids[byte] for byte in data]
        return found

    def run(self) -> None:
        while True:
            for message in self.socket.receive(self.patience_ms()):
                if isinstance(message, Shutdown):
                    return
                if isinstance(message, Ping):
                    running = len(self.running)
                    status = Status(
                        message.sequence,
                        self.num_steps,
                        num_running=running,
                        num_held_rows=running,
                        step_counts=[self.num_steps, *[0] * len(STEP_BOUNDS_MS)],
                        step_part_s=[0.0] * len(STEP_PARTS),
                        request_counts=self.times.counts,
                        request_part_s=self.times.seconds,
                    )
                    self.socket.send(status, message.server)
                elif isinstance(message, AskTimeline):
                    self.socket.send(DebugAnswer(message.sequence, b'{"traceEvents":[]}'), message.server)
                elif isinstance(message, AskProfile):
                    path, refusal = (
                        f"/traces/{message.num_steps}",
                        "" if message.num_steps < 9 else "too many",
                    )
                    self.socket.send(DebugAnswer(message.sequence, path.encode(), refusal), message.server)
                elif isinstance(message, AskRequests):
                    self.socket.send(DebugAnswer(message.sequence, self.lives(message)), message.server)
                elif isinstance(message, FlushCache):
                    self.socket.send(CacheFlushed(message.sequence, 5), message.server)
                elif isinstance(message, AddRequest):
                    prompts = (message.prompt_ids, *message.more_prompts)
                    for rank in range(len(prompts) * message.num_choices):
                        self.names[message.request_id + rank] = message.call_id
                        self.add(message, message.request_id + rank, prompts[rank // message.num_choices])
                        if message.outputs:
                            self.skip(message.request_id + rank, len(message.outputs[rank]) // 4)
                elif isinstance(message, AbortRequest):
                    self.seen["aborted"] += 1
                    aborted = self.running.pop(message.request_id, None)
                    if aborted is not None:
                        self.end(message.request_id, aborted, "abort")
                        self.extra.append(RequestOutput(message.request_id, [], FinishReason.ABORT))
            self.step()

    def lives(self, ask: AskRequests) -> bytes:
        """Running requests, the newest first, all of which decode."""
        told = [
            Life(
                number=number,
                id=self.names[number],
                state="decoding",
                arrived_at=time.time() - 1,
                total_ms=1000.0,
                first_token_ms=400.0,
                prompt_tokens=3,
                cached_tokens=0,
                output_tokens=answer.num_given,
                priority=0,
                num_preemptions=0,
                ahead=None,
                end=None,
                error_code="",
                phases=[
                    Phase("queued", 0.0, 300.0, [Wait("rows", 300.0, {"rows": 8})]),
                    Phase("prompt", 300.0, 400.0, [], [(400.0, 3)], {"tokens": 3, "cached_tokens": 0}),
                    Phase("decoding", 400.0),
                ],
            )
            for number, answer in sorted(self.running.items(), reverse=True)
        ]
        told = [one for one in told if ask.id in ("", one.id) and ask.number in (-1, one.number)]
        if ask.numbers:
            told = [one for one in (*told, *self.ended) if one.number in ask.numbers]
        if ask.state not in ("", "open", "running", "decoding"):
            told = []
        moment = Moment(
            number=1,
            kind="step",
            reason="prompt",
            at=time.time() - 2,
            until=time.time() - 1,
            count=2,
            worst_ms=90.0,
            usual_ms=5.0,
            figures={"prompt_tokens": 512.0, "decodes": 3.0},
        )
        answer = LivesAnswer(
            requests=told[ask.skip : ask.skip + ask.limit],
            num_open=len(self.running),
            num_ended=4,
            moments=[moment],
        )
        return msgspec.msgpack.encode(answer)

    def patience_ms(self) -> int:
        """How long to wait for a message."""
        return self.pace_ms if any(answer.token_ids for answer in self.running.values()) else 100

    def end(self, number: int, answer: Answer, reason: str, error_code: str = "") -> None:
        """Remember a request that ends now. Half of the time to its first token it was queued."""
        now_s = time.monotonic()
        first_s = answer.first_token_s
        times_s = [answer.added_s, ((first_s or now_s) + answer.added_s) / 2, first_s or now_s, now_s]
        added, row, first, end = [1e3 * (one - answer.arrived_s) for one in times_s]
        figures = {"tokens": answer.num_prompt_tokens, "cached_tokens": answer.num_cached_tokens}
        phases = [
            Phase("server", 0.0, added),
            Phase("queued", added, row, [Wait("rows", row - added, {"rows": 8})]),
            Phase("prompt", row, first, [], [(first, answer.num_prompt_tokens)], figures),
            *([Phase("decoding", first, end, [], [], {"tokens": answer.num_given})] if first_s else []),
        ]
        life = Life(
            number=number,
            id=self.names[number],
            state="ended",
            arrived_at=time.time() - now_s + answer.arrived_s,
            total_ms=end,
            first_token_ms=first if first_s else None,
            prompt_tokens=answer.num_prompt_tokens,
            cached_tokens=answer.num_cached_tokens,
            output_tokens=answer.num_given,
            priority=0,
            num_preemptions=0,
            ahead=None,
            end=reason,
            error_code=error_code,
            phases=phases,
        )
        self.ended.append(life)
        self.times.queued(int(1e3 * (row - added)))
        self.times.inferred(int(1e3 * (end - row)))
        if first_s:
            self.times.prefilled(int(1e3 * (first - row)))
            self.times.decoded(int(1e3 * (end - first)))

    def step(self) -> None:
        outputs, self.extra = self.extra, []
        for request_id, answer in list(self.running.items()):
            most = 10_000 if request_id in self.bursts else 1
            output = answer.step(request_id, self.eos, self.due(request_id, most))
            answer.first_token_s = answer.first_token_s or (time.monotonic() if output else 0.0)
            if output is None and answer.breaks:
                os.kill(os.getpid(), signal.SIGKILL)
            if output is None and answer.fails:
                error = (0, 500, "no_finite_logits", "all NaN")
                output = RequestOutput(request_id, [], FinishReason.ERROR, *error)
            if output is not None:
                outputs.append(output)
                if output.finish_reason is not None:
                    self.end(request_id, answer, output.finish_reason.value, output.error_code)
                    del self.running[request_id]
        if outputs:
            self.num_steps += 1
            self.socket.send_outputs(StepOutput(outputs))

    def due(self, request_id: int, most: int) -> int:
        """How many tokens a request gets in this step."""
        return most

    def skip(self, request_id: int, num_tokens: int) -> None:
        """A request goes on behind what an engine before this one has given."""
        self.seen["resumed"] = self.seen.get("resumed", 0) + 1
        answer = self.running[request_id]
        del answer.token_ids[:num_tokens]
        answer.num_given = num_tokens

    def go(self) -> None:
        for answer in self.running.values():
            if answer.waits:
                answer.token_ids += [*self.encode("!"), self.eos]

    def go_from_now_on(self) -> None:
        self.is_told_to_go = True
        self.go()

    def command(self, prompt_ids: list[int]) -> tuple[str, str]:
        """The word and the text of the prompt's last command."""
        found = COMMAND.findall(self.tokenizer.decode(prompt_ids, skip_special_tokens=False))
        return found[-1] if found else ("say", "ok")

    def add(self, request: AddRequest, request_id: int, prompt: bytes) -> None:
        """One of the requests of a call."""
        self.seen["added"] += 1
        self.seen["params"] = [request.params.temperature, request.params.top_p, request.params.top_k]
        self.seen["seed"] = request.params.seed
        self.seen["priority"] = request.priority
        self.seen["user"] = request.user
        self.seen["max_tokens"] = request.params.max_tokens
        grammar = request.params.grammar
        own = grammar and [grammar.kind, grammar.where, len(grammar.around)]
        self.seen["grammars"] = [*self.seen.get("grammars", [])[-1:], own]
        prompt_ids = np.frombuffer(prompt, "<i4").tolist()
        word, text = self.command(prompt_ids)
        if word == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        elif word == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif word == "fatal":
            self.socket.send(Fatal("out of memory; lower --memory-fraction"))
            self.close()
            sys.exit(1)
        elif word == "fault":
            if text:
                self.socket.send(Fatal(text, is_device_fault=True))
            self.close()
            sys.exit(DEVICE_FAULT_EXIT_CODE)
        elif word == "refuse":
            self.extra.append(
                RequestOutput(request_id, [], FinishReason.ERROR, 0, 422, "refused", "this engine will not")
            )
            return
        elif word == "report":
            self.seen["running"] = len(self.running)
            text = json.dumps(self.seen)
        elif word == "settings":
            text = json.dumps(self.settings)
        elif word == "go":
            self.go()
            text = "gone"
        num_cached = len(prompt_ids) // 2 if word == "cached" else 0
        end = [] if word in ("wait", "spoil", "break") else [self.eos]
        token_ids = self.encode(text) if word != "chars" else self.in_bytes(text)
        answer = Answer(request.params, [*token_ids, *end], num_cached)
        answer.num_prompt_tokens = len(prompt_ids)
        answer.arrived_s, answer.added_s = request.arrived_s, time.monotonic()
        answer.waits, answer.fails, answer.breaks = (word == one for one in ("wait", "spoil", "break"))
        if answer.waits and self.is_told_to_go:
            answer.token_ids += [*self.encode("!"), self.eos]
        self.running[request_id] = answer
        if word not in ("say", "chars", "wait", "spoil", "break"):
            self.bursts.add(request_id)
        if word == "ghost":
            output = answer.step(request_id, self.eos, 10_000)
            del self.running[request_id]
            ghost = [RequestOutput(number, [self.eos - 1]) for number in (request_id, 10**9)]
            again = RequestOutput(request_id, [], FinishReason.STOP)
            self.extra += [*([output] if output else []), *ghost, again]


def run_engine(kind: type[FakeEngine] = FakeEngine) -> None:
    watch = ParentWatch()
    settings = json.loads(watch.next_line())
    if not settings["ipc_dir"]:  # a spare process
        settings = json.loads(watch.next_line())
    folder = Path(settings["model_folder"])
    knobs = json.loads((folder / "fake.json").read_text())
    socket = EngineSocket(settings["ipc_dir"], settings.get("num_servers", 1))
    rows = settings["engine"]["max_running_requests"]
    start = knobs["start"] if knobs.get("only_with", rows) == rows else "ok"
    if start == "exit":
        sys.exit(3)
    if start in ("fatal", "refuse"):
        socket.send(Fatal("no GPU; use --device cpu", is_user_error=start == "refuse"))
        socket.close()
        sys.exit(1)
    socket.send(StartupStage("import", 12.0))
    if start == "hang":
        threading.Event().wait()
    engine = kind(socket, Tokenizer.from_folder(folder), socket.close)
    engine.pace_ms = knobs.get("pace_ms", 0)
    engine.settings = {name: settings["engine"][name] for name in ("max_running_requests", "tp")}
    engine.settings |= {"folder": folder.name, "gpus": settings.get("visible_gpus", "")}
    socket.send(StartupStage("weights", 34.0))
    device = knobs.get("device", "fake")
    signal.signal(signal.SIGUSR1, lambda *_: engine.go_from_now_on())
    socket.send(Ready(knobs["context"], 100, 16, 8, device, {"import": 12.0, "weights": 34.0}))
    engine.run()
    socket.close()


if __name__ == "__main__":
    run_engine()
