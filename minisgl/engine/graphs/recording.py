"""Compiles an engine's steps and records them as CUDA graphs, at the start and later.

A start records the sizes that can replace all others. `BackgroundRecorder` records the rest. A start records
all sizes if it had to compile kernels, with several ranks, and in mode "full".

Promise: everything is compiled at the start. A step that can't be compiled or recorded runs without that,
with a warning, or raises if the user required it. Too little memory for the start always raises.
"""

import logging
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from minisgl.config import ResolvedConfig
from minisgl.engine.device_faults import device_fault_of
from minisgl.engine.graphs.background_recording import BackgroundRecorder
from minisgl.engine.graphs.buckets import PrefillBucket, buckets_of, startup_prefills, startup_sizes
from minisgl.engine.graphs.decode_graphs import (
    CapturedSteps,
    DecodeGraphs,
    KernelCompilations,
    WholeStep,
)
from minisgl.engine.graphs.dry_runs import warm_up_prefill
from minisgl.engine.graphs.graph_recorder import GraphRecorder
from minisgl.engine.graphs.prefill_graphs import PrefillGraphs
from minisgl.engine.start.startup_stages import StartupStages
from minisgl.engine.step.attention_planner import AttentionPlanner
from minisgl.engine.step.inputs import HostPageTable, Stager
from minisgl.engine.step.rows import Rows
from minisgl.engine.step.steps import DecodeStep, prefill_step
from minisgl.errors import MinisglError
from minisgl.layers.int4_weight import Int4Weight
from minisgl.layers.moe import MoeMLP
from minisgl.models.decoder import Decoder
from triton_kernels.early_start import can_start_early

if TYPE_CHECKING:
    from minisgl.parallel.mesh import Ranks

logger = logging.getLogger(__name__)

EARLY_ROWS = 128
"""Most rows of a decode step with early starts. They gain nothing in larger steps."""
EARLY_ROWS_OF_INT4 = 256
"""The same for models of 4-bit layers without experts. Measured with Llama-3.1-8B: a step takes 1 % less."""
EARLY_ROWS_OF_RANKS = 64
"""The same for several ranks. More rows were not tried."""


class RecordedSteps(NamedTuple):
    """The recorded steps that the model runner launches; None = such steps run uncaptured."""

    decode: DecodeGraphs | None
    prefill: PrefillGraphs | None
    background: BackgroundRecorder
    """Records the missing graphs of both."""
    kernels: KernelCompilations | None
    recorder: GraphRecorder | None

    def release(self) -> None:
        """Free all CUDA graphs. No step can be launched afterwards."""
        if self.decode is not None:
            self.decode.release()
        if self.recorder is not None:
            self.recorder.release()


def record_steps(
    config: ResolvedConfig,
    model: Decoder,
    rows: Rows,
    pages: HostPageTable,
    planner: AttentionPlanner,
    stager: Stager,
    device: torch.device,
    kernels: KernelCompilations | None,
    stages: StartupStages,
    ranks: "Ranks | None",
) -> RecordedSteps:
    """Compile and record the steps of a model whose KV pool is allocated.

    Args:
        kernels: the counter of compilations since the first launch; None = nothing to compile.

    Raises:
        torch.OutOfMemoryError: too little memory is free.
        Exception: an error of torch or Triton, with `config.must_compile` or `config.strict_compile`.
    """
    buckets = buckets_of(config)
    # Not with a user's kernels, which may share names with ours; not after NCCL's sums, which is untested.
    ours = not config.kernel and (ranks is None or ranks.sums_use_kernel)
    early_starts = can_start_early(device) and ours
    recorder = GraphRecorder(early_starts=early_starts) if buckets.num_graphs else None
    step = DecodeStep(model, rows)
    decode = prefill = None
    if buckets.decode:
        assert recorder is not None
        decode = _record_decode(config, step, planner, recorder, buckets.decode, device, ranks)
        stages.finish("compile and record decode")
    if device.type == "cuda":
        warm_up_prefill(config, model, rows, planner, device)
        stages.finish("compile prefill kernels")
    if buckets.prefill:
        assert recorder is not None
        prefill = PrefillGraphs(
            partial(prefill_step, model, rows),
            recorder.record,
            buckets.prefill,
            pages,
            stager,
            device,
            model.vocab_size,
        )
        prefill = _record_prefill(config, prefill, buckets.prefill, ranks)
        stages.finish("record prefill")
    tables = [graphs.table for graphs in (decode, prefill) if graphs is not None]
    background = BackgroundRecorder(tables, kernels, strict=config.strict_compile)
    compiles = kernels is not None and kernels.num_compiled > 0
    if background.num_missing and (compiles or ranks is not None or config.compile_mode == "full"):
        # Recording runs collectives first. If one rank fails there, the others would wait, so it must raise.
        background.record_all(strict=ranks is not None)
        stages.finish("record rarer graphs")
    if kernels is not None:
        kernels.count = 0
    logger.info(
        "graphs: %d of decode, %d of prefill, %d to follow between steps",
        len(decode.table.sizes) if decode is not None else 0,
        len(prefill.table.sizes) if prefill is not None else 0,
        background.num_missing,
    )
    return RecordedSteps(decode, prefill, background, kernels, recorder)


