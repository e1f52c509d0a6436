"""The table of architectures."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import random_model

from minisgl.errors import ConfigError, ModelError
from minisgl.model_config.hf_folder.families import FAMILIES
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.models.registry import BUILDERS, build_model


def test_every_architecture_that_is_read_can_be_built() -> None:
    assert set(BUILDERS) == set(FAMILIES)


def test_an_unknown_architecture_or_backend_is_an_error(tmp_path: Path) -> None:
    random_model().save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    with pytest.raises(ModelError, match="MambaForCausalLM"):
        build_model(
            replace(config, architecture="MambaForCausalLM"),
            attention_backend="torch",
            dtype=torch.float32,
            device="cpu",
        )
    with pytest.raises(ConfigError, match="--attention-backend"):
        build_model(config, attention_backend="flash9", dtype=torch.float32, device="cpu")


def test_parameters_have_the_asked_dtype_and_angles_stay_float32(tmp_path: Path) -> None:
    random_model().save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    model = build_model(config, attention_backend="torch", dtype=torch.bfloat16, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.cos_sin.dtype == torch.float32
    assert model.state_dict().keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
