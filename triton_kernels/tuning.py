"""Launch configurations found by measuring: one JSON table per GPU in `tuned/`, looked up by shape.

    config = tuned(default_decode_config(...), "paged_decode", q.device, q.dtype, exact=(D, G), near=(K, S))

An entry matches if op, dtype and `exact` are equal. Of several matches the one with the nearest `near` wins
(sum of |log2 ratio|, at most NEAR_ENOUGH). A `size` (tokens, rows) selects the nearest measured size, also in
log space. Without a size, or when torch.compile traces (sizes are symbols), the entry's configuration for all
sizes applies. A GPU without a table takes one of the same compute capability, as its multiprocessors are the
same; a table may name another one of these for what it lacks. Without a match the default applies.

Promise: a lookup never raises; it costs a dictionary look-up at run time and nothing in compiled code.
Entries measured with another Triton or another version of the kernel are ignored, with one warning.
"""

import ast
import functools
import hashlib
import io
import json
import logging
import math
import os
import re
import tokenize
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import triton

from triton_kernels.gpu import gpu_of

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "tuned"
FORMAT = 1
NEAR_ENOUGH = 3.0
"""Largest sum of |log2 ratio| over `near` for which an entry matches: a factor of 8 in all."""
ADVICE = "run: minisgl tune --model MODEL"

Config = TypeVar("Config", bound=tuple)


def tuned(
    default: Config,
    op: str,
    device: torch.device,
    dtype: torch.dtype,
    exact: tuple[int, ...],
    near: tuple[int, ...],
    size: int | None = None,
) -> Config:
    """The measured configuration for this shape on this GPU, of the default's type; else the default."""
    fields = _fields(op, device, dtype, exact, near, None if torch.compiler.is_compiling() else size)
    return default if fields is None else type(default)(*fields)


@torch.compiler.assume_constant_result
def _fields(
    op: str,
    device: torch.device,
    dtype: torch.dtype,
    exact: tuple[int, ...],
    near: tuple[int, ...],
    size: int | None,
) -> tuple[Any, ...] | None:
    """The configuration's values in their order; None = there is none."""
    choice = _choice(op, device, dtype, exact, near)
    return None if choice is None else choice.at(size)


@torch.compiler.assume_constant_result
def has_entry(op: str, device: torch.device, dtype: torch.dtype, exact: tuple[int, ...]) -> bool:
    """Whether this GPU's table has an entry of `op`, which must be one without `near`, for these numbers."""
    return _choice(op, device, dtype, exact, ()) is not None


class Choice(NamedTuple):
    """An entry: one configuration for all sizes, and configurations for single sizes."""

    for_all: tuple[Any, ...]
    by_size: tuple[tuple[float, tuple[Any, ...]], ...]  # (log2 of the size, configuration)

    def at(self, size: int | None) -> tuple[Any, ...]:
        """The configuration of the nearest size; without a size, the one for all sizes."""
        if size is None or not self.by_size:
            return self.for_all
        wanted = math.log2(max(1, size))
        return min(self.by_size, key=lambda pair: abs(pair[0] - wanted))[1]


@functools.cache
def _choice(
    op: str, device: torch.device, dtype: torch.dtype, exact: tuple[int, ...], near: tuple[int, ...]
) -> Choice | None:
    if device.type != "cuda":
        return None
    tables = _entries_in_use(torch.cuda.get_device_name(device), gpu_of(device).capability)
    found = (find_choice(entries, op, dtype_name(dtype), exact, near) for entries in tables)
    return next((choice for choice in found if choice is not None), None)


@functools.cache
def _entries_in_use(gpu: str, capability: tuple[int, int]) -> list[list[dict[str, Any]]]:
    """The usable entries for a GPU, its own table's first; logs one line if it has none of its own."""
    paths = find_tables(gpu, capability, FOLDER)
    if not paths:
        logger.warning("no tuned kernel configurations for %s, taking the defaults; %s", gpu, ADVICE)
    elif paths[0] != table_path(gpu, FOLDER):
        others = ", ".join(path.stem for path in paths)
        logger.info("kernel configurations for %s: those of %s, with the same multiprocessors", gpu, others)
    return [_usable_entries_of(path) for path in paths]


def _usable_entries_of(path: Path) -> list[dict[str, Any]]:
    try:
        return usable_entries(read_table(path))
    except (OSError, ValueError) as error:
        logger.warning("%s can't be read (%s), taking default configurations; %s", path, error, ADVICE)
        return []


