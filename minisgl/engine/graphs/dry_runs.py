"""Dry runs: steps on padding before the engine serves, to measure memory and to compile prefill's kernels.

Promise: nothing real is touched: all rows are the padding row, all new tokens go to no slot.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from minisgl.config import ResolvedConfig
from minisgl.engine.attention_plans import AttentionPlans
from minisgl.engine.buckets import buckets_of, max_joined
from minisgl.engine.inputs import PrefillBatch, Stager
from minisgl.engine.rows import Rows
from minisgl.engine.side_by_side import compiled_side_by_side
from minisgl.engine.steps import DecodeStep, prefill_step, sample_and_advance
from minisgl.models.decoder import Decoder, RunBlock, call_block
from triton_kernels.decode_config import FEW_ROWS
from triton_kernels.launch import align_down, align_up


class Peaks(NamedTuple):
    """Memory of the largest steps beyond weights, pool and tables, in bytes."""

    prefill_bytes: int
    decode_bytes: int
    recorded_prefill_bytes: int  # of the largest that has a graph, which keeps its memory


def measure_peaks(
    config: ResolvedConfig,
    model: Decoder,
    rows: Rows,
    plans: AttentionPlans,
    device: torch.device,
    dtype: torch.dtype,
) -> Peaks:
    """Measured on CUDA with as many rows as there can be.

    Few rows decode, too: some of their kernels are others, which are compiled so before the engine serves.
    """
    model.allocate_kv(1, config.page_size, dtype, device)
    largest, *recorded = largest_prefills(config)
    decode = DecodeStep(model, rows)
    if not config.kernel:  # a replacement of one may take indices from another
        compile_ahead(config, decode, plans, device)
    batch = padding_batch(largest, rows, device)
    plans.padding_prefill(largest.rows, largest.row_tokens)
    row_ids = torch.full((rows.max_rows,), rows.max_rows, dtype=torch.int32, device=device)
    for count in decode_sizes(config):
        plans.decode((), count)
        decode(row_ids[:count])
    recorded_bytes = 0
    for size in recorded:
        padding = padding_batch(size, rows, device)
        recorded_bytes = peak_bytes(lambda padding=padding: prefill_step(model, rows, padding), device)
    return Peaks(
        peak_bytes(lambda: prefill_step(model, rows, batch), device),
        peak_bytes(lambda: decode(row_ids), device),
        recorded_bytes,
    )


def compile_ahead(
    config: ResolvedConfig, decode: DecodeStep, plans: AttentionPlans, device: torch.device
) -> None:
    """Compile the kernels of all dry runs side by side. No index comes from a kernel, as none runs.

    Several ranks must do it at the same time: NCCL adds up as ever.
    """
    model, rows = decode.model, decode.rows
    sizes = largest_prefills(config) + warm_up_sizes(config)
    run_block = first_of_each_kind(model)
    with compiled_side_by_side(max(1, (os.cpu_count() or 1) // config.ranks_per_node)):
        for size in sizes:
            plans.padding_prefill(size.rows, size.row_tokens)
            prefill_step(model, rows, padding_batch(size, rows, device), run_block)
        for count in decode_sizes(config):
            plans.decode((), count)
            row_ids = torch.full((count,), rows.max_rows, dtype=torch.int32, device=device)
            zeros = torch.zeros_like(row_ids)
            state = rows.read(row_ids)._replace(context_len=zeros, slot_mapping=zeros - 1)
            logits = model(zeros, zeros, decode.inputs(row_ids, state), run_block=run_block)
            sample_and_advance(rows, row_ids, state, logits, zeros)


def decode_sizes(config: ResolvedConfig) -> tuple[int, int]:
    """Rows of the decode steps: few, and as many as there can be."""
    num_rows = config.max_running_requests
    return min(num_rows, FEW_ROWS), num_rows


class DryPrefill(NamedTuple):
    """A prefill of padding."""

    rows: int
    row_tokens: int  # of each of them
    decodes: int = 0  # that go with them


def largest_prefills(config: ResolvedConfig) -> list[DryPrefill]:
    """The largest prefill, and the largest that is recorded, if any is."""
    num_rows = config.max_running_requests

    def largest(decodes: int) -> DryPrefill:
        num_chunks = num_rows - decodes
        row_tokens = min((config.max_step_tokens - decodes) // num_chunks, config.max_context_tokens)
        return DryPrefill(num_chunks, row_tokens, decodes)

    # Decodes take less than the prompts that could come in their place, where rows can be long enough.
    half = align_down(num_rows // 2) if max_joined(config) else 0
    return [
        max(largest(half), largest(0), key=lambda size: size.decodes + size.rows * size.row_tokens),
        *[
            DryPrefill(size.rows, max(1, -(-(size.tokens - size.decodes) // size.rows)), size.decodes)
            for size in buckets_of(config).prefill[-1:]
        ],
    ]


def first_of_each_kind(model: Decoder) -> RunBlock:
    """Runs the model's blocks without those whose kernels an earlier one has launched.

    The last one is always run: of a prompt, most of it computes other numbers of tokens.
    """
    first: dict[object, nn.Module] = {}
    for block, attention in zip(model.layers, model.attention_layers(), strict=True):
        shapes = tuple((name, parameter.shape) for name, parameter in block.named_parameters())
        first.setdefault((attention.window, shapes, block is model.layers[-1]), block)
    kept = set(first.values())

    def run_block(block: nn.Module, x: Tensor, residual: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        return call_block(block, x, residual, *others) if block in kept else (x, residual)

    return run_block


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """How much memory the allocator hands out during `run` beyond what was taken before, at most."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


