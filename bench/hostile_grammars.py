"""What do hostile grammars do to a server's other clients? The built-in model on the CPU.

    python bench/hostile_grammars.py --out bench/results/cpu/hostile-grammars.json

A stream without a grammar runs all the time. Phases alternate: the stream alone, another client with plain
chats, the same client with grammars that are slow to check or to compile, each with something of its own so
that none is known. Each grammar must be answered or refused within 2 s, the p99 of the stream's time between
tokens must stay under twice that beside plain chats, and afterwards the server holds nothing. Else the exit
code is 1. The median of the rounds' ratios counts, as other programs use this machine, too.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minisgl.benchmark.reports.report import format_table, make_report, write_report

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "server"))
from leaving_clients import held

LIMIT_S = 2.0
MAX_RATIO = 2.0
MAX_TOKENS = 4
ALONE_S = 8.0
FLAGS = ["--device", "cpu", "--cpu-threads", "1", "--port", "0", "--max-context-tokens", "1024"]


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def pattern(text: str) -> dict[str, Any]:
    return schema({"type": "string", "pattern": text})


def nested(depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = {"type": "object", "properties": {"a": leaf}, "required": ["a"]}
    return leaf


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def hostile(seed: int) -> dict[str, dict[str, Any]]:
    """The fields of a chat that make it hostile; `seed` keeps each grammar from being known already."""
    some = f"s{seed}"
    wide = {f"{some}_{index}": {"type": "string", "maxLength": 40} for index in range(400)}
    many_tools = [tool(f"t{index}", {"type": "object", "properties": wide}) for index in range(3)]
    few = {f"{some}_{index}": {"type": "string", "pattern": "^[a-z]{1,30}$"} for index in range(10)}
    bombs = {
        "(a*)* and worse": f"^{some}((a*)*|(a+)+|(a|a?)+)*b$",
        "(((a{9}){9}){9}){9}": f"^{some}(((a{{9}}){{9}}){{9}}){{9}}$",
        "counts of counts": f"^{some}(([a-z]{{1,40}}){{1,20}}x?){{1,20}}$",
        "(.*a.{12})": f"^{some}.*a.{{12}}$",
        "(.*a.{18})": f"^{some}.*a.{{18}}$",
        "many .*": "^" + some + "".join(f".*{letter}" for letter in "abcdefghijklmnop") + "$",
        "{1,200000}": f"^{some}[a-z]{{1,200000}}$",
        "classes of all letters": rf"^{some}(\p{{L}}|\p{{N}}|\p{{S}}){{1,500}}$",
    }
    joined = [{"type": "string", "pattern": f".*{some}{letter}.{{8}}"} for letter in "abcdefgh"]
    return {
        **{f"pattern {name}": pattern(text) for name, text in bombs.items()},
        "8 joined patterns": schema({"allOf": joined}),
        "9 joined patterns": schema({"allOf": [*joined, {"type": "string", "pattern": "x"}]}),
        "enum of 10,000": schema({"enum": [f"{some} {index * 7919}" for index in range(10_000)]}),
        "enum of 10,001": schema({"enum": [f"{some} {index}" for index in range(10_001)]}),
        "anyOf of 500 objects": schema({"anyOf": [nested(1, {"const": f"{some}{i}"}) for i in range(500)]}),
        "depth 20": schema(nested(20, {"const": some})),
        "depth 200": schema(nested(200, {"const": some})),
        '{"$ref": "#"}': schema({"$ref": "#", "title": some}),
        "a tree of itself": schema(
            {"type": "object", "properties": {some: {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
        ),
        "NUL in a pattern": pattern(f"^{some}\0+$"),
        "NUL in an enum": schema({"enum": [f"{some}\0"]}),
        "NUL in a grammar": {"structured_outputs": {"grammar": f'start: "{some}\0"'}},
        "1 MB": schema({"type": "object", "properties": {f"{some}{i}": {} for i in range(80_000)}}),
        "200 KB": schema(
            {"type": "object", "properties": {f"{some}_{i}": {"type": "string"} for i in range(4_900)},
             "required": [f"{some}_{i}" for i in range(4_900)]}
        ),
        "128 tools": {
            "tools": [tool(f"{some}_{index}", {"type": "object", "properties": few}) for index in range(128)],
            "tool_choice": "required",
        },
        "3 tools of 400 optional fields": {"tools": many_tools, "tool_choice": "required"},
        "rules in a chain": {
            "structured_outputs": {
                "grammar": "start: r0\n"
                + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(400))
                + f'r400: "{some}"?'
            }
        },
        "an ambiguous grammar": {
            "structured_outputs": {"grammar": f'start: e\ne: e e | e e e | "{some}" | ""'}
        },
    }  # fmt: skip


TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if tools %}{{ tools[0].function.name }}
{% endif %}<|im_start|>assistant
"""
"""It writes the first tool only: prompts of all would be what takes the time."""


@contextlib.contextmanager
def served(model: str, template: Path) -> Iterator[str]:
    """The server's URL. `template` is the file that the chat template is written to."""
    template.write_text(TEMPLATE)
    command = [sys.executable, "-m", "minisgl", "serve", "--model", model, *FLAGS]
    command += ["--chat-template", str(template), "--tool-parser", "hermes"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if line.startswith("curl "))
        yield line.split("/v1/")[0].removeprefix("curl ")
    finally:
        process.terminate()
        process.wait(60)


