"""`--kernel op=module:function`: what runs in the op's place, and what a mistake is told."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from minisgl.attention.interface import AttentionInputs
from minisgl.engine.start.replace_kernels import replace_kernels
from minisgl.engine.step.rows import Rows
from minisgl.errors import ConfigError
from minisgl.layers.attention import Attention
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from triton_kernels.paged_decode import paged_decode
from triton_kernels.registry import KERNELS, Kernels, with_replacements


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of somebody's own."""
    module = ModuleType("experiment")
    exec(
        "def norm(x, weight, eps): return x * 0 + 7\n"
        "def short(x, weight): return x\n"
        "def decode(q, k, v, table, rows, lengths, scale, window=0, softcap=0.0, arrivals=None):\n"
        "    return q + 1\n"
        "def draw(*columns): return 'drawn'\n"
        "number = 3\n",
        module.__dict__,
    )
    monkeypatch.setitem(sys.modules, "experiment", module)
    return module


def small_model() -> torch.nn.ModuleList:
    cpu, f32 = torch.device("cpu"), torch.float32
    attend = pytest.fail
    return torch.nn.ModuleList(
        [RMSNorm(8, 1e-5, f32, cpu), GatedMLP(8, 16, f32, cpu), Attention(2, 1, 4, attend)]  # type: ignore
    )


def kernels_in(model: torch.nn.Module) -> list[Kernels]:
    """Of the norm, of the MLP's two weights and of attention."""
    found = [getattr(module, "kernels", None) for module in model.modules()]
    return [one for one in found if isinstance(one, Kernels)]


def test_only_the_named_op_is_replaced_everywhere_in_the_model(experiment: ModuleType) -> None:
    model, rows = small_model(), Rows(2, 4, 16, torch.device("cpu"))
    replace_kernels(model, rows, ("rms_norm=experiment:norm",))
    assert torch.equal(model[0](torch.randn(3, 8)), torch.full((3, 8), 7.0))
    assert [one == KERNELS._replace(rms_norm=experiment.norm) for one in kernels_in(model)] == [True] * 4
    assert model[2].attend is pytest.fail
    assert rows.sample is KERNELS.sample


def test_attention_and_sampling_can_be_replaced(experiment: ModuleType) -> None:
    model, rows = small_model(), Rows(2, 4, 16, torch.device("cpu"))
    replace_kernels(model, rows, ("paged-decode=experiment:decode", "Sample=experiment:draw"))
    attention: Any = model[2]
    x = torch.zeros(1, dtype=torch.int32)
    inputs = AttentionInputs(x, x, x, x, x, max_query_len=1)
    q = torch.randn(1, 2, 4)
    assert torch.equal(attention.attend(q, q, q, inputs, 1.0), q + 1)
    assert rows.sample() == "drawn"


def test_without_a_spec_nothing_changes() -> None:
    model, rows = small_model(), Rows(2, 4, 16, torch.device("cpu"))
    replace_kernels(model, rows, ())
    assert [one is KERNELS for one in kernels_in(model)] == [True] * 4


def test_every_op_that_can_be_replaced_is_one_of_ours_by_default() -> None:
    assert all(callable(function) for function in KERNELS)
    assert KERNELS.paged_decode is paged_decode
    assert Kernels() == with_replacements(())


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("rms_norm", "write op=module:function"),
        ("rms_norm=experiment", "write op=module:function"),
        ("norm=experiment:norm", "there is no op 'norm'; there are rms_norm, "),
        ("rms_norm=no_such_module:norm", "can't import no_such_module"),
        ("rms_norm=experiment:missing", "experiment has no function 'missing'"),
        ("rms_norm=experiment:number", "experiment has no function 'number'"),
        ("rms_norm=experiment:short", r"can't stand in for rms_norm\(x, weight, eps\)"),
        ("paged_decode=experiment:norm", "can't stand in for paged_decode"),
    ],
)
def test_a_mistake_is_a_config_error_that_says_what(spec: str, said: str, experiment: ModuleType) -> None:
    rows = Rows(2, 4, 16, torch.device("cpu"))
    with pytest.raises(ConfigError, match="--kernel: .*" + said):
        replace_kernels(small_model(), rows, (spec,))


def test_an_argument_that_only_some_models_give_may_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "qkv, cos_sin, positions, slot_mapping, k_cache, v_cache, q_norm_weight, k_norm_weight, eps=1"
    (tmp_path / "without_values.py").write_text(f"def store({names}): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    chosen = with_replacements(["rope_store=without_values:store"])
    assert chosen.rope_store.__module__ == "without_values"


def test_an_op_is_replaced_once(experiment: ModuleType) -> None:
    with pytest.raises(ValueError, match="rms_norm is replaced twice"):
        with_replacements(["rms_norm=experiment:norm", "rmsnorm=experiment:norm"])


def test_the_module_may_lie_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "norm_of_mine.py").write_text("def norm(x, weight, eps):\n    return x\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    (tmp_path / "zmq.py").touch()
    replaced = with_replacements(["rms_norm=norm_of_mine:norm"])
    assert replaced.rms_norm("x", None, 0) == "x"
    zmq = PathFinder.find_spec("zmq")  # other modules are not looked for there first
    assert zmq is not None
    assert zmq.origin != str(tmp_path / "zmq.py")
