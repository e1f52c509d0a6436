"""`minisgl verify`: compares a checkpoint on this machine with transformers, and reports what differs."""

import math
from pathlib import Path
from typing import Any, TextIO

from minisgl.benchmark.model_configs import model_folder
from minisgl.benchmark.reports.report import (
    Cell,
    Report,
    engine_arguments,
    format_table,
    make_report,
    output_path,
    write_report,
)
from minisgl.config import GIB, EngineConfig, with_cache_dir
from minisgl.progress import ShownProgress, lines_on
from minisgl.verification.compare import PlaceError
from minisgl.verification.verify import Verification, verify_model


def run_verify(
    config: EngineConfig, out: str | None, cache_dir: Path, stdout: TextIO, stderr: TextIO
) -> bool:
    """Verify the model that `config` names, print what was found, and return whether it passed.

    A model that is not here is fetched. Progress goes to `stderr`; the last line on `stdout` is the verdict.

    Args:
        out: file for the report as JSON; None: no file.

    Raises:
        MinisglError: as `verify_model`; there is no such model; the report can't be written.
    """
    path = output_path("--out", out)
    config = with_cache_dir(config, cache_dir)

    def say(line: str) -> None:
        stderr.write(f"{line}\n")
        stderr.flush()

    with (
        ShownProgress(lines_on(stderr), stderr) as progress,
        model_folder(config, cache_dir=cache_dir, progress=progress) as folder,
    ):
        found = verify_model(config, folder, say)
    stdout.write(f"{as_text(found)}\n")
    stdout.flush()
    if path is not None:
        write_report(path, as_report(found))
    return found.passed


def as_text(found: Verification) -> str:
    """What a user reads: the prompts, the memory, what is wrong and why, and the verdict in the last line."""
    memory = found.memory
    parts = [f"weights {memory.weights_bytes / GIB:.2f} GiB, KV pool {memory.pool_bytes / GIB:.2f} GiB"]
    if memory.engine_peak_bytes:
        how = "layer by layer" if found.layer_by_layer else "whole"
        parts.append(
            f"peak on the GPU {memory.engine_peak_bytes / GIB:.2f} GiB, of transformers in float32 "
            f"({how}) {memory.reference_peak_bytes / GIB:.2f} GiB"
        )
    parts.append(f"peak of host memory {memory.host_peak_bytes / GIB:.2f} GiB")
    bars = found.bars
    bar = f"{bars.factor:g} times transformers' error in {found.peer_dtype}"
    lines = [
        format_table(_prompt_rows(found)),
        "",
        f"engine: {found.config.device}, {found.config.dtype}, attention by {found.config.attention_backend}",
        f"bar: errors against transformers in float32, at most {bar}",
        f"memory: {'; '.join(parts)}",
        f"end-of-sequence ids: {_ids(found.end_ids.ours)} (transformers: {_ids(found.end_ids.transformers)})",
        *(f"note: {note}" for note in found.notes),
        *(f"WRONG: {finding.sentence()}" for finding in found.findings),
        found.verdict(),
    ]
    return "\n".join(lines)


def as_report(found: Verification) -> Report:
    """The same as a report; `verdict` is the one row of its table of that name."""
    errors = [one.errors for one in found.prompts]
    metrics: dict[str, float | int | None] = {
        "passed": int(found.passed),
        "logits_error": max(one.ours for one in errors),
        "transformers_logits_error": max(one.theirs for one in errors),
        "logits_error_bar": found.bars.logits_bar(errors),
        "worst_token_gap": max(one.our_gap for one in errors),
        "transformers_worst_token_gap": max(one.their_gap for one in errors),
        "token_gap_bar": found.bars.gap_bar(errors),
        "equal_tokens": sum(one.num_equal for one in errors),
        "num_tokens": sum(len(one.answer) for one in found.prompts),
        **found.memory._asdict(),
    }
    tables: dict[str, list[dict[str, Cell]]] = {
        "verdict": [{"passed": found.passed, "verdict": found.verdict()}],
        "findings": [dict(finding._asdict()) for finding in found.findings],
        "notes": [{"note": note} for note in found.notes],
        "prompts": _prompt_rows(found),
        "places": [_place_row(one) for one in found.places],
        "end_ids": [
            {"of": name, "ids": _ids(ids if isinstance(ids, tuple) else () if ids is None else (ids,))}
            for name, ids in found.end_ids._asdict().items()
        ],
    }
    arguments: dict[str, Any] = {
        **engine_arguments(found.config),
        "peer_dtype": found.peer_dtype,
        "layer_by_layer": found.layer_by_layer,
    }
    return make_report("verify", arguments=arguments, metrics=metrics, tables=tables)


def _prompt_rows(found: Verification) -> list[dict[str, Cell]]:
    return [
        {
            "prompt": one.kind,
            "run": one.run,
            "tokens": one.num_prompt_tokens,
            "logits_error": _finite(one.errors.ours),
            "transformers_error": _finite(one.errors.theirs),
            "worst_token_gap": _finite(one.errors.our_gap),
            "transformers_gap": _finite(one.errors.their_gap),
            "equal_tokens": f"{one.errors.num_equal} of {len(one.answer)}",
        }
        for one in found.prompts
    ]


def _place_row(one: PlaceError) -> dict[str, Cell]:
    return {
        "layer": one.place.layer,
        "part": one.place.part,
        "error": _finite(one.ours),
        "transformers_error": _finite(one.theirs),
    }


def _finite(value: float) -> float | str:
    """The value, or the word for one that JSON and tables have no number for."""
    return value if math.isfinite(value) else "not finite"


def _ids(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids)) or "none"
