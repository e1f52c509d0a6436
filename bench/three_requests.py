"""Writes docs/three-requests.md: the life of three requests, step by step.

    python bench/three_requests.py

The page is made by the real scheduler and page manager; only the model is the simulator's fake one.
tests/scheduler/test_three_requests.py finds a page that is stale.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minisgl.kvcache.manager import KVCacheManager
from minisgl.request import RequestOutput, SamplingParams
from minisgl.scheduler.plan import Chunk, PageUpdate, RowInit, StepPlan
from minisgl.scheduler.scheduler import Scheduler, SchedulerConfig
from minisgl.scheduler.simulator import FakeExecutor, FakeModel

PAGE = Path(__file__).resolve().parent.parent / "docs" / "three-requests.md"
PAGE_SIZE, NUM_PAGES, MAX_ROWS, STEP_TOKENS = 4, 9, 4, 8
VOCAB_SIZE = 1000
NO_EOS = VOCAB_SIZE - 1
"""The fake model's end-of-sequence id, which it never gives: outputs end by max_tokens."""


class Asked(NamedTuple):
    """A request of the example, and the step before which it arrives."""

    name: str
    at_step: int
    prompt: tuple[int, ...]
    max_tokens: int
    why: str


ASKED = (
    Asked(
        "A", 0, tuple(range(100, 110)), 8, "a prompt of 10 tokens, longer than a step, so it is fed in chunks"
    ),
    Asked(
        "B",
        2,
        (*range(100, 108), 208, 209),
        6,
        "starts with A's first 8 tokens, so two pages come from the cache",
    ),
    Asked("C", 3, tuple(range(300, 306)), 6, "the youngest request, which is preempted when pages run out"),
)


class Step(NamedTuple):
    """One round of plan, execute and apply, and what it left behind."""

    arrived: tuple[str, ...]
    plan: StepPlan
    token_ids: list[int]
    outputs: list[RequestOutput]
    row_names: dict[int, str]
    """Row -> the request that it belonged to while the step ran."""
    preempted: bool
    num_free_pages: int
    num_cached_pages: int


