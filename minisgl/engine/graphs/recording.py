"""What of an engine's steps is compiled and recorded as CUDA graphs, when it starts and later.

A start records the sizes that can stand in for all others, and leaves the rest to `LateRecording`. It records
all of them where something had to be compiled, as the rest may have to be, too, which takes seconds; with
several ranks, which would have to agree on when; and in mode "full".

Promise: everything is compiled at the start. What can't be compiled or recorded runs as it is, with a warning
that says so, unless the user asked for it; too little memory for the start is always an error.
"""

import logging
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from minisgl.config import ResolvedConfig
from minisgl.engine.attention_plans import AttentionPlans
from minisgl.engine.buckets import PrefillBucket, buckets_of, first_prefills, first_sizes
from minisgl.engine.compiled import (
    CapturedSteps,
    CompiledDecode,
    GraphRecorder,
    KernelCompilations,
    WholeStep,
)
from minisgl.engine.dry_runs import warm_up_prefill
from minisgl.engine.inputs import HostPageTable, Stager
from minisgl.engine.late_recording import LateRecording
from minisgl.engine.prefill_graphs import PrefillGraphs
from minisgl.engine.rows import Rows
from minisgl.engine.special_steps import SpecialDecode
from minisgl.engine.stages import Stages
from minisgl.engine.steps import DecodeStep, prefill_step
from minisgl.errors import MinisglError
from minisgl.models.decoder import Decoder
from triton_kernels.early_start import can_start_early

if TYPE_CHECKING:
    from minisgl.parallel.mesh import Ranks

logger = logging.getLogger(__name__)

EARLY_ROWS = 128
"""Decode steps of more rows gain nothing by early starts: starts are a small part of them."""
EARLY_ROWS_OF_RANKS = 64
"""The same where several ranks add up; more was not tried."""


class RecordedSteps(NamedTuple):
    """What the model runner launches; None = such steps run as they are."""

    decode: CompiledDecode | None
    prefill: PrefillGraphs | None
    special_decode: SpecialDecode
    late: LateRecording
    """Records what is missing of the three."""
    kernels: KernelCompilations | None
    recorder: GraphRecorder | None

    def release(self) -> None:
        """Let go of all CUDA graphs: no step can be launched any more."""
        if self.decode is not None:
            self.decode.release()
        if self.recorder is not None:
            self.recorder.release()


def record_steps(
    config: ResolvedConfig,
    model: Decoder,
    rows: Rows,
    pages: HostPageTable,
    plans: AttentionPlans,
    stager: Stager,
    device: torch.device,
    kernels: KernelCompilations | None,
    stages: Stages,
    ranks: "Ranks | None",
) -> RecordedSteps:
    """Compile and record around a model that has its pool.

    Args:
        kernels: has counted since the first kernel was launched; None = there is nothing to compile.

    Raises:
        torch.OutOfMemoryError: there is no memory for it.
        Exception: what torch or Triton say, with `config.must_compile` or `config.strict_compile`.
    """
    buckets = buckets_of(config)
    # Kernels of others may have the names of ours; behind sums of NCCL's nobody has tried it.
    ours = not config.kernel and (ranks is None or ranks.sums_are_ours)
    early_starts = can_start_early(device) and ours
    recorder = GraphRecorder(early_starts=early_starts) if buckets.num_graphs else None
    step = DecodeStep(model, rows)
    decode = prefill = None
    if buckets.decode:
        assert recorder is not None
        decode = _record_decode(config, step, plans, recorder, buckets.decode, device, ranks)
        stages.done("compile and record decode")
    if device.type == "cuda":
        warm_up_prefill(config, model, rows, plans, device)
        stages.done("compile prefill kernels")
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
        stages.done("record prefill")
    special_decode = SpecialDecode(step, None, (), device, plan=plans.decode)
    if decode is not None and decode.own_step is not None and recorder is not None:
        special_decode = SpecialDecode(
            step, recorder.record, buckets.decode, device, decode.own_step, plans.decode
        )
    kinds = [graphs for graphs in (special_decode, decode, prefill) if graphs is not None]
    late = LateRecording(kinds, kernels, strict=config.strict_compile or ranks is not None)
    compiles = kernels is not None and kernels.num_compiled > 0
    if late.num_missing and (compiles or ranks is not None or config.compile_mode == "full"):
        late.record_all()
        stages.done("record rarer graphs")
    if kernels is not None:
        kernels.count = 0
    logger.info(
        "graphs: %d of decode, %d of prefill, %d to follow between steps",
        len(buckets.decode) - decode.num_missing if decode is not None else 0,
        len(prefill.buckets) if prefill is not None else 0,
        late.num_missing,
    )
    return RecordedSteps(decode, prefill, special_decode, late, kernels, recorder)


