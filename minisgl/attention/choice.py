"""Chooses the attention backends for prompts and for decode steps.

Promise: the choice depends only on the arguments. A backend that can't run is refused by name, with the
reason and the alternatives. Imports no torch.
"""

from collections.abc import Callable
from typing import NamedTuple

from minisgl.errors import ConfigError

TRITON, TORCH, TRTLLM = "triton", "torch", "trtllm"
FLASHINFER, FA2, FA3 = "flashinfer", "flashinfer-fa2", "flashinfer-fa3"
NAMES = (TRITON, FLASHINFER, FA2, FA3, TRTLLM, TORCH)
"""In order of preference if the user asks for none.

    triton          our kernels; no planning, so decode and short prompts run as CUDA graphs
    flashinfer      fa3 for prompts on Hopper GPUs, else fa2; fa2 for decode
    flashinfer-fa2  flashinfer's FlashAttention 2 kernels
    flashinfer-fa3  flashinfer's FlashAttention 3 kernels for prompts; decode uses fa2
    trtllm          TensorRT-LLM's kernels through flashinfer; Blackwell only
    torch           the plain reference
"""
WINDOW_TILE_TOKENS = 128
"""Our prefill kernels read keys in tiles of at most so many tokens, from a multiple of their size on. What a
window masks in the first one must be numbers."""
FLASHINFER_HEAD_DIMS = (64, 128, 256)
TRTLLM_PAGE_SIZES = (16, 32, 64)
OLDEST_GPU = (8, 0)
"""The compute capability from which our kernels and flashinfer's run; triton_kernels/gpu.py says why."""

OLDEST_FP8_GPU = (8, 9)
"""The compute capability from which GPUs convert FP8 numbers."""


class Backends(NamedTuple):
    """One backend for prompts and one for decode steps."""

    prefill: str
    decode: str

    def __str__(self) -> str:
        return self.prefill if self.prefill == self.decode else f"{self.prefill},{self.decode}"


class AttentionEnvironment(NamedTuple):
    """The device, package and model facts that decide which backends can run."""

    device: str  # "cuda" or "cpu"
    capability: tuple[int, int]  # of the GPU, as (9, 0); (0, 0) = none
    flashinfer: str  # version of the installed package; empty = there is none
    dtype: str  # "bfloat16", "float16" or "float32"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    has_softcap: bool = False  # the model has a soft cap of attention scores
    has_fp8_cache: bool = False  # keys and values are stored in FP8
    has_sinks: bool = False  # heads have a score without a value
    has_two_sizes: bool = False  # some layers have heads of another size; head_dim is the larger


def parse(text: str) -> Backends:
    """Parse "a" (both) or "a,b" (prefill and decode). "flashinfer" is not resolved yet.

    Raises:
        ConfigError: a backend is unknown, or there are more than two.
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


def choose(asked: str | None, environment: AttentionEnvironment) -> Backends:
    """The backends by their exact names (no "flashinfer"): the user's choice, or the first that can run.

    Raises:
        ConfigError: a backend that the user asks for can't run here.
    """
    if asked is None:
        return _exact(available(environment)[0], environment)
    backends = parse(asked)
    for name in dict.fromkeys(backends):
        reason = reason_unavailable(name, environment)
        if reason is not None:
            others = ", ".join(available(environment))
            raise ConfigError(f"--attention-backend {asked}: {name} {reason}; what runs here: {others}")
    return Backends(
        _exact(backends.prefill, environment).prefill, _exact(backends.decode, environment).decode
    )


def available(environment: AttentionEnvironment) -> list[str]:
    """The backends that can run in this environment, best first."""
    return [name for name in NAMES if reason_unavailable(name, environment) is None]


def reason_unavailable(name: str, environment: AttentionEnvironment) -> str | None:
    """Why a backend can't run, phrased to follow its name in a sentence; None = it can run."""
    return _OBSTACLES[name](environment)


def _exact(name: str, environment: AttentionEnvironment) -> Backends:
    """The exact backends that one name stands for."""
    if name == FLASHINFER:
        return Backends(FA3 if _fa3_obstacle(environment) is None else FA2, FA2)
    return Backends(name, FA2 if name == FA3 else name)


def _triton_obstacle(environment: AttentionEnvironment) -> str | None:
    if environment.device != "cuda":
        return "needs --device cuda"
    if (0, 0) < environment.capability < OLDEST_GPU:
        return _too_old(environment)
    if environment.has_fp8_cache and (0, 0) < environment.capability < OLDEST_FP8_GPU:
        return f"converts FP8 from compute 8.9 on, and this is {_compute(environment)}"
    if environment.head_dim > 512 or environment.head_dim % 8:
        return f"takes head dims up to 512 that are multiples of 8, and the model's is {environment.head_dim}"
    if environment.num_heads // environment.num_kv_heads > 16:
        group = environment.num_heads // environment.num_kv_heads
        return f"takes at most 16 query heads for each KV head, and the model has {group}"
    return None


def _flashinfer_obstacle(environment: AttentionEnvironment) -> str | None:
    if environment.device != "cuda":
        return "needs --device cuda"
    if not environment.flashinfer:
        return "needs the package flashinfer-python (pip install 'minisgl[gpu]')"
    if environment.dtype not in ("bfloat16", "float16"):
        return f"takes bfloat16 and float16, and --dtype is {environment.dtype}"
    if environment.head_dim not in FLASHINFER_HEAD_DIMS:
        dims = ", ".join(map(str, FLASHINFER_HEAD_DIMS))
        return f"takes head dims of {dims}, and the model's is {environment.head_dim}"
    if environment.has_fp8_cache:
        return "reads no FP8 cache (--kv-dtype fp8)"
    if environment.has_softcap:
        return "has no soft cap of attention scores, which the model needs"
    if environment.has_two_sizes:
        return "has heads of one size in all layers, and the model of two"
    if environment.has_sinks:
        return "has no sinks in this engine, which the model's heads have"
    if environment.capability < OLDEST_GPU:
        return _too_old(environment)
    return None


def _fa3_obstacle(environment: AttentionEnvironment) -> str | None:
    if environment.device == "cuda" and environment.capability[0] != 9:
        return f"needs a Hopper GPU (compute 9.0), and this is {_compute(environment)}"
    return _flashinfer_obstacle(environment)


def _trtllm_obstacle(environment: AttentionEnvironment) -> str | None:
    if environment.device == "cuda" and environment.capability[0] != 10:
        return f"needs a Blackwell GPU (compute 10.0), and this is {_compute(environment)}"
    if environment.device == "cuda" and environment.page_size not in TRTLLM_PAGE_SIZES:
        sizes = ", ".join(map(str, TRTLLM_PAGE_SIZES))
        return f"takes pages of {sizes} tokens, and --page-size is {environment.page_size}"
    return _flashinfer_obstacle(environment)


def _too_old(environment: AttentionEnvironment) -> str:
    return f"needs an Ampere GPU or a newer one (compute 8.0), and this is {_compute(environment)}"


def _compute(environment: AttentionEnvironment) -> str:
    return f"compute {environment.capability[0]}.{environment.capability[1]}"


_OBSTACLES: dict[str, Callable[[AttentionEnvironment], str | None]] = {
    TRITON: _triton_obstacle,
    FLASHINFER: _flashinfer_obstacle,
    FA2: _flashinfer_obstacle,
    FA3: _fa3_obstacle,
    TRTLLM: _trtllm_obstacle,
    TORCH: lambda environment: None,
}