def warm_up_prefill(
    config: ResolvedConfig, model: Decoder, rows: Rows, plans: AttentionPlans, device: torch.device
) -> None:
    """Compile the kernels of a prefill step, for chunks of any length."""
    run_block = first_of_each_kind(model)
    for size in warm_up_sizes(config):
        plans.padding_prefill(size.rows, size.row_tokens)
        prefill_step(model, rows, padding_batch(size, rows, device), run_block)
    torch.cuda.synchronize(device)


def warm_up_sizes(config: ResolvedConfig) -> list[DryPrefill]:
    """A prefill's warm-up.

    Small sizes are chosen for what Triton compiles anew (a count of 1, a multiple of 16, any other) and for
    the launch configurations of few and of more rows, the powers of two for those that depend on the number
    of tokens, and decodes as few and as many as there can be.
    """
    sizes = [
        DryPrefill(num_rows, row_tokens)
        for num_rows in (1, 3, FEW_ROWS, FEW_ROWS + 1)
        for row_tokens in (1, 3, 16)
    ]
    row_tokens = 32
    while row_tokens <= min(config.chunk_tokens, config.max_context_tokens):
        sizes.append(DryPrefill(1, row_tokens))
        row_tokens *= 2
    if max_joined(config):
        sizes += [DryPrefill(1, 16, align_up(decodes)) for decodes in decode_sizes(config)]
    return sizes


def padding_batch(size: DryPrefill, rows: Rows, device: torch.device) -> PrefillBatch:
    """A prefill that is all padding: its keys lie in the scratch page."""
    num_rows, row_tokens, num_decodes = size
    num_tokens = num_decodes + num_rows * row_tokens
    row_start = np.arange(num_decodes, num_tokens + 1, row_tokens, dtype=np.int32)
    context_len = np.full(num_decodes + num_rows, row_tokens, dtype=np.int32)
    context_len[:num_decodes] = 1
    tensors = Stager(device).to_device(
        [
            np.zeros(num_tokens, dtype=np.int32),
            np.zeros(num_tokens, dtype=np.int32),
            np.full(num_tokens, -1, dtype=np.int32),
            np.full(num_decodes + num_rows, rows.max_rows, dtype=np.int32),
            context_len,
            row_start,
            np.concatenate([np.arange(num_decodes, dtype=np.int32), row_start[1:] - 1]),
        ]
    )
    return PrefillBatch(*tensors, max_query_len=row_tokens, num_decodes=num_decodes)
