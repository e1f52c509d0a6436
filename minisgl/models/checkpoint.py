"""A decoder's parameters as its checkpoint names them.

Promise: every parameter appears once; that of a fused layer as views of its parts.
"""

from torch import Tensor, nn

from minisgl.layers.attention import Attention
from minisgl.layers.embedding import Embedding
from minisgl.layers.experts.make import AnyExperts
from minisgl.layers.linear import AnyWeight, FusedLinear, Linear
from minisgl.layers.linear_attention import LinearAttention
from minisgl.layers.moe import MoeMLP
from minisgl.layers.norm import Factor, RMSNorm
from minisgl.layers.weight import PlainWeight
from minisgl.models.self_attention import SelfAttention


def tensors_by_name(model: nn.Module, *, is_tied: bool) -> dict[str, Tensor]:
    """Views of the parameters to fill. Names are those of the modules behind "model.", but for the head's.

    Args:
        is_tied: the head has no tensors of its own.
    """
    views: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        path = path.removeprefix("layer_inputs.")  # lie beside the layers in a checkpoint
        outer, _, leaf = path.rpartition(".")
        if isinstance(module, FusedLinear | MoeMLP):
            views |= {f"model.{outer}.{name}": rows for name, rows in module.part_tensors().items()}
        elif isinstance(module, Linear):
            is_head = leaf == "lm_head"
            if not (is_head and is_tied):
                prefix = path if is_head else f"model.{path}"
                views |= {f"{prefix}.{name}": rows for name, rows in module.part_tensors().items()}
        elif isinstance(module, Factor):
            views[f"model.{path}"] = module.value.detach()
        elif isinstance(module, Attention):
            views |= {f"model.{outer}.{name}": tensor for name, tensor in module.own_tensors().items()}
        elif isinstance(module, LinearAttention):
            views |= {f"model.{path}.{name}": tensor for name, tensor in module.part_tensors().items()}
        elif isinstance(module, Embedding | RMSNorm):
            named = module.named_parameters()
            views |= {f"model.{path}.{name}": parameter.detach() for name, parameter in named}
    return views


def finish_loading(model: nn.Module) -> None:
    """Complete norms and weights, once, after their tensors are filled."""
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.add_one()
        elif isinstance(module, AnyWeight | AnyExperts | LinearAttention | MoeMLP | SelfAttention):
            module.finish_loading()


def plain_weights(model: nn.Module) -> list[tuple[PlainWeight, bool]]:
    """The unquantized weights, each with whether it is also an embedding, of which rows are read."""
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, Embedding)}
    weights = [module for module in model.modules() if isinstance(module, PlainWeight)]
    return [(weight, id(weight.values) in embedded) for weight in weights]


def pack_weights(model: nn.Module) -> None:
    """Pack the weights for a CPU (`PlainWeight.pack`); `tensors_by_name` unpacks what it names.

    A head that is also the embedding is there twice then.
    """
    for weight, is_shared in plain_weights(model):
        weight.pack(is_shared=is_shared)
