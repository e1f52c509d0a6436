"""Runs a verification: the engine first, then transformers, then the comparison.

Promise: engine and transformers are never in memory together. What is wrong with the model becomes a finding,
what is wrong with the settings an error.
"""

import gc
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from minisgl.config import EngineConfig, ResolvedConfig
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.engine.start.device import free_host_bytes, peak_host_bytes
from minisgl.errors import ConfigError
from minisgl.model_config.config import ModelConfig
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.verification.compare import Bars, LogitErrors, PlaceError, logit_errors, place_errors
from minisgl.verification.end_ids import EndIds, check_end_ids, find_end_ids
from minisgl.verification.explain import (
    Finding,
    Traces,
    find_difference,
    find_no_reference,
    find_overflow,
)
from minisgl.verification.ours import free_memory, generate, our_trace
from minisgl.verification.prompts import NEW_TOKENS, Prompt, context_needed, make_prompts
from minisgl.verification.reference import Computed, Memory, Tokens, reference_traces
from minisgl.verification.saved_weights import save_checkpoint
from minisgl.verification.traces import Trace, kept_positions

MAX_RUNNING_REQUESTS = 16
"""Unless the user says otherwise: enough for all prompts at once, and few graphs to record."""


class MemoryUsed(NamedTuple):
    """Bytes."""

    weights_bytes: int
    pool_bytes: int
    engine_peak_bytes: int  # of the device; 0 on the CPU
    reference_peak_bytes: int  # likewise, of transformers in float32
    host_peak_bytes: int


class PromptResult(NamedTuple):
    """One prompt and its greedy answer."""

    kind: str
    run: str  # "together" or "again, alone"
    num_prompt_tokens: int
    answer: list[int]
    errors: LogitErrors


class Verification(NamedTuple):
    """What was found."""

    config: ResolvedConfig
    peer_dtype: str
    bars: Bars
    prompts: list[PromptResult]
    places: list[PlaceError]
    end_ids: EndIds
    memory: MemoryUsed
    layer_by_layer: bool
    findings: list[Finding]
    notes: list[str]

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def verdict(self) -> str:
        """One line."""
        errors = [one.errors for one in self.prompts]
        worst = max(one.ours for one in errors)
        their = max(one.theirs for one in errors)
        equal = sum(one.num_equal for one in errors)
        total = sum(len(one.answer) for one in self.prompts)
        beside = f"logits {worst:.2e} off, transformers in {self.peer_dtype} {their:.2e}"
        beside += f"; {equal} of {total} greedy tokens are float32's best"
        if self.passed:
            return f"PASSED: {beside}"
        return f"FAILED: {self.findings[0].sentence()} ({beside})"


class _Ours(NamedTuple):
    """What the engine computed before its memory was freed."""

    config: ResolvedConfig
    sequences: list[tuple[Prompt, str, list[int]]]  # prompt, run, answer
    traces: list[Trace]
    memory: MemoryUsed
    num_parameters: int