def steps() -> Iterator[Step]:
    """Run the example to its end. Each result is applied before the next step is planned."""
    cache = KVCacheManager(num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    config = SchedulerConfig(
        max_rows=MAX_ROWS,
        max_step_tokens=STEP_TOKENS,
        chunk_tokens=STEP_TOKENS,
        mixed_step_tokens=STEP_TOKENS,
        max_context_tokens=(NUM_PAGES - 1) * PAGE_SIZE,
        vocab_size=VOCAB_SIZE,
        output_reserve_tokens=1,
        eos_token_ids=(NO_EOS,),
    )
    scheduler = Scheduler(config, cache)
    model = FakeModel(vocab_size=VOCAB_SIZE - 1, eos_token_id=NO_EOS)
    executor = FakeExecutor(model, num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_rows=MAX_ROWS)
    tokens: dict[str, list[int]] = {}
    row_names: dict[int, str] = {}
    step, num_finished = 0, 0
    while num_finished < len(ASKED):
        arrived = [(i, asked) for i, asked in enumerate(ASKED) if asked.at_step == step]
        for request_id, asked in arrived:
            prompt = np.asarray(asked.prompt, dtype=np.int32)
            params = SamplingParams(max_tokens=asked.max_tokens, seed=request_id, ignore_eos=True)
            scheduler.add(request_id, prompt, params)
            tokens[asked.name] = list(asked.prompt)
        num_preemptions = scheduler.stats.num_preemptions
        plan = scheduler.plan()
        assert plan is not None, "the example never waits for a launched step"
        for chunk in plan.chunks:
            row_names[chunk.row] = fed_request(chunk, tokens)
        token_ids = executor.execute(plan)
        scheduler.apply(plan, token_ids)
        outputs = scheduler.take_outputs()
        for output in outputs:
            tokens[ASKED[output.request_id].name] += output.token_ids
            num_finished += output.finish_reason is not None
        cache.check_invariants()
        yield Step(
            tuple(asked.name for _, asked in arrived),
            plan,
            token_ids,
            outputs,
            dict(row_names),
            scheduler.stats.num_preemptions > num_preemptions,
            cache.num_free_pages,
            cache.num_cached_pages,
        )
        step += 1


def fed_request(chunk: Chunk, tokens: dict[str, list[int]]) -> str:
    """The request whose tokens the chunk feeds. No two open requests of the example have equal chunks."""
    fed, start = token_list(chunk.token_ids), chunk.num_computed_tokens
    (name,) = [name for name, known in tokens.items() if known[start : start + len(fed)] == fed]
    return name


def token_list(packed: bytes) -> list[int]:
    """Token ids of a chunk, from little-endian int32."""
    return np.frombuffer(packed, dtype="<i4").tolist()


def shown(plan: StepPlan) -> list[str]:
    """The plan as Python writes it: one line for each entry, without the fields that have their defaults."""
    lines = [f"StepPlan(step_id={plan.step_id},"]
    lines += entries("row_inits", [init_text(init) for init in plan.row_inits])
    lines += entries("page_updates", [update_text(update) for update in plan.page_updates])
    if plan.decode_rows:
        lines.append(f"    decode_rows={plan.decode_rows},")
    lines += entries("chunks", [chunk_text(chunk) for chunk in plan.chunks])
    lines.append(f"    sampled_rows={plan.sampled_rows},")
    if plan.decode_lengths:
        lines.append(f"    decode_lengths={plan.decode_lengths},")
    return [*lines, ")"]


def entries(field: str, texts: list[str]) -> list[str]:
    """The lines of a field that is a tuple; none if it is empty."""
    if len(texts) < 2:
        return [f"    {field}=({text},)," for text in texts]
    return [f"    {field}=(", *(f"        {text}," for text in texts), "    ),"]


def init_text(init: RowInit) -> str:
    return f"RowInit(row={init.row}, temperature={init.temperature}, seed={init.seed})"


def update_text(update: PageUpdate) -> str:
    page_ids = tuple(np.frombuffer(update.page_ids, "<i4").tolist())
    return f"PageUpdate(row={update.row}, first_index={update.first_index}, page_ids={page_ids})"


def chunk_text(chunk: Chunk) -> str:
    return (
        f"Chunk(row={chunk.row}, num_computed_tokens={chunk.num_computed_tokens}, "
        f"token_ids={token_list(chunk.token_ids)}, samples={chunk.samples})"
    )


def told(step: Step) -> list[str]:
    """The step in sentences that follow from its plan and its outputs."""
    plan, names = step.plan, step.row_names
    said = [f"Request {name} has arrived." for name in step.arrived]
    if step.preempted:
        said.append(
            "No page is free for the next decode, so the youngest running request is preempted: it gives "
            "its row and its pages back and waits. Its full pages stay in the tree until they are evicted."
        )
    new_rows = {init.row for init in plan.row_inits}
    if plan.decode_rows:
        said.append(f"{listed([names[row] for row in plan.decode_rows])} decode{single(plan.decode_rows)}.")
    for chunk in plan.chunks:
        name, start, end = (
            names[chunk.row],
            chunk.num_computed_tokens,
            chunk.num_computed_tokens + chunk.num_new_tokens,
        )
        if chunk.row in new_rows:
            cached = f"; its first {start} tokens are in the cache" if start else ""
            said.append(f"{name} gets row {chunk.row}{cached}.")
        fed = f"tokens {start} to {end - 1}" if end - start > 1 else f"token {start}"
        more = (
            "and samples a token"
            if chunk.samples
            else "and samples nothing, because more of the prompt follows"
        )
        said.append(f"{name} feeds {fed} {more}.")
    for output in step.outputs:
        if output.finish_reason is not None:
            name = ASKED[output.request_id].name
            said.append(
                f"{name} has all its tokens ({output.finish_reason.value}): its final output leaves, its row "
                "is free again, and its full pages stay in the tree."
            )
    return said


def listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def single(things: tuple[int, ...]) -> str:
    return "s" if len(things) == 1 else ""


def page() -> str:
    """The whole page, as Markdown."""
    lines = [
        "# Three requests, step by step",
        "",
        "This page is written by `bench/three_requests.py`; a test finds it stale. The scheduler and the "
        "page manager are the real ones. The model is the simulator's: its tokens are numbers that depend on "
        "everything before them.",
        "",
        f"The pool has {NUM_PAGES - 1} usable pages of {PAGE_SIZE} tokens (page 0 is the scratch page), and "
        f"a step feeds at most {STEP_TOKENS} tokens. Each result is applied before the next step is planned. "
        "With `--overlap`, the engine plans a step while the one before it runs; the plans look the same.",
        "",
        "| request | arrives before step | prompt | max_tokens | what it shows |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {asked.name} | {asked.at_step} | {', '.join(map(str, asked.prompt))} | {asked.max_tokens} "
        f"| {asked.why} |"
        for asked in ASKED
    ]
    lines += [
        "",
        "How to read a plan (`minisgl/scheduler/plan.py`):",
        "",
        "- `row_inits`: rows that a new request gets. Fields that are off are left out here.",
        "- `page_updates`: entries of the page tables that change. `first_index=2, page_ids=(5,)` means: "
        f"tokens {2 * PAGE_SIZE} to {3 * PAGE_SIZE - 1} of this row lie in page 5.",
        "- `decode_rows`: rows that feed their newest token. The device has it, so the plan need not.",
        "- `chunks`: parts of prompts. `num_computed_tokens` tokens of the row are in the pool already.",
        "- `sampled_rows`: rows that get a token. The result has one token for each, in this order.",
        "- `decode_lengths`: in a step with chunks, how many tokens each decode row has after it.",
    ]
    for step in steps():
        result = ", ".join(
            f"{token} for {step.row_names[row]}"
            for row, token in zip(step.plan.sampled_rows, step.token_ids, strict=True)
        )
        lines += [
            "",
            f"## Step {step.plan.step_id}",
            "",
            *(f"- {sentence}" for sentence in told(step)),
            "",
            "```text",
            *shown(step.plan),
            "```",
            "",
            f"Result: {result or 'no token'}. Pages afterwards: {step.num_free_pages} free, "
            f"{step.num_cached_pages} in the tree.",
        ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
