"""Dry runs: steps on padding before the engine serves, which measure memory and compile prefill kernels.

Promise: no real data is touched. All rows are the padding row, and no new token has a slot.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from minisgl.attention.triton import MOST_UNPACKED_KEYS
from minisgl.config import ResolvedConfig
from minisgl.engine.graphs.buckets import buckets_of, max_joined_decodes
from minisgl.engine.graphs.parallel_kernel_compile import compile_kernels_in_parallel
from minisgl.engine.step.attention_planner import AttentionPlanner
from minisgl.engine.step.inputs import PrefillBatch, Stager, pack_saves
from minisgl.engine.step.logits import LogitTables
from minisgl.engine.step.rows import Rows
from minisgl.engine.step.step_inputs import decode_shapes
from minisgl.engine.step.steps import DecodeStep, prefill_step, sample_and_advance
from minisgl.layers.attention import Attention
from minisgl.model_config.config import FP8_CACHE
from minisgl.models.decoder import Decoder, RunBlock, call_block
from triton_kernels.decode_config import FEW_ROWS, rows_of_all_kernels
from triton_kernels.gpu import gpu_of
from triton_kernels.launch import align_down, align_up
from triton_kernels.token_mask import num_mask_words, token_mask


class Peaks(NamedTuple):
    """Memory of the largest steps in bytes, without weights, KV pool and tables."""

    prefill_bytes: int
    decode_bytes: int
    recorded_prefill_bytes: int  # of the largest prefill with a graph, which keeps its memory


def measure_peaks(
    config: ResolvedConfig,
    model: Decoder,
    rows: Rows,
    planner: AttentionPlanner,
    device: torch.device,
    cache_dtype: torch.dtype,
) -> Peaks:
    """Measure memory on CUDA with the largest number of rows.

    It also decodes few rows, because they use some other kernels, which are compiled this way before serving.
    """
    model.allocate_kv(1, config.page_size, cache_dtype, device)
    largest, *recorded = largest_prefills(config)
    decode = DecodeStep(model, rows)
    if not config.kernel:  # a replaced kernel may read indices that another kernel computes
        compile_ahead(config, decode, planner, device)
    batch = padding_batch(largest, rows, device)
    planner.plan_padding_prefill(largest.rows, largest.row_tokens)
    row_ids = torch.full((rows.max_rows,), rows.max_rows, dtype=torch.int32, device=device)
    for count in decode_sizes(config, model, device):
        planner.plan_decode((), count)
        decode(row_ids[:count])

    def prefill_bytes(batch: PrefillBatch) -> int:
        return peak_bytes(lambda: prefill_step(model, rows, batch), device)

    recorded_bytes = 0
    for size in recorded:
        recorded_bytes = prefill_bytes(padding_batch(size, rows, device))
    most_bytes = prefill_bytes(batch)
    for size in unpacking_prefills(config)[-1:]:
        planner.plan_padding_prefill(size.rows, size.row_tokens)
        most_bytes = max(most_bytes, prefill_bytes(padding_batch(size, rows, device)))
    return Peaks(most_bytes, peak_bytes(lambda: decode(row_ids), device), recorded_bytes)


def compile_ahead(
    config: ResolvedConfig, decode: DecodeStep, planner: AttentionPlanner, device: torch.device
) -> None:
    """Compile the kernels of all dry runs in parallel. No kernel runs, so no index may come from a kernel.

    Several ranks must do it at the same time, because NCCL's collectives still run.
    """
    model, rows = decode.model, decode.rows
    num_decodes = decode_sizes(config, model, device)
    sizes = largest_prefills(config) + warm_up_sizes(config, num_decodes)
    run_block = run_distinct_blocks(model)
    with compile_kernels_in_parallel(max(1, (os.cpu_count() or 1) // config.ranks_per_host)):
        for size in sizes:
            planner.plan_padding_prefill(size.rows, size.row_tokens)
            prefill_step(model, rows, padding_batch(size, rows, device), run_block)
        for count in num_decodes:
            planner.plan_decode((), count)
            row_ids = torch.full((count,), rows.max_rows, dtype=torch.int32, device=device)
            zeros = torch.zeros_like(row_ids)
            state = rows.read(row_ids)._replace(context_len=zeros, slot_mapping=zeros - 1)
            logits = model(zeros, zeros, decode.inputs(row_ids, state), run_block=run_block)
            sample_and_advance(rows, row_ids, state, logits, zeros)
            launch_extras(logits)


def decode_sizes(config: ResolvedConfig, model: Decoder, device: torch.device) -> list[int]:
    """The numbers of rows of the decode dry runs. Together they run every kernel of decode attention."""
    most, gpu = config.max_running_requests, gpu_of(device)
    return sorted({rows for shape in decode_shapes(model) for rows in rows_of_all_kernels(most, shape, gpu)})


class DryPrefill(NamedTuple):
    """The size of a prefill of padding."""

    rows: int
    row_tokens: int  # tokens of each row
    decodes: int = 0  # decodes that join them
    num_keys: int = 0  # as of `PrefillBatch`


def largest_prefills(config: ResolvedConfig) -> list[DryPrefill]:
    """The largest prefill, and the largest recorded prefill if there is one."""
    num_rows = config.max_running_requests

    def largest(decodes: int) -> DryPrefill:
        num_chunks = num_rows - decodes
        row_tokens = min((config.max_step_tokens - decodes) // num_chunks, config.max_context_tokens)
        return DryPrefill(num_chunks, row_tokens, decodes)

    # A decode needs less memory than the prompt tokens that could replace it, if rows can be long enough.
    half = align_down(num_rows // 2) if max_joined_decodes(config) else 0
    return [
        max(largest(half), largest(0), key=lambda size: size.decodes + size.rows * size.row_tokens),
        *[
            DryPrefill(size.rows, max(1, -(-(size.tokens - size.decodes) // size.rows)), size.decodes)
            for size in buckets_of(config).prefill[-1:]
        ],
    ]


def unpacking_prefills(config: ResolvedConfig) -> list[DryPrefill]:
    """Prefills that may unpack an FP8 cache (minisgl/attention/triton.py); the last one is the largest.

    Their kernels depend on the number of tokens, their memory on the number of keys.
    """
    if config.kv_dtype != FP8_CACHE:
        return []
    most_tokens = min(config.max_step_tokens, config.max_context_tokens)
    sizes = [DryPrefill(1, tokens, num_keys=MOST_UNPACKED_KEYS) for tokens in _doubled(most_tokens)]
    num_rows = min(config.max_step_tokens // most_tokens, config.max_running_requests)
    return [*sizes, DryPrefill(num_rows, most_tokens, num_keys=MOST_UNPACKED_KEYS)]


def _doubled(most: int) -> list[int]:
    """32, 64, 128 and so on, up to `most`."""
    return [1 << power for power in range(5, most.bit_length()) if 1 << power <= most]


def run_distinct_blocks(model: Decoder) -> RunBlock:
    """A `RunBlock` that skips a block if an earlier block launches the same kernels.

    The last block always runs, because most of it computes fewer tokens of a prompt.
    """
    first: dict[object, nn.Module] = {}
    for block in model.layers:
        shapes = tuple((name, parameter.shape) for name, parameter in block.named_parameters())
        windows = tuple(module.window for module in block.modules() if isinstance(module, Attention))
        first.setdefault((windows, shapes, block is model.layers[-1]), block)
    distinct = set(first.values())

    def run_block(block: nn.Module, x: Tensor, residual: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        return call_block(block, x, residual, *others) if block in distinct else (x, residual)

    return run_block


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Peak of the memory that the allocator hands out during `run`, without earlier allocations."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


def warm_up_prefill(
    config: ResolvedConfig, model: Decoder, rows: Rows, planner: AttentionPlanner, device: torch.device
) -> None:
    """Run prefill steps that compile the kernels for chunks of any length, and the kernels of extras."""
    run_block = run_distinct_blocks(model)
    output = None
    for size in warm_up_sizes(config, decode_sizes(config, model, device)):
        planner.plan_padding_prefill(size.rows, size.row_tokens)
        output = prefill_step(model, rows, padding_batch(size, rows, device), run_block)
    if output is not None and output.logits is not None:
        launch_extras(output.logits.logits)
    torch.cuda.synchronize(device)


def launch_extras(logits: Tensor) -> None:
    """Launch the kernels of rules and masks once, on logits [R, V]. They have one variant for all batches."""
    num_rows, vocab_size = logits.shape
    zeros = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
    tables = LogitTables(0, vocab_size, logits.device)
    tables.apply_rules(logits, zeros, zeros)
    tables.add_tokens(zeros, zeros, zeros > 0)
    token_mask(logits, zeros, zeros.new_zeros(1, num_mask_words(vocab_size)))


def warm_up_sizes(config: ResolvedConfig, num_decodes: Iterable[int]) -> list[DryPrefill]:
    """The sizes that together compile every kernel variant of prefill.

    The small sizes cover the counts that Triton specializes (1, a multiple of 16, any other) and the launch
    configurations of few and of more rows. Powers of two cover the configurations that depend on the number
    of tokens.

    Args:
        num_decodes: how many decodes join a prompt, if any do.
    """
    sizes = [
        DryPrefill(num_rows, row_tokens)
        for num_rows in (1, 3, FEW_ROWS, FEW_ROWS + 1)
        for row_tokens in (1, 3, 16)
    ]
    longest_chunk = min(config.chunk_tokens, config.max_context_tokens)
    sizes += [DryPrefill(1, row_tokens) for row_tokens in _doubled(longest_chunk)]
    if max_joined_decodes(config):
        sizes += [DryPrefill(1, 16, align_up(decodes)) for decodes in num_decodes]
    return sizes + unpacking_prefills(config)


def padding_batch(size: DryPrefill, rows: Rows, device: torch.device) -> PrefillBatch:
    """Build a prefill of padding rows, whose keys lie in the scratch page."""
    num_rows, row_tokens, num_decodes, num_keys = size
    num_tokens = num_decodes + num_rows * row_tokens
    num_groups = len(rows.page_tables)
    num_slots = num_tokens if num_groups == 1 else num_groups * align_up(num_tokens)
    row_start = np.arange(num_decodes, num_tokens + 1, row_tokens, dtype=np.int32)
    context_len = np.full(num_decodes + num_rows, row_tokens, dtype=np.int32)
    context_len[:num_decodes] = 1
    tensors = Stager(device).to_device(
        [
            np.zeros(num_tokens, dtype=np.int32),
            np.zeros(num_tokens, dtype=np.int32),
            np.full(num_slots, -1, dtype=np.int32),
            np.full(num_decodes + num_rows, rows.max_rows, dtype=np.int32),
            context_len,
            row_start,
            np.concatenate([np.arange(num_decodes, dtype=np.int32), row_start[1:] - 1]),
            *pack_saves((), row_start),
        ]
    )
    return PrefillBatch(*tensors, max_query_len=row_tokens, num_decodes=num_decodes, num_keys=num_keys)