def verify_model(config: EngineConfig, folder: Path, say: Callable[[str], None]) -> Verification:
    """Compare the model in `folder`, run as `config` says, with transformers.

    Args:
        say: called with a line about each part of the work.

    Raises:
        ConfigError: a setting is impossible, or there is too little memory.
        ModelError: the folder's model can't be loaded.
    """
    if config.tp != 1:
        raise ConfigError(f"minisgl verify runs on one GPU, got --tp {config.tp}; leave it away")
    model_config = read_model_config(folder, config.quantization, config.kv_dtype)
    if model_config.quantization is not None:
        raise ConfigError(
            f"minisgl verify compares unquantized models, and the weights are "
            f"{model_config.quantization.describe()}; bench/quality.py compares quantized ones"
        )
    if config.dummy_weights and model_config.checkpoint_prefix:
        raise ConfigError("--dummy-weights can't verify a model of text and images; take one of text")
    config = _with_defaults(config, model_config)
    with ExitStack() as stack:
        saved = None
        if config.dummy_weights:
            saved = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="minisgl-")))
        ours = _run_engine(config, folder, model_config, saved, say)
        peer_dtype = "bfloat16" if ours.config.dtype == "float32" else ours.config.dtype
        tokens = [
            Tokens(
                [*prompt.token_ids, *answer],
                kept_positions(len(prompt.token_ids), len(prompt.token_ids) + len(answer)),
            )
            for prompt, _, answer in ours.sequences
        ]

        def compute(dtype: str) -> Computed:
            say(f"transformers in {dtype}")
            return reference_traces(
                folder if saved is None else saved,
                model_config,
                tokens,
                dtype=dtype,
                device=ours.config.device,
                num_parameters=ours.num_parameters,
                memory=_free_memory(ours.config.device),
            )

        precise, coarse = compute("float32"), compute(peer_dtype)
    end_ids = find_end_ids(folder, model_config)
    return _judge(ours, precise, coarse, tokens, peer_dtype, end_ids, model_config)


