"""Replaces ops by a user's functions, for experiments: `--kernel op=module:function`.

Promise: the replacement happens once, between building a model and compiling it. Later, only a layer that has
a fused kernel for several ops checks whether one of these ops was replaced.
"""

import functools
import logging
from typing import Any

from torch import nn

from minisgl.attention import triton as triton_attention
from minisgl.attention.interface import PrefillDecodePair
from minisgl.engine.step.rows import Rows
from minisgl.errors import ConfigError
from minisgl.layers.attention import Attention
from triton_kernels.registry import KERNELS, Kernels, with_replacements

logger = logging.getLogger(__name__)


def replace_kernels(model: nn.Module, rows: Rows, specs: tuple[str, ...]) -> None:
    """Make the layers of `model` and the sampler call the functions that `specs` names.

    Raises:
        ConfigError: a spec is malformed, names an unknown op or function, or the function does not fit.
    """
    if not specs:
        return
    try:
        kernels = with_replacements(specs)
    except ValueError as error:
        raise ConfigError(f"--kernel: {error}") from error
    # All layers share one function; otherwise torch.compile would compile every layer.
    by_kernels = functools.partial(triton_attention.attend, kernels=kernels)
    attend = PrefillDecodePair(by_kernels, by_kernels, decodes_with_triton=True)
    module: Any
    for module in model.modules():
        if isinstance(getattr(module, "kernels", None), Kernels):
            module.kernels = kernels
        if isinstance(module, Attention) and _attention_is_replaced(kernels):
            module.attend = attend
    rows.sample = kernels.sample
    logger.warning("ops replaced for an experiment: %s", ", ".join(specs))


def _attention_is_replaced(kernels: Kernels) -> bool:
    return (kernels.paged_decode, kernels.paged_prefill) != (KERNELS.paged_decode, KERNELS.paged_prefill)
