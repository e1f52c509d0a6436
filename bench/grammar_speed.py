"""What do grammars cost an engine? Tokens per second of chats with JSON schemas, beside the same without.

    python bench/grammar_speed.py --model FOLDER --out bench/results/h200/grammar-speed.json

FOLDER has a config.json and the tokenizer.json of its vocabulary; weights are random. All chats decode
together for a fixed number of tokens, with a share of them bound to a schema that can't end sooner. The
shares alternate, and each figure is the median of its rounds. Then the time to the first token of one chat
with a schema of 50 fields that was never seen, beside one without, and the time that all masks take.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.benchmark.reports.report import make_report, write_report
from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.ipc.messages import AddRequest
from minisgl.request import SamplingParams

SHARES = (0.0, 0.2, 1.0)


def endless_schema(number: int) -> dict[str, Any]:
    """A schema that no short answer fits; another for each number."""
    record = {
        "type": "object",
        "properties": {
            f"name{number}": {"type": "string", "maxLength": 40},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 4},
        },
        "required": [f"name{number}", "age", "tags"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": record, "minItems": 400}


def wide_schema(number: int) -> dict[str, Any]:
    """50 fields; another schema for each number."""
    fields = {f"field_{number}_{index}": {"type": ["string", "null"], "maxLength": 50} for index in range(50)}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def chat(request_id: int, num_prompt_tokens: int, vocab_size: int, **params: Any) -> AddRequest:
    source = np.random.default_rng(request_id)
    prompt = source.integers(0, vocab_size, num_prompt_tokens).astype("<i4")
    return AddRequest(
        request_id, prompt.tobytes(), SamplingParams(temperature=1.0, seed=request_id, **params)
    )


class Bench:
    """One engine, and ids for its requests."""

    def __init__(self, engine: Engine, num_chats: int, num_prompt_tokens: int, num_tokens: int) -> None:
        self.engine = engine
        self.num_chats = num_chats
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = num_tokens
        self.vocab_size = engine.runner.model.vocab_size
        self.next_id = 0

    def add(self, **params: Any) -> int:
        self.next_id += 1
        self.engine.add(chat(self.next_id, self.num_prompt_tokens, self.vocab_size, **params))
        return self.next_id

    def tokens_per_s(self, share: float) -> float:
        """Of all chats together, from the step after the last first token on."""
        num_bound = round(share * self.num_chats)
        for index in range(self.num_chats):
            bound = {"json_schema": endless_schema(index % 16)} if index < num_bound else {"ignore_eos": True}
            self.add(max_tokens=self.num_tokens, **bound)
        begun: set[int] = set()
        while len(begun) < self.num_chats:
            begun.update(one.request_id for one in self.engine.step() if one.token_ids)
        began, num_tokens = time.perf_counter(), 0
        while self.engine.has_work:
            for one in self.engine.step():
                assert not one.error_message, one.error_message
                num_tokens += len(one.token_ids)
        return num_tokens / (time.perf_counter() - began)

    def first_token_ms(self, **params: Any) -> float:
        """Of one chat alone."""
        began = time.perf_counter()
        request_id = self.add(max_tokens=2, **params)
        first_ms = 0.0
        while self.engine.has_work:
            for one in self.engine.step():
                if one.request_id == request_id and one.token_ids and not first_ms:
                    first_ms = 1e3 * (time.perf_counter() - began)
        return first_ms

    def masks_ms(self) -> list[float]:
        """How long the masks of all rows take, for each step of a full batch."""
        times: list[float] = []
        fill = self.engine._grammars.fill_masks

        def timed(rows: Any, masks: np.ndarray) -> Any:
            began = time.perf_counter()
            failed = fill(rows, masks)
            if len(rows) == self.num_chats:
                times.append(1e3 * (time.perf_counter() - began))
            return failed

        self.engine._grammars.fill_masks = timed
        try:
            self.tokens_per_s(1.0)
        finally:
            self.engine._grammars.fill_masks = fill
        return times


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--chats", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    length = arguments.prompt_tokens + arguments.tokens + 16
    config = EngineConfig(
        model=str(arguments.model),
        dummy_weights=True,
        device=arguments.device,
        max_context_tokens=length,
        max_running_requests=arguments.chats,
        prefix_cache=False,
    )
    engine = build_engine(config, arguments.model, lambda name, duration_ms: None)
    bench = Bench(engine, arguments.chats, arguments.prompt_tokens, arguments.tokens)
    engine.prepare_grammars()
    for share in SHARES:  # compiles the schemas, and asks for the graphs
        bench.tokens_per_s(share)
    engine.record_graphs()
    speeds: dict[float, list[float]] = {share: [] for share in SHARES}
    for _ in range(arguments.rounds):
        for share in SHARES:
            speeds[share].append(bench.tokens_per_s(share))
    plain = [bench.first_token_ms(ignore_eos=True) for _ in range(9)]
    fresh = [bench.first_token_ms(json_schema=wide_schema(index)) for index in range(9)]
    masks = bench.masks_ms()
    engine.close()
    medians = {share: statistics.median(found) for share, found in speeds.items()}
    rows = [
        {
            "chats with a schema": f"{share:.0%}",
            "tokens/s": round(medians[share]),
            "of without": round(medians[share] / medians[0.0], 3),
        }
        for share in SHARES
    ]
    metrics = {
        "first token, plain, p50 ms": statistics.median(plain),
        "first token, fresh schema of 50 fields, p50 ms": statistics.median(fresh),
        "masks of all rows, p50 ms": statistics.median(masks),
        "masks of all rows, most ms": max(masks),
    }
    for row in rows:
        print(row)
    print({name: round(value, 3) for name, value in metrics.items()})
    if arguments.out is not None:
        settings = {
            "chats": arguments.chats,
            "prompt tokens": arguments.prompt_tokens,
            "tokens": arguments.tokens,
        }
        report = make_report(
            "grammar-speed",
            arguments=settings,
            metrics=metrics,
            tables={"throughput": rows},
            command=" ".join(["grammar_speed.py", *sys.argv[1:]]),
        )
        write_report(arguments.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
