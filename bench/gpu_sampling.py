"""Rules and log probabilities on a GPU: do they do what they say in recorded steps, and what do they cost?

    python bench/gpu_sampling.py                     # SmolLM2 in bfloat16, under a minute
    python bench/gpu_sampling.py --model Qwen/Qwen3-8B --dummy-weights

Checks (exit code 1 if one fails): steps were recorded and not run uncaptured; plain requests get the same
tokens beside one with rules as among themselves; allowed tokens, bad words, biases and min_tokens hold; the
log probabilities of an output are those that the same text has as a prompt. Rows whose logits are NaN, in
prefill or in decode, or whose rules leave nothing, end with their error; their neighbours have the tokens
that they have beside rows that are aborted at that time, and afterwards the same prompts are well.
Then output tokens per second of one batch, plain and with each kind of extra, the recordings not counted.
"""

import argparse
import logging
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import torch

from minisgl import LLM, Completion, SamplingParams
from minisgl.engine.engine import Engine
from minisgl.ipc.messages import AddRequest
from triton_kernels.sample import sample
from triton_kernels.sample_reference import NO_TOKEN, sample_reference

NUM_TOKENS = 128
FIRST_ID = 1 << 30
"""Of requests that go to the engine past `LLM`, which would end a whole batch with the first error."""
SPOILED_AFTER = 9
"""Steps after which a row's keys become NaN."""


class Warnings(logging.Handler):
    """Keeps what the engine warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def prompts_of(count: int, length: int = 24) -> list[list[int]]:
    """Token ids that every vocabulary has."""
    return [[100 + (7 * row + 13 * place) % 800 for place in range(length)] for row in range(count)]


def difference(llm: LLM, prompt: list[int], reply: Completion) -> float:
    """Mean distance of an output's log probabilities from those of the same text as a prompt."""
    text = [*prompt, *reply.token_ids]
    (again,) = llm.generate([text], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert reply.logprobs is not None
    assert again.prompt_logprobs is not None
    behind = again.prompt_logprobs[len(prompt) - 1 :]
    pairs = zip(reply.logprobs, behind, strict=True)
    return sum(abs(ours.logprob - other.logprob) for ours, other in pairs) / len(behind)


def check(llm: LLM) -> dict[str, bool]:
    """What was promised -> whether it holds."""
    # A page of 16 tokens and two more: once the pages are cached, prompts are fed in steps of up to 16 tokens
    # however they come together, and for these a row's bits do not depend on the batch.
    prompts = prompts_of(8, 18)
    plain = [SamplingParams(seed=row, max_tokens=32, ignore_eos=True) for row in range(8)]
    llm.generate(prompts, plain)
    among_themselves = llm.generate(prompts, plain)
    ruled = SamplingParams(seed=7, max_tokens=32, ignore_eos=True, repetition_penalty=1.3, logprobs=5)
    beside_rules = llm.generate(prompts, [*plain[:7], ruled])
    allowed, bias, least = llm.generate(
        prompts[:3],
        [
            SamplingParams(
                seed=1,
                max_tokens=32,
                allowed_token_ids=(300, 301),
                bad_words_ids=((300, 301),),
                ignore_eos=True,
            ),
            SamplingParams(temperature=0.0, max_tokens=8, logit_bias={333: 100}, ignore_eos=True),
            SamplingParams(
                temperature=0.0, max_tokens=20, min_tokens=5, stop_token_ids=(333,), logit_bias={333: 100}
            ),
        ],
    )
    logprobs = llm.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=32, logprobs=3, ignore_eos=True)
    )
    distances = [difference(llm, *pair) for pair in zip(prompts, logprobs, strict=True)]
    print(f"log probabilities of outputs and of the same prompts: mean distance {max(distances):.3f} at most")
    return {
        "plain rows have the same tokens beside a row with rules": [r.token_ids for r in among_themselves[:7]]
        == [r.token_ids for r in beside_rules[:7]],
        "only allowed tokens, no bad word": set(allowed.token_ids) <= {300, 301}
        and (300, 301) not in set(pairwise(allowed.token_ids)),
        "a bias of 100 decides": set(bias.token_ids) == {333},
        "min_tokens keeps the stop token away": least.token_ids.index(333) == len(least.token_ids) - 1 == 5,
        "log probabilities agree": max(distances) < 0.1,
    }


