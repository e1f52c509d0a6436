"""Rules and log probabilities on a GPU: do they do what they say in recorded steps, and what do they cost?

    python bench/gpu_sampling.py                     # SmolLM2 in bfloat16, under a minute
    python bench/gpu_sampling.py --model Qwen/Qwen3-8B --dummy-weights

Checks (exit code 1 if one fails): steps were recorded and not run uncaptured; plain requests get the same
tokens beside one with rules as among themselves; allowed tokens, bad words, biases and min_tokens hold; the
log probabilities of an output are those that the same text has as a prompt. Then output tokens per second of
one batch, plain and with each kind of extra, the recordings not counted.
"""

import argparse
import logging
import sys
import time
from itertools import pairwise
from typing import Any

import msgspec

from minisgl import LLM, Completion, SamplingParams

NUM_TOKENS = 128


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
        results = check(llm)
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
