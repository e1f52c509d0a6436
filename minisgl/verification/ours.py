"""What the engine computes: greedy tokens as it serves them, and a plain forward pass with hidden states.

Promise: tokens come from the engine's own steps (graphs, overlap, prefix cache), the traces from the same
model and kernels in one uncaptured prefill. One rank.

T tokens, K kept positions, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.interface import AttentionInputs
from minisgl.engine.engine import Engine
from minisgl.engine.step.inputs import build_prefill
from minisgl.engine.step.step_inputs import prefill_inputs
from minisgl.errors import MinisglError
from minisgl.ipc.messages import AddRequest
from minisgl.layers.moe import MoeMLP
from minisgl.request import SamplingParams
from minisgl.scheduler.plan import Chunk, PageUpdate, RowInit, StepPlan
from minisgl.verification.traces import (
    ATTENTION,
    ATTENTION_INPUT,
    EMBEDDING,
    LOGITS,
    MLP,
    MLP_INPUT,
    OUTPUT,
    Place,
    Recorder,
    Trace,
)


def generate(
    engine: Engine,
    prompts: Sequence[list[int]],
    max_tokens: int,
    steps_between: int = 0,
    *,
    ignore_eos: bool = False,
) -> list[list[int]]:
    """Greedy tokens of all prompts, which come with so many steps between them.

    A prompt whose logits were not finite, or that the engine refused, has fewer than `max_tokens`.

    Args:
        ignore_eos: answers go on behind an end-of-sequence token.
    """
    got: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)

    def step() -> None:
        for output in engine.step():
            got[output.request_id] += output.token_ids

    for index, prompt in enumerate(prompts):
        engine.add(AddRequest(index, np.asarray(prompt, dtype="<i4").tobytes(), params))
        for _ in range(steps_between):
            step()
    while engine.has_work:
        step()
    return list(got.values())


@torch.inference_mode()
def our_logits(engine: Engine, tokens: list[int]) -> Tensor:
    """[T, V] of the engine's own model, in its pool, as one prefill into row 0. Nothing else may run."""
    return engine.runner.model.head(*_run_blocks(engine, tokens))


@torch.inference_mode()
def our_trace(engine: Engine, tokens: list[int], kept: np.ndarray) -> Trace:
    """Like `our_logits`, with what every layer computed, at the positions `kept`, int64 [K]."""
    model = engine.runner.model
    layers: Any = model.layers
    with Recorder(kept) as recorder:
        recorder.watch_input(layers[0], Place(0, EMBEDDING))
        for index, layer in enumerate(layers):
            attention = getattr(layer, "self_attn", None) or layer.linear_attn
            recorder.watch_input(attention, Place(index, ATTENTION_INPUT))
            recorder.watch_output(attention, Place(index, ATTENTION))
            if not isinstance(layer.mlp, MoeMLP):  # whose `forward_add` includes the norm before it
                recorder.watch_input(layer.mlp, Place(index, MLP_INPUT))
                recorder.watch_output(layer.mlp, Place(index, MLP))
            recorder.watch_output(layer, Place(index, OUTPUT), lambda out: out[0].float() + out[1].float())
        x, residual = _run_blocks(engine, tokens)
    rows = torch.from_numpy(kept).to(x.device)
    logits = model.head(x[rows], residual[rows])
    return {**recorder.trace, Place(len(layers), LOGITS): logits.cpu()}


def free_memory(engine: Engine) -> None:
    """Close the engine and free its weights and pool, even if compiled code refers to them."""
    model = engine.runner.model
    engine.close()
    if engine.config.device == "cuda":
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.untyped_storage().resize_(0)


def _run_blocks(engine: Engine, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """x and residual, [T, M]; pages 1, 2, ... become row 0's, so cached prefixes are dropped before."""
    if engine.has_work:
        raise MinisglError("the engine is busy; logits are computed while nothing runs")
    engine.flush_prefix_cache()
    runner, page_size = engine.runner, engine.config.page_size
    num_pages = -(-len(tokens) // page_size)
    smallest = min(len(attention.k_cache) for attention in runner.model.attention_layers()) - 1
    if num_pages > smallest:
        raise MinisglError(
            f"logits of {len(tokens)} tokens need {num_pages} pages in every layer, and one has {smallest}; "
            "raise --num-pages, or use --keep-window-pages"
        )
    page_ids = np.arange(1, num_pages + 1, dtype="<i4").tobytes()
    plan = StepPlan(
        step_id=0,
        row_inits=(RowInit(0, 0.0, 0, 1.0, 0.0, 0),),
        page_updates=tuple(PageUpdate(0, 0, page_ids, group) for group in range(runner.pages.num_groups)),
        decode_rows=(),
        chunks=(),
        sampled_rows=(),
    )
    runner.collect(runner.launch(plan))
    chunks = (Chunk(0, 0, np.asarray(tokens, dtype="<i4").tobytes(), True),)
    runner.planner.plan_prefill(chunks)
    batch = build_prefill(chunks, runner.pages, runner.stager)
    inputs: AttentionInputs = prefill_inputs(runner.model, runner.rows, batch)
    return runner.model.run_blocks(batch.token_ids, batch.positions, inputs)