def _record_decode(
    config: ResolvedConfig,
    step: DecodeStep,
    plans: AttentionPlans,
    recorder: GraphRecorder,
    buckets: tuple[int, ...],
    device: torch.device,
    ranks: "Ranks | None",
) -> CompiledDecode:
    """The decode step with its graphs, compiled if that can be done."""
    try:
        return _record_graphs(config, step, plans, recorder, config.compile_mode, buckets, device, ranks)
    except Exception as error:
        if config.must_compile or config.compile_mode == "off" or isinstance(error, torch.OutOfMemoryError):
            raise
        _fall_back_together(ranks, "compile the decode step", "--compile-mode off", error)
        logger.warning(
            "this torch can't compile the decode step, so it goes into its graphs uncompiled; "
            "--compile-mode %s makes this an error. It said:",
            config.compile_mode,
            exc_info=True,
        )
    # Not in the handler: there the error keeps what was recorded alive.
    recorder.release()
    return _record_graphs(config, step, plans, recorder, "off", buckets, device, ranks)


def _record_graphs(
    config: ResolvedConfig,
    step: DecodeStep,
    plans: AttentionPlans,
    recorder: GraphRecorder,
    mode: str,
    buckets: tuple[int, ...],
    device: torch.device,
    ranks: "Ranks | None",
) -> CompiledDecode:
    """The decode step, compiled as `mode` says, with graphs of the `first_sizes` of the buckets."""
    keep = not config.kernel
    if mode == "full":
        graphs = WholeStep(step, device, max_batch=buckets[-1], keep=keep)
    else:
        graphs = CapturedSteps(
            step,
            recorder,
            compile_blocks=mode == "layers",
            max_batch=buckets[-1],
            early_rows=EARLY_ROWS if ranks is None else EARLY_ROWS_OF_RANKS,
            keep=keep,
        )
    compiled = CompiledDecode(step, graphs, buckets, device, strict=config.strict_compile, plan=plans.decode)
    durations_ms: dict[int, float] = {}
    agree = int if ranks is None else ranks.minimum
    compiled.warm_up(first_sizes(buckets), durations_ms.__setitem__, agree=agree)
    slowest = sorted(durations_ms, key=durations_ms.__getitem__)[-2:]
    logger.info(
        "recorded %d decode graphs in %.1f s, most of it for %s",
        len(durations_ms),
        sum(durations_ms.values()) / 1e3,
        " and ".join(f"{bucket} rows ({durations_ms[bucket] / 1e3:.1f} s)" for bucket in slowest),
    )
    return compiled


def _record_prefill(
    config: ResolvedConfig,
    graphs: PrefillGraphs,
    buckets: tuple[PrefillBucket, ...],
    ranks: "Ranks | None",
) -> PrefillGraphs | None:
    """The prefill step with its graphs; None where it can't be recorded, which is said."""
    try:
        graphs.warm_up(first_prefills(buckets), agree=int if ranks is None else ranks.minimum)
    except Exception as error:
        if config.strict_compile or isinstance(error, torch.OutOfMemoryError):
            raise
        _fall_back_together(ranks, "record prefill", "--max-graph-tokens 0", error)
        logger.warning(
            "prefill can't be recorded, so it runs uncaptured, which is slower for short prompts; "
            "--max-graph-tokens 0 asks for that, --strict-compile makes this an error. It said:",
            exc_info=True,
        )
        return None
    return graphs


def _fall_back_together(ranks: "Ranks | None", what: str, instead: str, error: Exception) -> None:
    """Return if all ranks are here because they can't do `what`.

    Raises:
        MinisglError: this one is alone, and the others wait for it in collectives that it will not reach.
    """
    if ranks is not None and not ranks.all_come(what):
        raise MinisglError(
            f"rank {ranks.rank} of --tp alone can't {what}, and all ranks must run the same; {instead} does "
            f"without on all. It said: {error}"
        ) from error
