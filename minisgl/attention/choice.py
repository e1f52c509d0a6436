"""Which attention backend runs a step's prompts and which its decodes: the one asked for, or the best.

Promise: a choice depends on its arguments alone, and whatever can't run is refused by name, with the reason
and with what can.

    triton          our kernels; nothing to plan, so decode and short prompts are recorded as CUDA graphs
    flashinfer      fa3 for prompts where the GPU is a Hopper, else fa2; fa2 for decode
    flashinfer-fa2  flashinfer's kernels after FlashAttention 2
    flashinfer-fa3  its kernels after FlashAttention 3, for prompts; decode is fa2
    trtllm          TensorRT-LLM's kernels, which flashinfer fetches and calls; Blackwell only
    torch           the plain reference
"""

from collections.abc import Callable
from typing import NamedTuple

from minisgl.errors import ConfigError

TRITON, TORCH, TRTLLM = "triton", "torch", "trtllm"
FLASHINFER, FA2, FA3 = "flashinfer", "flashinfer-fa2", "flashinfer-fa3"
NAMES = (TRITON, FLASHINFER, FA2, FA3, TRTLLM, TORCH)
"""In the order of preference, where nothing was asked for."""
FLASHINFER_HEAD_DIMS = (64, 128, 256)
TRTLLM_PAGE_SIZES = (16, 32, 64)


class Backends(NamedTuple):
    """One backend for each kind of work."""

    prefill: str
    decode: str

    def __str__(self) -> str:
        return self.prefill if self.prefill == self.decode else f"{self.prefill},{self.decode}"


class Place(NamedTuple):
    """What decides whether a backend can run."""

    device: str  # "cuda" or "cpu"
    capability: tuple[int, int]  # of the GPU, as (9, 0); (0, 0) = none
    flashinfer: str  # version of the installed package; empty = there is none
    dtype: str  # "bfloat16", "float16" or "float32"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int


def parse(text: str) -> Backends:
    """ "a" is both, "a,b" is prefill and decode; "flashinfer" may still be in it.

    Raises:
        ConfigError: there is no such backend, or they are more than two.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 2 or not set(parts) <= set(NAMES):
        raise ConfigError(
            f"--attention-backend must be one of {', '.join(NAMES)}, or two of them as prefill,decode "
            f"(for example {TRITON},{FLASHINFER}); got {text!r}"
        )
    if len(parts) == 2 and parts[1] == FA3:
        raise ConfigError(
            f"--attention-backend {text}: {FA3} is for prompts; for decode take {FA2}, which flashinfer "
            "itself does"
        )
    return Backends(parts[0], parts[-1])


def choose(asked: str | None, place: Place) -> Backends:
    """The backends by their exact names (no "flashinfer"): those asked for, or the first that can run.

    Raises:
        ConfigError: what was asked for can't run here.
    """
    if asked is None:
        return _exact(available(place)[0], place)
    backends = parse(asked)
    for name in dict.fromkeys(backends):
        reason = obstacle(name, place)
        if reason is not None:
            others = ", ".join(available(place))
            raise ConfigError(f"--attention-backend {asked}: {name} {reason}; what runs here: {others}")
    return Backends(_exact(backends.prefill, place).prefill, _exact(backends.decode, place).decode)


def available(place: Place) -> list[str]:
    """The backends that can run there, best first."""
    return [name for name in NAMES if obstacle(name, place) is None]


def obstacle(name: str, place: Place) -> str | None:
    """Why a backend can't run there, as what follows its name in a sentence; None = it can."""
    return _OBSTACLES[name](place)


def _exact(name: str, place: Place) -> Backends:
    """What one name stands for in both kinds of work."""
    if name == FLASHINFER:
        return Backends(FA3 if _fa3_obstacle(place) is None else FA2, FA2)
    return Backends(name, FA2 if name == FA3 else name)


def _triton_obstacle(place: Place) -> str | None:
    if place.device != "cuda":
        return "needs --device cuda"
    if place.head_dim > 256 or place.head_dim % 8:
        return f"takes head dims up to 256 that are multiples of 8, and the model's is {place.head_dim}"
    if place.num_heads // place.num_kv_heads > 16:
        group = place.num_heads // place.num_kv_heads
        return f"takes at most 16 query heads for each KV head, and the model has {group}"
    return None


def _flashinfer_obstacle(place: Place) -> str | None:
    if place.device != "cuda":
        return "needs --device cuda"
    if not place.flashinfer:
        return "needs the package flashinfer-python (pip install 'minisgl[gpu]')"
    if place.dtype not in ("bfloat16", "float16"):
        return f"takes bfloat16 and float16, and --dtype is {place.dtype}"
    if place.head_dim not in FLASHINFER_HEAD_DIMS:
        dims = ", ".join(map(str, FLASHINFER_HEAD_DIMS))
        return f"takes head dims of {dims}, and the model's is {place.head_dim}"
    if place.capability < (8, 0):
        return f"needs an Ampere GPU or a newer one (compute 8.0), and this is {_compute(place)}"
    return None


def _fa3_obstacle(place: Place) -> str | None:
    if place.device == "cuda" and place.capability[0] != 9:
        return f"needs a Hopper GPU (compute 9.0), and this is {_compute(place)}"
    return _flashinfer_obstacle(place)


def _trtllm_obstacle(place: Place) -> str | None:
    if place.device == "cuda" and place.capability[0] != 10:
        return f"needs a Blackwell GPU (compute 10.0), and this is {_compute(place)}"
    if place.device == "cuda" and place.page_size not in TRTLLM_PAGE_SIZES:
        sizes = ", ".join(map(str, TRTLLM_PAGE_SIZES))
        return f"takes pages of {sizes} tokens, and --page-size is {place.page_size}"
    return _flashinfer_obstacle(place)


def _compute(place: Place) -> str:
    return f"compute {place.capability[0]}.{place.capability[1]}"


_OBSTACLES: dict[str, Callable[[Place], str | None]] = {
    TRITON: _triton_obstacle,
    FLASHINFER: _flashinfer_obstacle,
    FA2: _flashinfer_obstacle,
    FA3: _fa3_obstacle,
    TRTLLM: _trtllm_obstacle,
    TORCH: lambda place: None,
}
