"""`minisgl doctor`: reports what this machine has, which settings the engine would choose, and why.

Promise: it changes nothing, and it finishes even on a machine where nothing works: every failure becomes a
line of the report. Only a `--model` that does not exist is an error, as for serve.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple

from compile_cache.entries import list_entries
from minisgl import __version__
from minisgl.attention.choice import (
    FLASHINFER,
    NAMES,
    choose,
    parse,
    reason_unavailable,
)
from minisgl.config import (
    GIB,
    MIB,
    ChosenSetting,
    DeviceFacts,
    EngineConfig,
    ResolvedConfig,
    attention_environment,
    chosen_settings,
    resolve_engine_config,
    with_cache_dir,
)
from minisgl.errors import MinisglError, ModelNotHereError
from minisgl.model_config.config import ModelConfig
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.parallel.sizes import rank_sizes, supported_tp_sizes
from minisgl.weights.sources import resolve_model_folder

REQUIRED = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "gguf",
    "jinja2",
    "aiohttp",
    "msgspec",
    "pyzmq",
    "numpy",
)
OPTIONAL = ("flashinfer-python", "openai")
NVIDIA_SMI_TIMEOUT_S = 20.0


class Report(NamedTuple):
    """All findings. `problems` prevent serving; `warnings` do not."""

    system: dict[str, str]
    packages: dict[str, str | None]
    """Package -> version; None = not installed."""
    devices: list[dict[str, str]]
    choices: list[ChosenSetting]
    attention: dict[str, str]
    """Attention backend -> what it would compute here, or why it can't run."""
    model: dict[str, str]
    cache: dict[str, str]
    warnings: list[str]
    problems: list[str]


def examine(config: EngineConfig, cache_dir: Path) -> Report:
    """Examine the machine as an engine with the settings `config` would see it.

    Raises:
        ModelError: the model neither exists here nor could be fetched.
        ConfigError: `config.revision` is given for a model that is not on a hub.
    """
    warnings: list[str] = []
    problems: list[str] = []
    model, model_config = _model(config, cache_dir, warnings, problems)
    packages = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    problems += _missing_packages(packages)
    warnings += _known_conflicts(packages)
    shadowed = _shadowed_packages()
    problems += shadowed

    torch = _import_torch(problems)
    devices, facts = _devices(torch, warnings)
    resolved = _resolved(config, model_config, facts, problems)
    return Report(
        system={
            "minisgl": f"{__version__} in {Path(__file__).parent.parent}",
            "python": f"{platform.python_version()} in {sys.executable}",
            "platform": platform.platform(),
            "cpu": f"{os.cpu_count()} cores, {_cpu_memory()}",
            "nvidia driver": _driver_version() or "none found",
            "cuda of torch": str(torch.version.cuda or "none (CPU build)")
            if torch
            else "torch can't be imported",
        },
        packages=packages,
        devices=devices,
        choices=_choices(config, model_config, resolved, facts, problems),
        attention=_attention(config, model_config, resolved, facts),
        model=model,
        cache=_cache(cache_dir, problems) | {"compiled code": _compiled_code(config, cache_dir, warnings)},
        warnings=warnings,
        problems=problems,
    )


def as_json(report: Report) -> str:
    """The report as JSON, for programs and bug reports."""
    content = report._asdict() | {"choices": [choice._asdict() for choice in report.choices]}
    return json.dumps(content, indent=2)


def as_text(report: Report) -> str:
    """The report as text."""
    lines: list[str] = []

    def section(title: str, rows: list[tuple[str, str]]) -> None:
        lines.append(title)
        lines.extend(f"  {name:<24} {text}" for name, text in rows)
        lines.append("")

    section("system", list(report.system.items()))
    section("packages", [(name, version or "not installed") for name, version in report.packages.items()])
    section(
        "devices",
        [
            (device["name"], ", ".join(v for k, v in device.items() if k != "name"))
            for device in report.devices
        ],
    )
    section("model", list(report.model.items()))
    section(
        "what serve would use",
        [(choice.flag, f"{choice.value:<12} {choice.why}") for choice in report.choices],
    )
    if report.attention:
        section("attention backends", list(report.attention.items()))
    section("cache", list(report.cache.items()))
    lines += [f"warning: {text}" for text in report.warnings]
    lines += [f"PROBLEM: {text}" for text in report.problems]
    lines.append("serving will not work" if report.problems else "ready to serve")
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _missing_packages(packages: dict[str, str | None]) -> list[str]:
    return [
        f"{name} is not installed; in a checkout 'make serve' installs all, elsewhere: pip install {name}"
        for name in REQUIRED
        if packages[name] is None and not (name == "triton" and platform.system() != "Linux")
    ]


