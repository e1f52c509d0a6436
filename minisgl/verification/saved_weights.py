"""Writes the engine's weights as a checkpoint, so that transformers computes with the same dummy weights."""

import shutil
from pathlib import Path

from safetensors.torch import save_file

from minisgl.layers.norm import RMSNorm
from minisgl.models.decoder import Decoder


def save_checkpoint(model: Decoder, source: Path, target: Path) -> None:
    """Write `model`'s weights, and the config of `source`, to the folder `target`."""
    minus_one = {
        f"model.{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, RMSNorm) and module.weight_minus_one
    }
    tensors = {
        name: (view - 1 if name in minus_one else view).cpu().clone().contiguous()
        for name, view in model.checkpoint_tensors().items()
    }
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(source / "config.json", target / "config.json")
