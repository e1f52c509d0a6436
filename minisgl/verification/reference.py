"""What transformers computes: the same sequences on the same weights, in float32 or in 16 bits.

Promise: the whole model lies on the device where that fits. Else it stays in host memory as the checkpoint
stores it, and each layer goes to the device, in the wanted dtype, while it runs.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from minisgl.config import GIB
from minisgl.errors import ConfigError, ModelError
from minisgl.model_config.config import DTYPE_BYTES, ModelConfig
from minisgl.verification.traces import (
    ATTENTION,
    ATTENTION_INPUT,
    EMBEDDING,
    LOGITS,
    MLP,
    MLP_INPUT,
    OUTPUT,
    Place,
    Recorder,
    Trace,
)

SPARE = 1.15
"""Memory beside the weights: activations, and what the allocator loses."""
SPARE_BYTES = 1 << 30


class Memory(NamedTuple):
    """Bytes that can still be allocated."""

    device_bytes: int
    host_bytes: int


class Tokens(NamedTuple):
    """Tokens to compute, and which positions to keep."""

    token_ids: list[int]
    kept: np.ndarray  # int64 [K]


class Computed(NamedTuple):
    """The traces of all sequences, and how they were made."""

    traces: list[Trace]
    layer_by_layer: bool
    peak_device_bytes: int  # 0 on the CPU


def fits_whole(num_parameters: int, dtype: str, device: str, memory: Memory) -> bool:
    """Whether transformers' model fits on the device at once."""
    needed = num_parameters * DTYPE_BYTES[dtype] * SPARE + SPARE_BYTES
    return needed <= (memory.host_bytes if device == "cpu" else memory.device_bytes)


def reference_traces(
    folder: Path,
    config: ModelConfig,
    sequences: Sequence[Tokens],
    *,
    dtype: str,
    device: str,
    num_parameters: int,
    memory: Memory,
) -> Computed:
    """Traces of the sequences by transformers' model in `folder`, computed in `dtype`.

    Raises:
        ConfigError: neither the device nor the host has the memory.
        ModelError: transformers can't load the folder.
    """
    whole = fits_whole(num_parameters, dtype, device, memory)
    held = dtype if whole else config.checkpoint_dtype
    needed = int(num_parameters * DTYPE_BYTES[held] * SPARE)
    if needed > memory.host_bytes:
        raise ConfigError(
            f"transformers needs {needed / GIB:.1f} GiB of host memory to load this model in {held}, and "
            f"{memory.host_bytes / GIB:.1f} GiB are free; verify it on a machine with more"
        )
    model = _load(folder, held)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with ExitStack() as stack:
        if whole:
            model.to(device)
        else:
            stack.enter_context(_streamed(model, getattr(torch, dtype), torch.device(device)))
        traces = [_trace(model, sequence, device) for sequence in sequences]
    peak_bytes = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    del model
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return Computed(traces, not whole, peak_bytes)


def _load(folder: Path, dtype: str) -> Any:
    import transformers  # slow to import

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True
        ).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"transformers can't load {folder}: {first}") from error


@torch.no_grad()  # not inference mode, in which no tensor of a module could be moved
def _trace(model: Any, sequence: Tokens, device: str) -> Trace:
    layers = _text_layers(model)
    with Recorder(sequence.kept) as recorder:
        recorder.watch_input(layers[0], Place(0, EMBEDDING))
        for index, layer in enumerate(layers):
            attention = getattr(layer, "self_attn", None) or layer.linear_attn
            recorder.watch_input(attention, Place(index, ATTENTION_INPUT))
            recorder.watch_output(attention, Place(index, ATTENTION))
            recorder.watch_input(layer.mlp, Place(index, MLP_INPUT))
            recorder.watch_output(layer.mlp, Place(index, MLP))
            recorder.watch_output(layer, Place(index, OUTPUT))
        logits = model(
            torch.tensor([sequence.token_ids], device=device),
            use_cache=False,
            logits_to_keep=torch.from_numpy(sequence.kept).to(device),
        ).logits[0]
    return {**recorder.trace, Place(len(layers), LOGITS): logits.cpu()}


def _text_layers(model: Any) -> Any:
    """The decoder blocks, a module list."""
    return model.get_decoder().layers


@contextmanager
def _streamed(model: Any, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Hooks that move the parameters of each layer, embedding, norm and head to the device while it runs."""
    with ExitStack() as stack:
        layers = list(_text_layers(model))
        inside = {id(module) for layer in layers for module in layer.modules()}
        leaves = [
            module
            for module in model.modules()
            if id(module) not in inside and (list(module.parameters(recurse=False)) or _buffers(module))
        ]
        for module in (*layers, *leaves):
            _undo = _Streamed(module, dtype, device)
            stack.callback(_undo.remove)
        yield


def _buffers(module: nn.Module) -> list[Tensor]:
    return list(module.buffers(recurse=False))


class _Streamed:
    """A module whose tensors lie on the device only while it runs. Its buffers stay in their own dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._module, self._dtype, self._device = module, dtype, device
        self._host: list[tuple[Tensor, Tensor]] = []
        self._hooks = [
            module.register_forward_pre_hook(lambda _, args: self._move_in(), prepend=True),
            module.register_forward_hook(lambda _, args, out: self._move_out(), always_call=True),
        ]
        for inner in module.modules():
            scale = getattr(inner, "scalar_embed_scale", None)
            if scale is not None:  # Gemma's, which a checkpoint's dtype has rounded
                inner.embed_scale = torch.tensor(scale, dtype=torch.float32)

    def _move_in(self) -> None:
        for parameter in self._module.parameters():
            self._host.append((parameter, parameter.data))
            parameter.data = parameter.data.to(self._device).to(self._dtype)
        for buffer in self._module.buffers():
            self._host.append((buffer, buffer.data))
            buffer.data = buffer.data.to(self._device)

    def _move_out(self) -> None:
        while self._host:
            tensor, stored = self._host.pop()
            tensor.data = stored

    def remove(self) -> None:
        self._move_out()
        for hook in self._hooks:
            hook.remove()