def ask(url: str, fields: dict[str, Any]) -> tuple[float, int, str]:
    """Seconds, status and error code of one chat."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": MAX_TOKENS, **fields}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
            status, code = answer.status, ""
    except urllib.error.HTTPError as error:
        status, code = error.code, json.loads(error.read())["error"]["code"]
    return time.perf_counter() - began, status, code


class Neighbour:
    """A client whose stream runs all the time; `times_ms` has the times between its tokens."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.times_ms: list[float] = []

    async def run(self) -> None:
        while True:
            body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True, "stream": True})
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            writer.write(f"{head}Connection: close\r\n\r\n{body}".encode())
            before = 0.0
            try:
                while line := await reader.readline():
                    if line.startswith(b"data: {"):
                        now = time.perf_counter()
                        if before:
                            self.times_ms.append(1e3 * (now - before))
                        before = now
            finally:
                writer.close()

    def take(self) -> list[float]:
        """The times since the last call."""
        times, self.times_ms = self.times_ms, []
        return times


def p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98] if len(times) > 1 else float("nan")


async def measure(url: str, rounds: int) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """The rounds, and what each input got in them."""
    neighbour = Neighbour(int(url.rsplit(":", 1)[1]))
    running = asyncio.create_task(neighbour.run())
    answers: dict[str, list[Any]] = collections.defaultdict(list)
    table = []
    try:
        await asyncio.sleep(2)
        neighbour.take()
        for number in range(rounds):
            row: dict[str, Any] = {"round": number}
            inputs = hostile(number)
            plain: dict[str, dict[str, Any]] = {name: {} for name in inputs}
            for phase, chats in (("alone", {}), ("plain", plain), ("hostile", inputs)):
                if not chats:
                    await asyncio.sleep(ALONE_S)
                # The client's next chat follows the answer to its last one.
                for name, fields in chats.items():
                    answer = await asyncio.to_thread(ask, url, fields)
                    answers[name if phase == "hostile" else "a plain chat"].append(answer)
                times = neighbour.take()
                row |= {f"{phase}_tokens": len(times), f"{phase}_p50_ms": round(statistics.median(times), 1)}
                row |= {f"{phase}_p99_ms": round(p99(times), 1), f"{phase}_max_ms": round(max(times), 1)}
            row["ratio"] = round(row["hostile_p99_ms"] / row["plain_p99_ms"], 2)
            row["ratio_to_alone"] = round(row["hostile_p99_ms"] / row["alone_p99_ms"], 2)
            table.append(row)
            print(row, flush=True)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return table, answers


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, served(arguments.model, Path(name) / "chat.jinja") as url:
        ask(url, schema({"type": "integer"}))  # builds the grammars' tokenizer
        rounds, answers = asyncio.run(measure(url, arguments.rounds))
        deadline = time.monotonic() + 30
        while any((left := held(url)).values()) and time.monotonic() < deadline:
            time.sleep(0.1)
    inputs = [
        {
            "input": name,
            "median_s": round(statistics.median(seconds for seconds, _, _ in found), 3),
            "slowest_s": round(max(seconds for seconds, _, _ in found), 3),
            "answers": ", ".join(sorted({f"{status} {code}".strip() for _, status, code in found})),
        }
        for name, found in answers.items()
    ]
    ratio = statistics.median(row["ratio"] for row in rounds)
    to_alone = statistics.median(row["ratio_to_alone"] for row in rounds)
    slow = [row["input"] for row in inputs if row["slowest_s"] > LIMIT_S]
    broken = [row["input"] for row in inputs if not set(row["answers"].split(", ")) <= TAKEN]
    for rows in (inputs, rounds, [left]):
        print(format_table(rows))
    print(
        f"p99 between tokens: {ratio} of that beside plain chats, {to_alone} of that alone; "
        f"slow: {slow}; wrong: {broken}"
    )
    if arguments.out is not None:
        report = make_report(
            "hostile-grammars",
            arguments={"model": arguments.model, "rounds": arguments.rounds},
            metrics={
                "median_p99_ratio": ratio,
                "median_p99_ratio_to_alone": to_alone,
                "slowest_answer_s": max(row["slowest_s"] for row in inputs),
                "inputs_slower_than_2_s": len(slow),
                "held_afterwards": sum(left.values()),
            },
            tables={"inputs": inputs, "rounds": rounds, "held_afterwards": [left]},
            command=" ".join(["hostile_grammars.py", *sys.argv[1:]]),
        )
        write_report(arguments.out, report)
    return int(bool(slow or broken or any(left.values()) or ratio > MAX_RATIO))


TAKEN = {
    "200",
    *(f"400 {code}" for code in ("unsupported_schema", "unsupported_grammar", "schema_too_large")),
    *(f"400 {code}" for code in ("grammar_too_large", "invalid_schema", "invalid_grammar", "invalid_regex")),
    *("400 context_length_exceeded", "400 grammar_failed"),
}
"""Answers and refusals; anything else, such as a 500, is a fault."""


if __name__ == "__main__":
    sys.exit(main())
