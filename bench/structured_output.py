"""Does every answer follow its schema, and does a plain request notice? A real model on the CPU.

    python bench/structured_output.py --out bench/results/cpu/structured-output.json

Random schemas, each asked for several times at temperature 1, among plain requests, with aborts and a pool so
small that requests are preempted. An answer that ends by itself must be valid by `jsonschema`, which knows
nothing of our grammars. One that max_tokens cuts is continued with the shortest allowed tokens and must then
be valid. A plain request must get the tokens that it gets alone, unless changing transformers' logits by at
most 2e-4 yields the other token, too: then it is a tie. Exit code 1 where one of these fails.
"""

import argparse
import collections
import json
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from minisgl.benchmark.reports.report import make_report, write_report
from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.errors import RequestError
from minisgl.grammar.compiler import GrammarCompiler
from minisgl.grammar.matcher import Grammar
from minisgl.grammar.spec import json_schema_spec
from minisgl.ipc.messages import AddRequest
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.request import FinishReason, RequestOutput, SamplingParams
from minisgl.text.tokenizer import Tokenizer
from minisgl.weights.sources import resolve_model_folder
from triton_kernels.sample_reference import sample_reference

MAX_TOKENS = 48
TIE = 4e-4
NUM_TIE_TRIALS = 200
MAX_CONTINUED_TOKENS = 2000
WORDS = ("red", "green", "blue", "north", "south", "small", "large", "a b", "ä", '"quoted"')


class Asked(NamedTuple):
    request: AddRequest
    schema: dict[str, Any] | None
    aborted_at: int | None
    """Tokens after which the client leaves."""


class Answer:
    """What one request got."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.end: RequestOutput | None = None


def random_schema(source: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema with types, bounds, enums, patterns, arrays, objects and choices."""
    leaves = [
        lambda: {"type": "integer", "minimum": source.randrange(-50, 0), "maximum": source.randrange(1, 500)},
        lambda: {"type": "number"},
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"type": "string", "maxLength": source.randrange(1, 20)},
        lambda: {"type": "string", "pattern": source.choice(("^[a-z]{2,6}$", "^\\d{3}-\\d{2}$", "^x"))},
        lambda: {"enum": source.sample(WORDS, source.randrange(1, len(WORDS)))},
        lambda: {"const": source.choice([1, "one", None, [1, 2], {"a": 1}])},
        lambda: {"type": "string", "format": source.choice(("date", "uuid", "ipv4"))},
    ]
    if depth >= 3 or (depth and source.random() < 0.6):
        return source.choice(leaves)()
    kind = source.random()
    if kind < 0.2:
        return {
            "type": "array",
            "items": random_schema(source, depth + 1),
            "maxItems": source.randrange(1, 5),
        }
    if kind < 0.3:
        return {"anyOf": [random_schema(source, depth + 1) for _ in range(2)]}
    names = source.sample(("name", "size", "tags", "when", "näme", "a b"), source.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(source, depth + 1) for name in names},
        "required": [name for name in names if source.random() < 0.7],
        "additionalProperties": False,
    }


def random_requests(
    source: random.Random, num_requests: int, num_schemas: int, tokenizer: Tokenizer
) -> list[Asked]:
    schemas = [random_schema(source) for _ in range(num_schemas)]
    asked = []
    for request_id in range(num_requests):
        is_plain = source.random() < 0.25
        schema = None if is_plain else schemas[request_id % num_schemas]
        text = "<|im_start|>user\nWrite something about number %d as JSON.<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer.encode(text % source.randrange(40), False, max_tokens=1000)
        params = SamplingParams(
            temperature=1.0,
            seed=source.randrange(2**62),
            max_tokens=source.randrange(4, MAX_TOKENS),
            json_schema=schema,
            repetition_penalty=1.2 if schema is not None and source.random() < 0.2 else 1.0,
            logprobs=2 if source.random() < 0.2 else None,
        )
        aborted_at = source.randrange(12) if source.random() < 0.1 else None
        request = AddRequest(request_id, np.asarray(prompt, "<i4").tobytes(), params)
        asked.append(Asked(request, schema, aborted_at))
    return asked


def serve(engine: Engine, asked: list[Asked], num_open: int) -> list[Answer]:
    """All of them, `num_open` at a time."""
    answers, waiting, open_ids = [Answer() for _ in asked], collections.deque(asked), set[int]()
    while waiting or engine.has_work:
        while waiting and len(open_ids) < num_open:
            one = waiting.popleft()
            engine.add(one.request)
            open_ids.add(one.request.request_id)
        for output in engine.step():
            answer, one = answers[output.request_id], asked[output.request_id]
            answer.token_ids += output.token_ids
            if output.finish_reason is not None:
                answer.end = output
                open_ids.discard(output.request_id)
            elif one.aborted_at is not None and len(answer.token_ids) > one.aborted_at:
                engine.abort(output.request_id)
    return answers


def continued(grammar: Grammar, token_ids: list[int], eos: int, lengths: np.ndarray) -> list[int]:
    """The tokens, and behind them the shortest that are allowed, up to the end."""
    matcher = grammar.matcher()
    matcher.advance(token_ids)
    mask = np.zeros(grammar.num_words, np.int32)
    whole = list(token_ids)
    source = random.Random(0)
    for _ in range(MAX_CONTINUED_TOKENS):
        matcher.fill_mask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(lengths)])
        if eos in allowed:
            return whole
        # Closing a string, an array or an object is short, too; chance avoids going round in circles.
        shortest = allowed[lengths[allowed] == lengths[allowed].min()]
        closing = [one for one in shortest.tolist() if one in CLOSING]
        token = source.choice(closing or shortest.tolist())
        matcher.advance([token])
        whole.append(token)
    raise ValueError("no end in sight")


