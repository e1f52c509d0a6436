"""Copies a checkpoint's safetensors into the allocated parameters of a model.

Promise: a checkpoint that does not fit is refused before any copy. Beside the model, host memory holds only
READERS pieces of a tensor, whatever the size of the files.
"""

import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minisgl.errors import ModelError
from minisgl.model_config.config import ModelConfig
from minisgl.parallel.shards import shard_of
from minisgl.progress import BYTES, Progress, no_progress
from minisgl.weights.fitting import (
    DTYPES,
    FP8,
    WORDS,
    StoredTensor,
    check_fit,
    is_shared,
    joined_names,
    parts_of_each,
    take_tensors_to_compute,
    without_optional,
)
from triton_kernels.quantize_fp8 import GROUP, quantize_weight_fp8
from triton_kernels.quantize_int4 import round_weight_int4

READERS = {"cuda": 8, "cpu": 2}
"""Reader threads by device; each has its own buffer. On CPU a copy uses all cores while the other reads."""
PIECE_BYTES = 16 << 20
INDEX = "model.safetensors.index.json"
VISION_PREFIXES = (
    *("vision_tower.", "multi_modal_projector.", "model.visual."),
    *("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
)


class LoadableModel(Protocol):
    """A model that names the memory of each checkpoint tensor."""

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Views of the parameters to fill, by the checkpoint's names. A DTensor gets this rank's part."""
        ...

    def finish_loading(self) -> None:
        """Called once, after everything is copied."""
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

    If `config` says so, unquantized weights are quantized on the way, on `device`.

    Returns the bytes of the parameters that were filled.

    Raises:
        ModelError: files are missing or damaged, or tensors are missing, unexpected or of the wrong shape;
            the message lists them.
    """
    targets = dict(model.checkpoint_tensors())
    for name, view in targets.items():
        allowed = (dtype, torch.float32, DTYPES[FP8], DTYPES[WORDS], torch.uint8)
        assert view.dtype in allowed, f"{name} is allocated as {view.dtype}, not as {dtype}"
        assert view.device.type == torch.device(device).type, f"{name} lies on {view.device}, not on {device}"
    stored = _without_prefix(_read_headers(checkpoint_files(folder)), config.checkpoint_prefix)
    computed = take_tensors_to_compute(targets, config)
    parts = parts_of_each(stored, without_optional(targets, stored, config))
    stored = check_fit(parts, stored, config, folder)

    total = sum(
        sum(part.nbytes for part in _memories(target, computed)) for each in parts.values() for target in each
    )
    done = 0
    on_progress("loading the weights", done, total, BYTES)
    pieces: list[Piece] = []  # in the order of the files
    for name in sorted(parts, key=lambda name: (stored[name].path, stored[name].begin)):
        begin = stored[name].begin
        for target in parts[name]:
            memory, place = shard_of(target)
            if place is None:
                memory.zero_()
                done += memory.nbytes
            else:
                pieces += _pieces(stored[name], begin, place, _memories(target, computed))
            if not is_shared(stored[name], parts[name]):
                begin += target.numel() * DTYPES[stored[name].dtype].itemsize
    for num_bytes in _copy_pieces(pieces, torch.device(device)):
        done += num_bytes
        on_progress("loading the weights", done, total, BYTES)
    model.finish_loading()
    return total


def _memories(target: Tensor, computed: dict[int, tuple[Tensor, Tensor]]) -> list[Tensor]:
    """What is filled from a checkpoint tensor: the target's memory, or that of numbers and scales."""
    return [shard_of(one).memory for one in computed.get(id(target), (target,))]


class Piece(NamedTuple):
    """Some rows of a stored tensor, and where they go."""

    path: Path
    begin: int  # offset of the rows' bytes in the file
    shape: tuple[int, ...]  # of the rows in the file
    dtype: torch.dtype
    columns: tuple[slice, ...]  # the slice of the rows to copy
    target: Tensor
    scales: Tensor | None = None
    """Of the target, if the rows have to be quantized: [rows, 1], [blocks of rows, blocks of columns], or of
    4-bit numbers [rows, groups]."""

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def _read_headers(files: list[Path]) -> dict[str, StoredTensor]:
    """Every tensor of the files, by name.

    Raises:
        ModelError: a file is damaged, or two files hold a tensor of the same name.
    """
    found: dict[str, StoredTensor] = {}
    for path in files:
        # The library checks the header but does not tell the tensors' offsets.
        with (
            _damaged_file_errors(path),
            safe_open(str(path), framework="pt", device="cpu"),
            path.open("rb") as file,
        ):
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if name in found:
                raise ModelError(f"{found[name].path} and {path} both hold {name}; remove one of them")
            begin = 8 + header_bytes + entry["data_offsets"][0]
            found[name] = StoredTensor(path, entry["shape"], entry["dtype"], begin)
    return found


def _without_prefix(stored: dict[str, StoredTensor], prefix: str) -> dict[str, StoredTensor]:
    """Remove the prefix of the text model's names, and drop the vision tensors."""
    if not prefix:
        return stored
    inner = "model." if prefix.startswith("model.") else ""
    return {
        (inner + name.removeprefix(prefix) if name.startswith(prefix) else name): entry
        for name, entry in stored.items()
        if name.startswith(prefix) or not name.startswith(VISION_PREFIXES)
    }


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint in `folder`.

    Raises:
        ModelError: there are none, or the index names a missing file.
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
                f"{folder} is incomplete: {joined_names(absent)} named in {INDEX} missing; "
                "download the model again"
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


def _pieces(
    stored: StoredTensor,
    begin: int,
    place: tuple[slice, ...],
    memories: list[Tensor],
) -> Iterator[Piece]:
    """Split the copy into pieces of about PIECE_BYTES.

    Args:
        begin: offset in the file of the tensor that `place` is a slice of.
        memories: where the values go; if they are quantized on the way, numbers and scales.
    """
    rows, *columns = place
    memory, scales = (*memories, None)[:2]
    assert memory is not None
    dtype = DTYPES[stored.dtype]
    row_shape = stored.shape[1:]
    row_bytes = math.prod(row_shape) * dtype.itemsize
    step = max(1, PIECE_BYTES // max(1, row_bytes))
    unit = 1
    if scales is not None and len(scales) < len(memory):  # of blocks, which no piece may cut
        step, unit = -(-step // GROUP) * GROUP, GROUP
    for first in range(rows.start, rows.stop, step):
        last = min(first + step, rows.stop)
        yield Piece(
            path=stored.path,
            begin=begin + first * row_bytes,
            shape=(last - first, *row_shape),
            dtype=dtype,
            columns=tuple(columns),
            target=memory[first - rows.start : last - rows.start],
            scales=None
            if scales is None
            else scales[(first - rows.start) // unit : -(-(last - rows.start) // unit)],
        )


def _copy_pieces(pieces: list[Piece], device: torch.device) -> Iterator[int]:
    """Copy all pieces; yields the bytes of each piece after its copy.

    Raises:
        ModelError: a file can't be read to its end.
    """
    largest = max((piece.num_bytes for piece in pieces), default=0)
    num_readers = READERS[device.type]
    buffers: SimpleQueue[Tensor] = SimpleQueue()
    for _ in range(num_readers):
        # From page-locked memory the device copies by itself.
        buffers.put(torch.empty(largest, dtype=torch.uint8, pin_memory=device.type == "cuda"))

    with ExitStack() as stack:
        files = {path: stack.enter_context(path.open("rb")) for path in {piece.path for piece in pieces}}

        def copy(piece: Piece) -> int:
            buffer = buffers.get()
            read = buffer[: piece.num_bytes]
            try:
                with _damaged_file_errors(piece.path):
                    _read(files[piece.path].fileno(), read.numpy().data, piece.begin)
                rows = read.view(piece.dtype).view(piece.shape)
                if piece.scales is None:
                    piece.target.copy_(rows[(slice(None), *piece.columns)], non_blocking=True)
                else:
                    _quantize(piece, rows.to(piece.target.device, non_blocking=True))
                if device.type == "cuda":
                    torch.cuda.current_stream(piece.target.device).synchronize()
            finally:
                buffers.put(buffer)
            return piece.target.nbytes + (0 if piece.scales is None else piece.scales.nbytes)

        pool = stack.enter_context(ThreadPoolExecutor(num_readers, thread_name_prefix="read-weights"))
        stack.callback(pool.shutdown, cancel_futures=True)  # after an error, do not read the rest
        yield from pool.map(copy, pieces)


def _quantize(piece: Piece, rows: Tensor) -> None:
    """Fill a piece's target and scales from `rows`, which are as wide as in the file."""
    assert piece.scales is not None
    (columns,) = piece.columns
    if piece.target.dtype == torch.uint8:
        rows = rows[:, columns]
        group = rows.shape[1] // piece.scales.shape[1]
        numbers, scales, _ = round_weight_int4(rows, group, dtype=piece.scales.dtype)
        piece.target.copy_(numbers[:, ::2] | numbers[:, 1::2] << 4)
        piece.scales.copy_(scales)
        return
    has_blocks = len(piece.scales) < len(rows) or piece.scales.shape[1] > 1
    values, scales = quantize_weight_fp8(rows, has_blocks)
    piece.target.copy_(values[:, columns])
    if has_blocks:
        piece.scales.copy_(scales[:, columns.start // GROUP : -(-columns.stop // GROUP)])
    else:
        piece.scales.copy_(scales.unsqueeze(1))


def _read(file: int, into: memoryview, begin: int) -> None:
    """Fill `into` with the file's bytes from offset `begin`."""
    while into:
        count = os.preadv(file, [into], begin)
        if count == 0:
            raise OSError("it ends too early")
        into, begin = into[count:], begin + count


@contextmanager
def _damaged_file_errors(path: Path) -> Iterator[None]:
    """Turn the library's errors about a damaged file into a ModelError."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} can't be read ({error}); download the model again") from error
