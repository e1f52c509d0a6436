"""The attention backends, by their names in `--attention-backend`."""

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from minisgl.attention import torch as torch_backend
from minisgl.attention import triton as triton_backend
from minisgl.attention.choice import FA2, FA3, TORCH, TRITON, TRTLLM, Backends
from minisgl.attention.flashinfer import AttentionShape, Copy, FlashinferDecode, FlashinferPrefill
from minisgl.attention.interface import Attend, Backend, PrefillDecodePair, pair_backends
from minisgl.attention.trtllm import TrtllmAttention
from minisgl.errors import ConfigError
from triton_kernels.gpu import num_multiprocessors

logger = logging.getLogger(__name__)

STATELESS: dict[str, Attend] = {
    TRITON: PrefillDecodePair(triton_backend.attend, triton_backend.attend, decodes_with_triton=True),
    TORCH: torch_backend.attend,
}
"""The backends without state."""


def select(name: str) -> Attend:
    """The function of a stateless backend.

    Raises:
        ConfigError: there is no such backend.
    """
    if name not in STATELESS:
        raise ConfigError(f"--attention-backend must be one of {', '.join(STATELESS)}, got {name!r}")
    return STATELESS[name]


def build_backend(
    names: Backends,
    shape: AttentionShape,
    copy: Copy,
    *,
    buckets: tuple[int, ...],
    max_rows: int,
    max_context_tokens: int,
    load: Callable[[str], Any] = importlib.import_module,
) -> Backend:
    """Build the backends that `choice.choose` named, for a model of this shape.

    Args:
        buckets: batch sizes of decode steps with a CUDA graph.
        max_rows: most rows of a decode step.
        max_context_tokens: most tokens of a row.
        load: imports a package.

    Raises:
        ConfigError: the package of a backend can't be imported or does not run here.
    """
    if set(names) <= STATELESS.keys():
        prefill, decode = (Backend(select(name)) for name in names)
        return prefill if names.prefill == names.decode else pair_backends(prefill, decode)
    before = _allocated_bytes(shape.device)
    num_processors = num_multiprocessors(shape.device)
    try:
        flashinfer = load("flashinfer")
        logger.info(
            "attention by flashinfer %s; kernels that it has not compiled before take it some minutes",
            flashinfer.__version__,
        )
        backends = {name: Backend(attend) for name, attend in STATELESS.items()}
        if TRTLLM in names:
            backends[TRTLLM] = Backend(TrtllmAttention(max_context_tokens, shape.device).attend)
        prefill, decode = backends.get(names.prefill), backends.get(names.decode)
        if prefill is None:
            prompts = FlashinferPrefill(flashinfer, _KERNELS[names.prefill], shape, copy, num_processors)
            prefill = Backend(prompts.attend, plan_prefill=prompts.plan)
        if decode is None:
            # The smallest bucket may have more rows than a step ever has.
            most_rows = max((max_rows, *buckets))
            max_pages = most_rows * -(-max_context_tokens // shape.page_size)
            tokens = FlashinferDecode(
                flashinfer, shape, copy, num_processors, buckets=buckets, max_pages=max_pages
            )
            decode = Backend(tokens.attend, plan_decode=tokens.plan)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a third-party package that calls compilers may raise anything
        raise ConfigError(
            f"--attention-backend {names}: flashinfer does not run here; use --attention-backend {TRITON}. "
            f"It said: {type(error).__name__}: {error}"
        ) from error
    return pair_backends(prefill, decode)._replace(num_bytes=_allocated_bytes(shape.device) - before)


_KERNELS = {FA2: "fa2", FA3: "fa3"}


def _allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