def usable_entries(table: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries for this Triton and the current kernels; logs one line if any are ignored."""
    if table["triton"] != triton.__version__:
        logger.warning(
            "kernel configurations for %s were tuned with Triton %s, this is %s: taking the defaults; %s",
            table["gpu"], table["triton"], triton.__version__, ADVICE,
        )  # fmt: skip
        return []
    fresh = [entry for entry in table["entries"] if is_fresh(table, entry["op"])]
    stale = sorted({entry["op"] for entry in table["entries"]} - {entry["op"] for entry in fresh})
    if stale:
        logger.warning(
            "the kernels %s changed since they were tuned for %s: taking their defaults; %s",
            ", ".join(stale), table["gpu"], ADVICE,
        )  # fmt: skip
    return fresh


def is_fresh(table: dict[str, Any], op: str) -> bool:
    """Whether `op`'s entries were measured with the current version of the kernel."""
    known = table["kernels"].get(op)
    return known is not None and known["hash"] == kernel_hash(tuple(known["files"]))


def find_choice(
    entries: list[dict[str, Any]], op: str, dtype: str, exact: tuple[int, ...], near: tuple[int, ...]
) -> Choice | None:
    """The nearest matching entry; None = no match."""

    def distance(entry: dict[str, Any]) -> float:
        theirs = tuple(entry["near"].values())
        return sum(abs(math.log2(a / b)) for a, b in zip(near, theirs, strict=True))

    fitting = [
        entry
        for entry in entries
        if (entry["op"], entry["dtype"], tuple(entry["exact"].values())) == (op, dtype, exact)
        and len(entry["near"]) == len(near)
    ]
    best = min(fitting, key=distance, default=None)
    if best is None or distance(best) > NEAR_ENOUGH:
        return None
    by_size = [(math.log2(one["size"]), _values(one["config"])) for one in best["sizes"]]
    for_all = _values(best["config"])
    if all(config == for_all for _, config in by_size):
        by_size = []
    return Choice(for_all, tuple(by_size))


def _values(config: dict[str, Any]) -> tuple[Any, ...]:
    """The values in their order, those of configurations inside it as tuples."""
    return tuple(_values(value) if isinstance(value, dict) else value for value in config.values())


def as_dict(config: Any) -> dict[str, Any]:
    """A configuration (a NamedTuple, perhaps of others) as a table holds it."""
    return {
        name: as_dict(value) if isinstance(value, tuple) else value
        for name, value in config._asdict().items()
    }


def dtype_name(dtype: torch.dtype) -> str:
    """For example "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def table_path(gpu: str, folder: Path = FOLDER) -> Path:
    """Where the table of a GPU with this name lies, for example tuned/nvidia-h200.json."""
    return folder / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


def find_tables(gpu: str, capability: tuple[int, int], folder: Path = FOLDER) -> list[Path]:
    """The tables to look up in, in order: the GPU's own or else one of the same compute capability (the first
    by file name), then the one that it names for what it lacks, and so on."""
    path: Path | None = table_path(gpu, folder)
    if not path.is_file():
        path = next((one for one in sorted(folder.glob("*.json")) if _is_for(capability, one)), None)
    found: list[Path] = []
    while path is not None and path not in found:
        found.append(path)
        path = _otherwise(path)
    return found


def _is_for(capability: tuple[int, int], path: Path) -> bool:
    try:
        return read_table(path).get("capability") == list(capability)
    except (OSError, ValueError):  # a broken table of another GPU is not this one's problem
        return False


def _otherwise(path: Path) -> Path | None:
    """The table for what the one in `path` lacks."""
    try:
        name = read_table(path).get("otherwise")
    except (OSError, ValueError):
        return None
    other = path.with_name(f"{name}.json")
    return other if name and other.is_file() else None


def read_table(path: Path) -> dict[str, Any]:
    """The table in `path`.

    Raises:
        OSError: it can't be read.
        ValueError: it holds no table of this format.
    """
    table = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ValueError(f"no table of format {FORMAT}")
    return table


def new_table(gpu: str, capability: tuple[int, int], folder: Path = FOLDER) -> dict[str, Any]:
    """An empty table for this Triton and torch. What it lacks, the tables have that the GPU took before."""
    before = [path for path in find_tables(gpu, capability, folder) if path != table_path(gpu, folder)]
    return {
        "format": FORMAT,
        "gpu": gpu,
        "capability": list(capability),
        "otherwise": before[0].stem if before else None,
        "triton": triton.__version__,
        "torch": torch.__version__,
        "date": "",
        "kernels": {},
        "entries": [],
    }


def write_table(path: Path, table: dict[str, Any]) -> None:
    """Write the table atomically, with one line per entry."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    first = {name: value for name, value in table.items() if name != "entries"}
    head = json.dumps({**first, "entries": []}, indent=1).removesuffix("[]\n}")
    entries = ",\n".join(f"  {json.dumps(entry)}" for entry in table["entries"])
    beside.write_text(f"{head}[\n{entries}\n ]\n}}\n", encoding="utf-8")
    os.replace(beside, path)


@functools.cache
def kernel_hash(files: tuple[str, ...]) -> str:
    """Hash of the code in these files of this package, without comments, docstrings and blank lines."""
    digest = hashlib.sha256()
    for file in files:
        path = Path(__file__).parent / file
        digest.update(code_only(path.read_text(encoding="utf-8")).encode() if path.is_file() else b"")
    return digest.hexdigest()[:16]


def code_only(source: str) -> str:
    """Python source without comments, docstrings, blank lines and space at the ends of lines."""
    lines = [line.encode() for line in source.splitlines()]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.end_lineno:
            for number in range(node.lineno - 1, node.end_lineno):
                lines[number] = b""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            number, column = token.start[0] - 1, len(token.line[: token.start[1]].encode())
            lines[number] = lines[number][:column]
    return "\n".join(line.decode().rstrip() for line in lines if line.strip())
