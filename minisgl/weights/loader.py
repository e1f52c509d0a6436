"""Streams a checkpoint's safetensors into the parameters of a model that is already allocated.

Promise: a checkpoint that does not fit is refused before anything is copied; one file is mapped into memory
at a time, and copied piece by piece.
"""

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minisgl.config import ModelConfig
from minisgl.errors import ModelError
from minisgl.parallel.shards import shard_of
from minisgl.weights.progress import Progress, no_progress

PIECE_BYTES = 64 << 20
INDEX = "model.safetensors.index.json"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
NAMES_SHOWN = 6


class LoadableModel(Protocol):
    """A model that says where each of the checkpoint's tensors goes."""

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """By the checkpoint's name, views of the parameters to copy into: a rank's part of each where they
        are DTensors."""
        ...

    def loaded(self) -> None:
        """Called once, when everything is copied."""
        ...


def load_weights(
    model: LoadableModel,
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    on_progress: Progress = no_progress,
) -> int:
    """Fill `model`, whose parameters are allocated on `device`, from the safetensors in `folder`.

    Returns the bytes of the parameters that were filled.

    Raises:
        ModelError: files are missing or damaged, or tensors are missing, unexpected or of another shape;
            the message lists them.
    """
    targets = model.checkpoint_tensors()
    for name, view in targets.items():
        assert view.dtype in (dtype, torch.float32), f"{name} is allocated as {view.dtype}, not as {dtype}"
        assert view.device.type == torch.device(device).type, f"{name} lies on {view.device}, not on {device}"
    files = checkpoint_files(folder)
    _check_names_and_shapes(targets, _headers(files), config, folder)

    total = sum(shard_of(target).memory.nbytes for target in targets.values())
    done = 0
    on_progress("loading the weights", done, total)
    for path in files:
        # Mapped one after the other: what was read of a file goes with its mapping.
        with _readable(path), safe_open(str(path), framework="pt", device="cpu") as file, torch.no_grad():
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                if name not in targets:
                    continue
                memory, place = shard_of(targets[name])
                if place is None:
                    memory.zero_()
                    done += memory.nbytes
                for rows, piece in _pieces(file.get_slice(name), place) if place is not None else ():
                    memory[rows].copy_(piece)
                    done += piece.numel() * memory.itemsize
                    on_progress("loading the weights", done, total)
    with torch.no_grad():
        model.loaded()
    return total


class Stored(NamedTuple):
    """What a file's header says of a tensor."""

    shape: list[int]
    dtype: str  # as safetensors writes it, for example "BF16"


def _headers(files: list[Path]) -> dict[str, Stored]:
    """Every tensor of the files, by name.

    Raises:
        ModelError: a file is damaged, or two hold the same name.
    """
    found: dict[str, Stored] = {}
    place: dict[str, Path] = {}
    for path in files:
        with _readable(path), safe_open(str(path), framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                if name in found:
                    raise ModelError(f"{place[name]} and {path} both hold {name}; remove one of them")
                entry = file.get_slice(name)
                found[name], place[name] = Stored(entry.get_shape(), entry.get_dtype()), path
    return found


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint in `folder`.

    Raises:
        ModelError: there are none, or the index names one that is not there.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [folder / name for name in names]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not a safetensors index: {error!r}") from error
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            raise ModelError(
                f"{folder} is incomplete: {_shown(absent)} named in {INDEX} missing; download the model again"
            )
        return files
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        hint = ""
        if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
            hint = "; its PyTorch files are not read, take a version with safetensors"
        raise ModelError(f"{folder} holds no *.safetensors{hint} (--dummy-weights runs without weights)")
    return files


def _check_names_and_shapes(
    targets: dict[str, Tensor], stored: dict[str, Stored], config: ModelConfig, folder: Path
) -> None:
    """Compare what the model needs with what the files' headers say.

    Raises:
        ModelError: something is missing, unexpected, of another shape or no floating-point number.
    """
    complaints = []
    missing = sorted(targets.keys() - stored.keys())
    if missing:
        complaints.append(f"missing: {_shown(missing)}")
    unexpected = sorted(name for name in stored.keys() - targets.keys() if not _ignorable(name, config))
    if unexpected:
        complaints.append(f"not part of {config.architecture}: {_shown(unexpected)}")
    common = sorted(targets.keys() & stored.keys())
    shapes = [
        f"{name} is {stored[name].shape}, needed {list(targets[name].shape)}"
        for name in common
        if stored[name].shape != list(targets[name].shape)
    ]
    if shapes:
        complaints.append(f"wrong shape: {_shown(shapes)}")
    kinds = [f"{name} is {stored[name].dtype}" for name in common if stored[name].dtype not in FLOAT_DTYPES]
    if kinds:
        complaints.append(f"quantized or no numbers: {_shown(kinds)}")
    if complaints:
        raise ModelError(f"the weights in {folder} do not fit its config.json; " + "; ".join(complaints))


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Whether a tensor may lie in the checkpoint although the model does not use it."""
    copy_of_the_embedding = name == "lm_head.weight" and config.tie_word_embeddings
    return copy_of_the_embedding or name.endswith("rotary_emb.inv_freq")


def _pieces(stored: Any, place: tuple[slice, ...]) -> Iterator[tuple[slice, Tensor]]:
    """A part of the tensor in pieces of at most about PIECE_BYTES; rows count from the part's first."""
    all_rows, *rest = place
    row_elements = math.prod(columns.stop - columns.start for columns in rest)
    rows_per_piece = max(1, PIECE_BYTES // (8 * max(1, row_elements)))
    for begin in range(all_rows.start, all_rows.stop, rows_per_piece):
        end = min(begin + rows_per_piece, all_rows.stop)
        piece = stored[(slice(begin, end), *rest)]
        yield slice(begin - all_rows.start, end - all_rows.start), piece


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what a damaged file makes the library raise into our error."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} can't be read ({error}); download the model again") from error


def _shown(items: Iterable[str]) -> str:
    items = list(items)
    more = f" and {len(items) - NAMES_SHOWN} more" if len(items) > NAMES_SHOWN else ""
    return ", ".join(items[:NAMES_SHOWN]) + more
