"""Why the engine runs with its settings, in words.

Promise: a pure function; nothing is decided here (`resolve.py` does that).
"""

from typing import NamedTuple

from minisgl.attention.choice import TRITON, parse
from minisgl.config.engine import DeviceFacts, EngineConfig, ResolvedConfig
from minisgl.model_config.config import ModelConfig


class ChosenSetting(NamedTuple):
    """One setting that the engine would choose, with the reason."""

    flag: str
    value: str
    why: str


def chosen_settings(
    config: EngineConfig, resolved: ResolvedConfig, model: ModelConfig, facts: DeviceFacts
) -> list[ChosenSetting]:
    """The settings that matter most, as resolved, and why each has its value."""
    on_cuda = resolved.device == "cuda"
    seen = f"torch sees a CUDA GPU ({facts.cuda_name})" if facts.has_cuda else "torch sees no CUDA GPU"
    dtype_reason = f"the checkpoint's own ({model.checkpoint_dtype})"
    if not on_cuda:
        ability = "multiplies" if facts.cpu_has_bf16 else "has no instructions for"
        dtype_reason = f"checkpoint in {model.checkpoint_dtype}; this processor {ability} bfloat16"
    reasons = {
        "device": seen,
        "dtype": dtype_reason,
        "attention_backend": _why_this_attention(resolved),
        "compile_mode": "one compiled block, in a CUDA graph per batch size"
        if resolved.compile_mode == "layers"
        else "graphs need a GPU and a kernel for decode; on a CPU the first answer comes sooner",
        "max_context_tokens": "the model's own limit",
        "max_running_requests": f"default on {resolved.device}",
        "max_step_tokens": f"default on {resolved.device}",
    }
    choices = []
    for name, reason in reasons.items():
        asked = getattr(config, name) is not None
        why = "asked for" if asked else reason
        choices.append(ChosenSetting("--" + name.replace("_", "-"), str(getattr(resolved, name)), why))
    if model.quantization is not None:
        value = resolved.quantization or "as stored"
        choices.append(ChosenSetting("--quantization", value, model.quantization.describe()))
    if any(model.windows):
        choices.append(
            ChosenSetting(
                "--keep-window-pages", str(resolved.keep_window_pages), _why_windows(config, resolved)
            )
        )
    if resolved.kv_dtype is not None:
        scales = "scales of 1" if model.cache_scale_names is None else "the checkpoint's scales"
        choices.append(ChosenSetting("--kv-dtype", resolved.kv_dtype, f"asked for; {scales}"))
    return choices


def _why_windows(config: EngineConfig, resolved: ResolvedConfig) -> str:
    if config.keep_window_pages:
        return "asked for"
    if not resolved.keep_window_pages:
        return "layers with a window give pages back as it moves on"
    reason = "--kv-events-endpoint" if resolved.kv_events_endpoint else resolved.attention_backend
    return f"{reason} knows one page table for all layers"


def _why_this_attention(resolved: ResolvedConfig) -> str:
    if resolved.device == "cpu":
        return "plain torch; the kernels need a GPU"
    if parse(resolved.attention_backend).decode == TRITON:
        return "our kernels, with nothing to plan; decode and short prompts are recorded"
    return f"{TRITON} can't run here; 'minisgl doctor' says why"