def _record_decode(
    config: ResolvedConfig,
    step: DecodeStep,
    planner: AttentionPlanner,
    recorder: GraphRecorder,
    buckets: tuple[int, ...],
    device: torch.device,
    ranks: "Ranks | None",
) -> DecodeGraphs:
    """Record the decode step, compiled if possible."""
    try:
        return _record_graphs(config, step, planner, recorder, config.compile_mode, buckets, device, ranks)
    except Exception as error:
        if config.must_compile or config.compile_mode == "off" or _ends_the_start(error):
            raise
        _fall_back_together(ranks, "compile the decode step", "--compile-mode off", error)
        logger.warning(
            "this torch can't compile the decode step, so it goes into its graphs uncompiled; "
            "--compile-mode %s makes this an error. It said:",
            config.compile_mode,
            exc_info=True,
        )
    # Not in the handler, where the error would keep the recorded graphs alive.
    recorder.release()
    return _record_graphs(config, step, planner, recorder, "off", buckets, device, ranks)


def _record_graphs(
    config: ResolvedConfig,
    step: DecodeStep,
    planner: AttentionPlanner,
    recorder: GraphRecorder,
    mode: str,
    buckets: tuple[int, ...],
    device: torch.device,
    ranks: "Ranks | None",
) -> DecodeGraphs:
    """Compile the decode step in this mode, and record the `startup_sizes` of the buckets."""
    keep = not config.kernel
    if mode == "full":
        graphs = WholeStep(step, device, max_batch=buckets[-1], keep=keep)
    else:
        graphs = CapturedSteps(
            step,
            recorder,
            compile_blocks=mode == "layers",
            max_batch=buckets[-1],
            early_rows=early_rows(step.model) if ranks is None else EARLY_ROWS_OF_RANKS,
            keep=keep,
        )
    compiled = DecodeGraphs(
        step, graphs, buckets, device, strict=config.strict_compile, plan=planner.plan_decode
    )
    durations_ms: dict[int, float] = {}
    minimum_over_ranks = int if ranks is None else ranks.minimum
    compiled.warm_up(startup_sizes(buckets), durations_ms.__setitem__, minimum_over_ranks=minimum_over_ranks)
    slowest = sorted(durations_ms, key=durations_ms.__getitem__)[-2:]
    logger.info(
        "recorded %d decode graphs in %.1f s, most of it for %s",
        len(durations_ms),
        sum(durations_ms.values()) / 1e3,
        " and ".join(f"{bucket} rows ({durations_ms[bucket] / 1e3:.1f} s)" for bucket in slowest),
    )
    return compiled


def early_rows(model: nn.Module) -> int:
    """Most rows of a decode step of this model on one rank with early starts."""
    has_int4 = any(isinstance(module, Int4Weight) for module in model.modules())
    has_experts = any(isinstance(module, MoeMLP) for module in model.modules())
    return EARLY_ROWS_OF_INT4 if has_int4 and not has_experts else EARLY_ROWS


def _record_prefill(
    config: ResolvedConfig,
    graphs: PrefillGraphs,
    buckets: tuple[PrefillBucket, ...],
    ranks: "Ranks | None",
) -> PrefillGraphs | None:
    """Record the prefill step. If that fails, log a warning and return None."""
    try:
        graphs.warm_up(startup_prefills(buckets), minimum_over_ranks=int if ranks is None else ranks.minimum)
    except Exception as error:
        if config.strict_compile or _ends_the_start(error):
            raise
        _fall_back_together(ranks, "record prefill", "--max-graph-tokens 0", error)
        logger.warning(
            "prefill can't be recorded, so it runs uncaptured, which is slower for short prompts; "
            "--max-graph-tokens 0 asks for that, --strict-compile makes this an error. It said:",
            exc_info=True,
        )
        return None
    return graphs


def _ends_the_start(error: Exception) -> bool:
    """Whether other graphs, or none, would fail as well."""
    return isinstance(error, torch.OutOfMemoryError) or device_fault_of(error) is not None


def _fall_back_together(ranks: "Ranks | None", what: str, instead: str, error: Exception) -> None:
    """Return if all ranks failed to do `what`, so that all of them fall back.

    Raises:
        MinisglError: only this rank failed. The others wait for it in collectives that it will not reach.
    """
    if ranks is not None and not ranks.all_ranks_reach(what):
        raise MinisglError(
            f"rank {ranks.rank} of --tp alone can't {what}, and all ranks must run the same; {instead} does "
            f"without on all. It said: {error}"
        ) from error