class Run(NamedTuple):
    """What the requests of one batch got, by index."""

    tokens: dict[int, list[int]]
    errors: dict[int, str]
    ended_after: dict[int, int]  # steps of the engine


@torch.inference_mode()
def run(
    engine: Engine,
    prompts: list[list[int]],
    params: list[SamplingParams],
    aborts: Mapping[int, int] = {},
    spoiled: int | None = None,
) -> Run:
    """One batch, with nothing in the prefix cache.

    Args:
        aborts: after so many steps these requests are aborted.
        spoiled: this request's keys become NaN after `SPOILED_AFTER` steps.
    """
    engine.flush_prefix_cache()
    result = Run({index: [] for index in range(len(prompts))}, {}, {})
    for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add(AddRequest(FIRST_ID + index, np.asarray(prompt, "<i4").tobytes(), own))
    num_steps = 0
    while engine.has_work:
        outputs = engine.step()
        num_steps += 1
        for output in outputs:
            index = output.request_id - FIRST_ID
            result.tokens[index] += output.token_ids
            if output.finish_reason is not None:
                result.errors[index] = output.error_code
                result.ended_after[index] = num_steps
        for index, after in aborts.items():
            if after == num_steps:
                engine.abort(FIRST_ID + index)
        if spoiled is not None and num_steps == SPOILED_AFTER:
            lease = engine._scheduler._requests[FIRST_ID + spoiled].lease
            for attention in engine.runner.model.attention_layers():
                attention.k_cache[list(lease.page_ids)] = float("nan")
    return result