def _known_conflicts(packages: dict[str, str | None]) -> list[str]:
    triton, numpy = packages["triton"], packages["numpy"]
    found = []
    if triton and numpy and _numbers(triton) < (3, 7) and _numbers(numpy) >= (2, 4):
        found.append(
            f"triton {triton}'s interpreter (TRITON_INTERPRET=1, used by kernel tests) fails on numpy "
            f"{numpy}; serving is not affected; for the tests: pip install 'numpy<2.4'"
        )
    torch = packages["torch"]
    if torch and not (2, 11) <= _numbers(torch) < (2, 15):
        found.append(f"torch {torch} is outside what is tested (2.11 to 2.14)")
    return found


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor version: (2, 13) for "2.13.0+cu130"."""
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


def _shadowed_packages() -> list[str]:
    """Problems with our other top-level packages: other projects use the same names.

    They must be imported from the folder that contains `minisgl`.
    """
    ours = Path(__file__).resolve().parent.parent.parent
    found = []
    for name in ("triton_kernels", "compile_cache"):
        spec = util.find_spec(name)
        if spec is None or spec.origin is None:
            found.append(f"the package {name} can't be found beside minisgl; reinstall minisgl")
        elif Path(spec.origin).resolve().parent.parent != ours:
            found.append(
                f"'import {name}' finds another project's package in {Path(spec.origin).parent} instead of "
                f"{ours / name}; uninstall that one (pip uninstall {name.replace('_', '-')}) or give minisgl "
                "a virtual environment of its own"
            )
    return found


def _import_torch(problems: list[str]) -> Any:
    try:
        import torch  # lazy: the report must also work with a broken torch
    except Exception as error:  # a broken torch raises any type: OSError, RuntimeError ...
        problems.append(f"torch can't be imported: {type(error).__name__}: {error}")
        return None
    return torch


def _devices(torch: Any, warnings: list[str]) -> tuple[list[dict[str, str]], DeviceFacts]:
    cpu = {"name": "cpu", "kind": platform.processor() or platform.machine(), "memory": _cpu_memory()}
    if torch is None:
        return [cpu], DeviceFacts(has_cuda=False)
    from minisgl.engine.start.device import find_device_facts, kernel_tuning  # lazy: it imports torch

    facts = find_device_facts()
    if facts.cpu_has_bf16:
        cpu["bfloat16"] = "multiplies bfloat16"
    if not facts.has_cuda:
        if shutil.which("nvidia-smi") is not None:
            reason = (
                "this torch is a CPU build"
                if torch.version.cuda is None
                else "the driver may be too old for it"
            )
            warnings.append(f"nvidia-smi is here but torch sees no GPU: {reason}")
        return [cpu], facts
    found = [cpu]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        found.append(
            {
                "name": f"cuda:{index}",
                "kind": properties.name,
                "capability": f"compute {properties.major}.{properties.minor}",
                "kernels": kernel_tuning(properties.name, (properties.major, properties.minor)),
                "memory": f"{free_bytes / GIB:.1f} of {total_bytes / GIB:.1f} GiB free",
            }
        )
    return found, facts


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.split("\n")
    return lines[0].strip() if answer.returncode == 0 and lines[0].strip() else None


def _cpu_memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return "memory unknown"
    return f"{total / GIB:.1f} GiB memory"


def _model(
    engine: EngineConfig, cache_dir: Path, warnings: list[str], problems: list[str]
) -> tuple[dict[str, str], ModelConfig | None]:
    """The model's facts and its config (None = not here or unreadable). Fetches nothing."""
    name = engine.model
    try:
        folder = resolve_model_folder(
            name,
            revision=engine.revision,
            tokenizer=engine.tokenizer,
            pull_missing=False,
            cache_dir=cache_dir,
        )
    except ModelNotHereError as error:
        warnings.append(str(error))
        return {"name": name, "folder": "not here"}, None
    try:
        config = read_model_config(folder, engine.quantization, engine.kv_dtype)
    except MinisglError as error:
        problems.append(f"{name}: {error}")
        return {"name": name, "folder": str(folder)}, None
    size = _size_bytes(folder)
    return {
        "name": name,
        "folder": str(folder),
        "size": f"{size / MIB:.0f} MiB",
        "architecture": config.architecture,
        "context": f"{config.max_position} tokens",
        "weights stored as": config.checkpoint_dtype,
        "quantization": "none" if config.quantization is None else config.quantization.describe(),
        "--tp may be": ", ".join(str(tp) for tp in supported_tp_sizes(config)),
    }, config