CLOSING: set[int] = set()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--schemas", type=int, default=100)
    parser.add_argument("--open", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = resolve_model_folder(arguments.model)
    tokenizer = Tokenizer.from_folder(folder)
    CLOSING.update(tokenizer.encode(one, False, max_tokens=9)[0] for one in ('"', "}", "]"))
    source = random.Random(arguments.seed)
    asked = random_requests(source, arguments.requests, arguments.schemas, tokenizer)
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "page_size": 4,
        "max_context_tokens": 128,
    }
    engine = build_engine(
        EngineConfig(
            model=str(folder), num_pages=100, max_running_requests=16, output_reserve_tokens=0, **settings
        ),
        folder,
        lambda name, duration_ms: None,
    )
    answers = serve(engine, asked, arguments.open)
    status = engine.status(0)
    engine.close()
    alone = build_engine(
        EngineConfig(
            model=str(folder), num_pages=200, max_running_requests=4, prefix_cache=False, **settings
        ),
        folder,
        lambda name, duration_ms: None,
    )
    vocab_size, eos_ids = alone.runner.model.vocab_size, read_model_config(folder).eos_token_ids
    compiler = GrammarCompiler((folder / "tokenizer.json").read_text(), vocab_size, eos_ids)
    lengths = np.array([len(tokenizer.token_bytes(one)) or 99 for one in range(vocab_size)])
    counts: collections.Counter[str] = collections.Counter()
    problems: list[dict[str, Any]] = []
    for one, answer in zip(asked, answers, strict=True):
        assert answer.end is not None
        reason = answer.end.finish_reason
        assert reason is not None
        counts[f"{'plain' if one.schema is None else 'schema'} {reason.value}"] += 1
        problem = ""
        if reason is FinishReason.ERROR:
            problem = f"{answer.end.error_code}: {answer.end.error_message}"
        elif one.schema is not None:
            ids = answer.token_ids[:-1] if reason is FinishReason.STOP else answer.token_ids
            try:
                if reason is not FinishReason.STOP:
                    spec = json_schema_spec(one.schema, "schema")
                    ids = continued(compiler.compile(spec).result(), ids, eos_ids[0], lengths)
                text = tokenizer.decode(ids, skip_special_tokens=False)
                jsonschema.validate(json.loads(text), one.schema, format_checker=jsonschema.FormatChecker())
            except (ValueError, RequestError, jsonschema.ValidationError) as error:
                problem = f"{type(error).__name__}: {str(error)[:200]}"
        else:
            (expected,) = serve(alone, [one._replace(request=renumbered(one.request), aborted_at=None)], 1)
            place = first_difference(answer.token_ids, expected.token_ids)
            if place is not None and is_tie(folder, one.request, answer.token_ids[: place + 1]):
                counts["ties"] += 1
            elif place is not None:
                problem = f"{answer.token_ids} is not {expected.token_ids}"
        if problem:
            problems.append(
                {"request": one.request.request_id, "schema": json.dumps(one.schema), "problem": problem}
            )
    print(dict(counts), f"{status.num_preemptions} preemptions, {len(problems)} problems")
    for problem in problems[:10]:
        print(problem)
    if arguments.out is not None:
        metrics = {f"{name} requests": number for name, number in sorted(counts.items())}
        metrics |= {"preemptions": status.num_preemptions, "problems": len(problems)}
        report = make_report(
            "structured-output",
            arguments={"requests": arguments.requests, "schemas": arguments.schemas},
            metrics={name: float(value) for name, value in metrics.items()},
            tables={"problems": problems},
            command=" ".join(["structured_output.py", *sys.argv[1:]]),
        )
        write_report(arguments.out, report)
    return 1 if problems else 0


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    pairs = zip(ours, theirs, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), None)


def is_tie(folder: Path, request: AddRequest, token_ids: list[int]) -> bool:
    """Whether transformers' logits, changed by at most TIE / 2, yield the last of these tokens."""
    *before, sampled = token_ids
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = [*np.frombuffer(request.prompt_ids, "<i4").tolist(), *before]
    with torch.inference_mode():
        logits = reference(torch.tensor([ids])).logits[0, -1]
    noise = torch.empty(NUM_TIE_TRIALS, len(logits))
    noise.uniform_(-TIE / 2, TIE / 2, generator=torch.Generator().manual_seed(0))
    noise[::2] = noise[::2].sign() * TIE / 2
    params, ones = request.params, torch.ones(NUM_TIE_TRIALS)
    drawn = sample_reference(
        logits + noise,
        params.temperature * ones,
        torch.zeros(NUM_TIE_TRIALS, dtype=torch.int32),
        params.top_p * ones,
        params.min_p * ones,
        torch.full((NUM_TIE_TRIALS,), params.seed or 0, dtype=torch.int64),
        torch.full((NUM_TIE_TRIALS,), len(ids), dtype=torch.int32),
    )
    return sampled in drawn.tolist()


def renumbered(request: AddRequest) -> AddRequest:
    return AddRequest(0, request.prompt_ids, request.params)


if __name__ == "__main__":
    sys.exit(main())