def check_no_tokens(engine: Engine) -> dict[str, bool]:
    """The same of rows that get no token, in plain steps and in those with rules and log probabilities."""
    results: dict[str, bool] = {}
    prompts = prompts_of(8, 18)
    bad = 2000  # no prompt has it
    with_bad = [
        [*prompt[:5], bad, *prompt[6:]] if row in (2, 5) else prompt for row, prompt in enumerate(prompts)
    ]
    embedding = engine.runner.model.embed_tokens.weight.data
    for kind, extras in (("plain", {}), ("special", {"logprobs": 2, "frequency_penalty": 0.4})):
        params = [
            SamplingParams(seed=row, temperature=float(row % 2), max_tokens=40, ignore_eos=True, **extras)
            for row in range(8)
        ]
        # The head may be the embedding: a NaN there counts as -inf, which leaves the argmax where it is.
        greedy = [msgspec.structs.replace(one, temperature=0.0) for one in params]
        before = engine.status(0).num_without_logits
        run(engine, with_bad, greedy)  # so that what the steps need is recorded
        engine.record_graphs()
        whole = run(engine, with_bad, greedy)
        kept = embedding[bad].clone()
        embedding[bad] = float("nan")
        failed = run(engine, with_bad, greedy)
        embedding[bad] = kept
        aborted = run(engine, with_bad, greedy, {row: failed.ended_after[row] for row in (2, 5)})
        others = [row for row in range(8) if row not in (2, 5) and bad not in aborted.tokens[row]]
        results[f"{kind}: NaN in prefill ends its rows only"] = [
            row for row, code in failed.errors.items() if code == "no_finite_logits"
        ] == [2, 5]
        results[f"{kind}: their neighbours have the same tokens"] = len(others) > 0 and all(
            failed.tokens[row] == aborted.tokens[row] for row in others
        )
        failed = run(engine, prompts, params, spoiled=4)
        aborted = run(engine, prompts, params, {4: failed.ended_after[4]})
        results[f"{kind}: NaN in decode ends its row only"] = {
            row for row, code in failed.errors.items() if code
        } == {4} and 0 < len(failed.tokens[4]) < 40
        results[f"{kind}: its neighbours have the same tokens"] = all(
            failed.tokens[row] == aborted.tokens[row] for row in range(8) if row != 4
        )
        results[f"{kind}: the same prompts are well again"] = (
            run(engine, with_bad, greedy).tokens == whole.tokens
        )
        results[f"{kind}: they were counted"] = engine.status(0).num_without_logits - before == 3
    nothing = SamplingParams(seed=1, max_tokens=9, allowed_token_ids=(300,), bad_words_ids=((300, 300),))
    banned = run(engine, prompts, [*params[:6], nothing, nothing])
    results["rules that leave nothing end their rows only"] = (
        [banned.errors[row] for row in range(8)] == [""] * 6 + ["no_token_left"] * 2
        and banned.tokens[6] == banned.tokens[7] == [300]
    )  # fmt: skip
    logits = torch.randn((9, engine.runner.model.vocab_size), device=embedding.device).to(embedding.dtype)
    logits[[1, 4]], logits[[2, 5, 8]] = float("nan"), float("-inf")
    logits[2, ::2] = float("nan")
    drawn = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1], dtype=torch.float32, device=logits.device)
    zeros = torch.zeros(9, dtype=torch.int32, device=logits.device)
    top_p = torch.tensor([1, 1, 1, 0.9, 0.9, 0.9, 1, 1, 1], dtype=torch.float32, device=logits.device)
    columns = (drawn, zeros, top_p, zeros.float(), zeros.long(), zeros)
    ids = sample(logits, *columns)
    results["the kernel and the reference agree"] = torch.equal(ids, sample_reference(logits, *columns))
    results["rows of NaN and -inf have no token"] = ids[[1, 2, 4, 5, 8]].tolist() == [NO_TOKEN] * 5
    return results


def tokens_per_s(llm: LLM, rows: int, params: SamplingParams) -> float:
    """Of one batch; once before, so that its steps are recorded."""
    prompts = prompts_of(rows)
    llm.generate(prompts, msgspec.structs.replace(params, max_tokens=4))
    began = time.perf_counter()
    replies = llm.generate(prompts, params)
    duration_s = time.perf_counter() - began
    return sum(len(reply.token_ids) for reply in replies) / duration_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--dummy-weights", action="store_true")
    arguments = parser.parse_args()
    warnings = Warnings()
    logging.getLogger("minisgl").addHandler(warnings)
    settings: dict[str, Any] = {"device": arguments.device, "dummy_weights": arguments.dummy_weights}
    with LLM(arguments.model, max_context_tokens=1024, max_running_requests=64, **settings) as llm:
        results = check(llm) | check_no_tokens(cast(Engine, llm._driver._engine))
        results["every step was recorded"] = not any("can't be recorded" in text for text in warnings.texts)
        for what, holds in results.items():
            print("ok    " if holds else "FAILED", what)
        base = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        kinds: dict[str, dict[str, Any]] = {
            "plain": {},
            "logprobs": {"logprobs": 5},
            "penalty": {"frequency_penalty": 0.5},
            "both": {"logprobs": 5, "frequency_penalty": 0.5},
        }
        print("output tokens/s  " + "".join(f"{kind:>12}" for kind in kinds))
        for rows in arguments.rows:
            rates = [
                tokens_per_s(llm, rows, msgspec.structs.replace(base, **extra)) for extra in kinds.values()
            ]
            print(f"{rows:>7} rows     " + "".join(f"{rate:12.0f}" for rate in rates))
    for text in warnings.texts:
        print(text)
    return int(not all(results.values()))


if __name__ == "__main__":
    sys.exit(main())