def _with_defaults(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """A short context and few rows, unless the user says otherwise."""
    context = config.max_context_tokens
    if context is None:
        context = context_needed(model)
    elif context < NEW_TOKENS + 2:
        raise ConfigError(
            f"--max-context-tokens must be at least {NEW_TOKENS + 2} for minisgl verify, got {context}"
        )
    return replace(
        config,
        max_context_tokens=context,
        max_running_requests=config.max_running_requests or MAX_RUNNING_REQUESTS,
        # What it changes while steps run would change what is compared.
        compile_on_cpu=False,
    )


def _run_engine(
    config: EngineConfig, folder: Path, model: ModelConfig, saved: Path | None, say: Callable[[str], None]
) -> _Ours:
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    engine = build_engine(config, folder, lambda name, ms: say(f"engine: {name}, {ms:.0f} ms"))
    try:
        engine.record_graphs()
        prompts = make_prompts(folder, model, engine.max_context_tokens)
        if not prompts:
            raise ConfigError(
                f"requests may have {engine.max_context_tokens} tokens here and minisgl verify needs at "
                f"least {NEW_TOKENS + 2}; raise --num-pages or --max-context-tokens"
            )
        say(f"{len(prompts)} prompts, greedy")
        sequences = _answers(engine, prompts)
        say("engine: logits and hidden states")
        traces = [
            our_trace(
                engine,
                [*prompt.token_ids, *answer],
                kept_positions(len(prompt.token_ids), len(prompt.token_ids) + len(answer)),
            )
            for prompt, _, answer in sequences
        ]
        if saved is not None:
            save_checkpoint(engine.runner.model, folder, saved)
        pools = [one.k_cache for one in engine.runner.model.attention_layers()]
        memory = MemoryUsed(
            engine.weights_bytes,
            2 * sum(pool.nbytes for pool in pools),
            torch.cuda.max_memory_allocated() if engine.config.device == "cuda" else 0,
            0,
            peak_host_bytes(),
        )
        num_parameters = sum(one.numel() for one in engine.runner.model.parameters())
        resolved = engine.config
    finally:
        free_memory(engine)
    return _Ours(resolved, sequences, traces, memory, num_parameters)


def _answers(engine: Engine, prompts: list[Prompt]) -> list[tuple[Prompt, str, list[int]]]:
    """All prompts at once, then one by one from the prefix cache; the second answer only where it differs."""
    ids = [prompt.token_ids for prompt in prompts]
    together = generate(engine, ids, NEW_TOKENS, ignore_eos=True)
    alone = [generate(engine, [one], NEW_TOKENS, ignore_eos=True)[0] for one in ids]
    found = [(prompt, "together", answer) for prompt, answer in zip(prompts, together, strict=True)]
    again = zip(prompts, alone, together, strict=True)
    return found + [(prompt, "again, alone", answer) for prompt, answer, first in again if answer != first]


def _free_memory(device: str) -> Memory:
    """What can be allocated, once what nobody refers to any more is given back."""
    gc.collect()
    device_bytes = 0
    if device == "cuda":
        torch.cuda.empty_cache()
        device_bytes = torch.cuda.mem_get_info()[0]
    return Memory(device_bytes, free_host_bytes())


def _judge(
    ours: _Ours,
    precise: Computed,
    coarse: Computed,
    tokens: list[Tokens],
    peer_dtype: str,
    end_ids: EndIds,
    model: ModelConfig,
) -> Verification:
    bars = Bars(ours.config.dtype)
    traces = [
        Traces(one.kept, *three)
        for one, *three in zip(tokens, ours.traces, precise.traces, coarse.traces, strict=True)
    ]
    results = [
        PromptResult(prompt.kind, run, len(prompt.token_ids), answer, logit_errors(*one[1:], answer))
        for (prompt, run, answer), one in zip(ours.sequences, traces, strict=True)
    ]
    places = place_errors(ours.traces, precise.traces, coarse.traces)
    errors = [one.errors for one in results]
    findings = _find(results, errors, places, traces, bars, peer_dtype, model)
    wrong_ends, notes = check_end_ids(end_ids, model.vocab_size)
    return Verification(
        config=ours.config,
        peer_dtype=peer_dtype,
        bars=bars,
        prompts=results,
        places=places,
        end_ids=end_ids,
        memory=ours.memory._replace(
            reference_peak_bytes=precise.peak_device_bytes, host_peak_bytes=peak_host_bytes()
        ),
        layer_by_layer=precise.layer_by_layer,
        findings=findings + wrong_ends,
        notes=notes + _untested_windows(tokens, model),
    )


def _untested_windows(tokens: list[Tokens], model: ModelConfig) -> list[str]:
    longest = max(len(one.token_ids) for one in tokens)
    windows = sorted({window for window in model.windows if window >= longest})
    if not windows:
        return []
    return [f"no prompt is longer than the sliding window of {windows[-1]} tokens, so it was not tested"]


def _find(
    results: list[PromptResult],
    errors: list[LogitErrors],
    places: list[PlaceError],
    traces: list[Traces],
    bars: Bars,
    peer_dtype: str,
    model: ModelConfig,
) -> list[Finding]:
    unusable = find_overflow(traces, bars.dtype) or find_no_reference(traces, peer_dtype)
    if unusable is not None:
        return [unusable]
    found: list[Finding] = []
    worst = max(errors, key=lambda one: one.ours)
    bar = bars.logits_bar(errors)
    if not worst.ours <= bar:
        seen = f"relative error {worst.ours:.3g}, at most {bar:.3g} is rounding"
        first = find_difference(places, traces, bars, model)
        found.append(
            first
            if first is not None
            else Finding(
                "logits", None, "", seen, "many small errors: no layer stands out; try --dtype float32"
            )
        )
    gap_bar = bars.gap_bar(errors)
    below = max(results, key=lambda one: one.errors.our_gap)
    if not found and below.errors.our_gap > gap_bar:
        found.append(
            Finding(
                "greedy tokens",
                None,
                "",
                f"a {below.kind} prompt ({below.run}) got a token {below.errors.our_gap:.3g} below the best "
                f"logit, at most {gap_bar:.3g} is rounding, while the logits of a plain pass are right",
                "decode steps, CUDA graphs or the prefix cache; try --max-graph-batch 0, --no-prefix-cache "
                "and --compile-mode off, one at a time, and report which of them helps",
            )
        )
    short = [one for one in results if len(one.answer) < NEW_TOKENS]
    if short and not found:
        what = f"{len(short)} prompts ended early, as no logit was finite"
        found.append(Finding("greedy tokens", None, "", what, "as for wrong tokens: try --max-graph-batch 0"))
    return found
