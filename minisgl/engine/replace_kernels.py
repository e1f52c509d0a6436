"""`--kernel op=module:function`: puts somebody's own function in an op's place, for an experiment.

Promise: called once, between building a model and compiling it; afterwards only layers with a kernel of ours
that does the work of several ops look whether those are ours.
"""

import functools
import logging
from typing import Any

from torch import nn

from minisgl.attention import triton as triton_attention
from minisgl.attention.interface import Pair
from minisgl.engine.rows import Rows
from minisgl.errors import ConfigError
from minisgl.layers.attention import Attention
from triton_kernels.registry import KERNELS, Kernels, with_replacements

logger = logging.getLogger(__name__)


def replace_kernels(model: nn.Module, rows: Rows, specs: tuple[str, ...]) -> None:
    """Have the layers of `model` and the sampler call the functions that `specs` names.

    Raises:
        ConfigError: a spec is malformed, or names an op or a function that there is not or that does not fit.
    """
    if not specs:
        return
    try:
        kernels = with_replacements(specs)
    except ValueError as error:
        raise ConfigError(f"--kernel: {error}") from error
    # One function for all layers, which torch.compile would otherwise compile one by one.
    by_kernels = functools.partial(triton_attention.attend, kernels=kernels)
    attend = Pair(by_kernels, by_kernels, decodes_by_kernels=True)
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