def _resolved(
    config: EngineConfig, model: ModelConfig | None, facts: DeviceFacts, problems: list[str]
) -> ResolvedConfig | None:
    """The settings that the engine would use; None = there is no model, or the engine would refuse them."""
    if model is None:
        return None
    try:
        return resolve_engine_config(config, model, facts)
    except MinisglError as error:
        problems.append(str(error))
        return None


def _attention(
    config: EngineConfig, model: ModelConfig | None, resolved: ResolvedConfig | None, facts: DeviceFacts
) -> dict[str, str]:
    """The state of every attention backend, even if the requested one can't run."""
    if model is None:
        return {}
    try:
        settings = resolved or resolve_engine_config(replace(config, attention_backend=None), model, facts)
    except MinisglError:
        return {}
    place = attention_environment(
        model,
        facts,
        device=settings.device,
        dtype=settings.dtype,
        page_size=settings.page_size,
        kv_dtype=settings.kv_dtype,
    )
    chosen = parse(resolved.attention_backend) if resolved is not None else None
    found = {}
    for name in NAMES:
        reason = reason_unavailable(name, place)
        if reason is not None:
            found[name] = f"no: it {reason}"
        elif chosen is not None and name in chosen:
            work = [work for work, backend in chosen._asdict().items() if backend == name]
            found[name] = f"would run {' and '.join(work)}"
        else:
            found[name] = f"could run, as {choose(name, place)}" if name == FLASHINFER else "could run"
    return found


def _choices(
    config: EngineConfig,
    model: ModelConfig | None,
    resolved: ResolvedConfig | None,
    facts: DeviceFacts,
    problems: list[str],
) -> list[ChosenSetting]:
    if model is None:
        return [ChosenSetting("--model", config.model, "the other choices depend on it; fetch it first")]
    if resolved is None:
        return []
    on_cuda = resolved.device == "cuda"
    try:
        rank_sizes(model, resolved.tp)
    except MinisglError as error:
        problems.append(str(error))
    if on_cuda and facts.num_gpus < resolved.tp:
        problems.append(f"--tp {resolved.tp} needs {resolved.tp} GPUs and torch sees {facts.num_gpus}")
    return chosen_settings(config, resolved, model, facts)


def _cache(cache_dir: Path, problems: list[str]) -> dict[str, str]:
    existing = cache_dir
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not os.access(existing, os.W_OK):
        problems.append(f"{existing} is not writable; choose another place with MINISGL_CACHE")
    return {
        "folder": str(cache_dir),
        "size": f"{_size_bytes(cache_dir) / MIB:.0f} MiB" if cache_dir.is_dir() else "not there yet",
        "free on disk": f"{shutil.disk_usage(existing).free / GIB:.1f} GiB",
    }


def _compiled_code(config: EngineConfig, cache_dir: Path, warnings: list[str]) -> str:
    """The compiled code that earlier starts left for the next one."""
    place = with_cache_dir(config, cache_dir).compile_cache
    if not place:
        return "left to torch and Triton (--compile-cache is empty)"
    root = Path(place).expanduser()
    entries = list_entries(root)
    warnings += [
        f"compiled code {entry.name}: {entry.problem}; the next start compiles again"
        for entry in entries
        if entry.problem
    ]
    whole = [entry for entry in entries if not entry.problem]
    if not whole:
        return f"none in {root}: the first start on a GPU compiles for some half a minute"
    size = sum(entry.num_bytes for entry in whole) / MIB
    return f"{size:.0f} MiB in {root}, of " + "; ".join(_made_by(entry.facts) for entry in whole)


def _made_by(facts: dict[str, str]) -> str:
    names = ("gpu", "driver", "torch", "triton", "rank")
    return ", ".join(f"{name} {facts[name]}" for name in names if name in facts)


def _size_bytes(folder: Path) -> int:
    """Total bytes of all files below `folder`."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # the file was removed meanwhile
                total += (Path(parent) / name).stat().st_size
    return total
