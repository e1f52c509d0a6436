"""The compiled block of a CPU's decode steps: against the uncompiled one, and when compiling fails."""

import json
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_config import TINY
from torch import Tensor

from compile_cache.store import OpenCache, open_cache
from minisgl.attention import torch as torch_attention
from minisgl.attention.interface import AttentionInputs
from minisgl.engine.cpu_blocks import compiled_block
from minisgl.engine.cpu_blocks.compiled_block import MOST_KEYS, PARTS, most_keys_compiled, part_file
from minisgl.engine.cpu_blocks.cpu_block import CHILD, COMPILER, CpuBlock
from minisgl.engine.cpu_blocks.half_weights import WeightHalver
from minisgl.engine.cpu_blocks.parts import parts_of
from minisgl.engine.cpu_blocks.sizes import BlockSizes, sizes_of_blocks
from minisgl.engine.start.device import cpu_has_bf16
from minisgl.ipc.child_process import PACKAGE_PARENT, module_command
from minisgl.layers.attention import Attention
from minisgl.model_config.config import QueryScaling
from minisgl.models.checkpoint import pack_weights, plain_weights
from minisgl.models.decoder import Decoder, RunBlock
from triton_kernels.packed_weights import can_halve, is_packed

PAGE, PAGES, LENGTHS = 4, 16, (7, 1, 12, 8, 3)
LIMIT_S = 240.0
# The child itself gives way to every other process, which may take very long beside other tests.
COMPILE_NOW = (
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {PACKAGE_PARENT!r}); from {CHILD} import main; main()",
)


TOLERANCES = {torch.bfloat16: 0.02, torch.float32: 1e-5}
"""Between compiled and uncompiled steps: sums have another order, queries of bfloat16 are not rounded."""
OWN_DTYPE = torch.bfloat16 if cpu_has_bf16() else torch.float32
"""What checkpoints in bfloat16 are on this processor. Compiling takes a minute, so only that is compiled."""


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Decoder:
    """A model with biases and norms of heads, but no bias of the output projection; its pool is not empty."""
    torch.manual_seed(0)
    dtype = getattr(request, "param", torch.bfloat16)
    config = replace(TINY, hidden_size=64, head_dim=16, qkv_bias=True, qk_norm=True)
    model = Decoder(config, torch_attention.attend, dtype).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.2)
        parameter.copy_(parameter.bfloat16())  # which float16 holds
    model.allocate_kv(PAGES, PAGE, dtype, "cpu")
    for attention in model.attention_layers():
        attention.k_cache.normal_()
        attention.v_cache.normal_()
    pack_weights(model)
    return model


@pytest.fixture
def sizes(model: Decoder) -> BlockSizes:
    found = sizes_of_blocks(model)
    assert found is not None
    return found


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[OpenCache]:
    cache = open_in(tmp_path)
    yield cache
    cache.close()


def open_in(folder: Path) -> OpenCache:
    cache = open_cache(folder, {"cpu": "any"}, {})
    assert cache is not None
    return cache


def logits(model: Decoder, rows: list[int], run_block: RunBlock | None = None) -> Tensor:
    """A decode step of these rows, each of which has pages of its own and LENGTHS tokens."""
    lengths = torch.tensor([LENGTHS[row] for row in rows], dtype=torch.int32)
    inputs = AttentionInputs(
        page_table=torch.arange(1, PAGES, dtype=torch.int32).view(5, 3),
        row_ids=torch.tensor(rows, dtype=torch.int32),
        context_len=lengths,
        slot_mapping=torch.tensor([PAGE * (1 + 3 * row) for row in rows], dtype=torch.int32) + lengths - 1,
        row_start=torch.arange(len(rows) + 1, dtype=torch.int32),
        max_query_len=1,
        is_decode=True,
    )
    token_ids = torch.tensor([11 + row for row in rows], dtype=torch.int32)
    with torch.inference_mode():
        return model(token_ids, lengths - 1, inputs, run_block=run_block)


def check_close(model: Decoder, got: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[model.norm.weight.dtype]
    assert torch.allclose(got, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


def check_pools(model: Decoder, run_block: RunBlock) -> None:
    """A step writes to the pools what an uncompiled one does, and nothing else. They are as before then."""
    pools = [pool for layer in model.attention_layers() for pool in (layer.k_cache, layer.v_cache)]
    before = [pool.clone() for pool in pools]
    written = []
    for run in (None, run_block):
        for pool in pools:
            pool.copy_(torch.arange(pool.numel()).view_as(pool) % 7)
        logits(model, list(range(len(LENGTHS))), run)
        written.append([pool.clone() for pool in pools])
    for pool, kept in zip(pools, before, strict=True):
        pool.copy_(kept)
    for uncompiled, compiled in zip(*written, strict=True):
        check_close(model, compiled, uncompiled)
        assert ((compiled != uncompiled).flatten(2).any(2).sum() <= len(LENGTHS)).item()


def step_until(block: CpuBlock, model: Decoder) -> None:
    """Run steps until the block has been compiled, or that has failed."""
    began = time.monotonic()
    while block.is_waiting and time.monotonic() - began < LIMIT_S:
        logits(model, [0], block)
        time.sleep(0.05)


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs a C++ compiler")
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("model", [OWN_DTYPE], indirect=True, ids=str)
def test_compiled_steps_equal_uncompiled_ones_and_do_not_depend_on_the_number_of_rows(
    model: Decoder, sizes: BlockSizes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_in(tmp_path)
    cache.publish()
    block = CpuBlock(model, sizes, cache, COMPILE_NOW, steps_before=2)
    rows, is_float32 = list(range(len(LENGTHS))), sizes.dtype == "float32"
    expected = logits(model, rows)
    assert torch.equal(logits(model, rows, block), expected)
    step_until(block, model)
    assert block.is_compiled
    together = logits(model, rows, block)
    check_close(model, together, expected)
    for row in rows:
        alone = logits(model, [row], block)[0]
        check_close(model, alone, together[row])
        # Products of float32 may have other last bits for another number of rows.
        assert is_float32 or torch.equal(alone, together[row])
    check_pools(model, block)
    monkeypatch.setattr(compiled_block, "MOST_KEYS", sum(LENGTHS) - 1)  # attention stays uncompiled
    check_close(model, logits(model, rows, block), expected)
    check_pools(model, block)
    monkeypatch.undo()
    block.close()

    again = CpuBlock(model, sizes, open_in(tmp_path))
    assert again.is_compiled
    assert torch.equal(logits(model, rows, again), together)
    again.close()


def test_the_parts_have_the_names_that_are_loaded(sizes: BlockSizes) -> None:
    assert tuple(parts_of(sizes)) == PARTS


def test_a_compiler_that_fails_is_reported_once_and_steps_go_on(
    model: Decoder, sizes: BlockSizes, cache: OpenCache, caplog: pytest.LogCaptureFixture
) -> None:
    block = CpuBlock(model, sizes, cache, ("sh", "-c", "echo no space left >&2; exit 3"), steps_before=2)
    step_until(block, model)
    assert torch.equal(logits(model, [1, 2], block), logits(model, [1, 2]))
    assert not block.is_compiled
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["decode steps stay uncompiled: no space left"]
    block.close()


def test_code_that_can_not_be_loaded_is_reported_and_steps_go_on(
    model: Decoder, sizes: BlockSizes, cache: OpenCache, caplog: pytest.LogCaptureFixture
) -> None:
    for name in PARTS:
        part_file(cache.files, name).write_text("no code")
    block = CpuBlock(model, sizes, cache)
    assert not block.is_compiled
    assert "decode steps stay uncompiled" in caplog.text
    assert torch.equal(logits(model, [1, 2], block), logits(model, [1, 2]))


def test_closing_ends_the_compiler(model: Decoder, sizes: BlockSizes) -> None:
    block = CpuBlock(model, sizes, None, ("sh", "-c", "exec sleep 1000"), steps_before=1)
    logits(model, [0], block)
    assert block.is_waiting
    began = time.monotonic()
    block.close()
    assert time.monotonic() - began < 100
    assert not block.is_waiting


def test_only_plain_blocks_can_be_compiled() -> None:
    others: list[dict[str, Any]] = [
        {"residual_scale": 0.5},
        {"attention_gate": True},
        {"qk_norm": True, "qk_norm_of_all_heads": True},
        {"rotary_dim": 4},
        {"query_scaling": QueryScaling(0.1, 8)},
    ]

    def can_be_compiled(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> bool:
        model = Decoder(replace(TINY, **changes), torch_attention.attend, dtype)
        model.allocate_kv(PAGES, PAGE, dtype, "cpu")
        return sizes_of_blocks(model) is not None

    assert can_be_compiled()
    assert can_be_compiled(torch.float32, qk_norm=True, qkv_bias=True)
    assert [changes for changes in others if can_be_compiled(**changes)] == []
    assert not can_be_compiled(torch.float64)


@pytest.mark.parametrize(
    ("options", "most"),
    [({}, MOST_KEYS), ({"window": 12}, 12), ({"softcap": 30.0}, 0), ({"has_sinks": True}, 0)],
)
def test_full_windows_soft_caps_and_sinks_are_attended_uncompiled(options: dict[str, Any], most: int) -> None:
    attention = Attention(4, 2, 16, torch_attention.attend, **options)
    attention.allocate_kv(4, PAGE, torch.float32, "cpu")
    assert most_keys_compiled(attention) == most


@pytest.mark.skipif(not can_halve(torch.empty(1, 1)), reason="needs an x86")
@pytest.mark.parametrize("model", [torch.float32], indirect=True)
def test_weights_are_halved_while_steps_run(model: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=WeightHalver.__module__)
    halver = WeightHalver(model, steps_before=2)
    block = CpuBlock(model, None, None, halver=halver)
    expected = logits(model, [1, 2])
    assert torch.equal(logits(model, [1, 2], block), expected)
    assert not any(is_packed(weight.values) for weight, _ in plain_weights(model))
    check_close(model, logits(model, [1, 2], block), expected)
    halver.wait()
    assert all(is_packed(weight.values) for weight, _ in plain_weights(model))
    assert "9 of 9 weights" in caplog.text
    check_close(model, logits(model, [1, 2], block), expected)
    assert not WeightHalver(model).has_work
    block.close()


@pytest.mark.skipif(not can_halve(torch.empty(1, 1)), reason="needs an x86")
def test_a_process_may_end_while_weights_are_halved() -> None:
    """Without closing anything; a thread in the middle of torch would abort it."""
    program = """
import torch
from minisgl.engine.cpu_blocks.half_weights import WeightHalver
from minisgl.layers.weight import PlainWeight

weights = torch.nn.ModuleList(
    PlainWeight(1024, [4096], torch.float32, torch.device("cpu"), bias=False) for _ in range(50)
)
for weight in weights:
    weight.values.fill_(1.5)
WeightHalver(weights, steps_before=1).before_step()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=PACKAGE_PARENT, timeout=LIMIT_S, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("place", ["threading.Thread.start", "os.setpriority"])
@pytest.mark.parametrize("model", [torch.float32], indirect=True)
def test_steps_go_on_where_weights_can_not_be_halved(
    model: Decoder, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_arguments: object) -> None:
        raise PermissionError("not here") if place == "os.setpriority" else RuntimeError("not here")

    monkeypatch.setattr(place, fail)
    halver = WeightHalver(model, steps_before=1)
    if not halver.has_work:
        pytest.skip("needs an x86")
    block = CpuBlock(model, None, None, halver=halver)
    expected = logits(model, [1, 2])
    assert torch.equal(logits(model, [1, 2], block), expected)
    halver.wait()
    assert torch.equal(logits(model, [1, 2], block), expected)
    assert "weights stay as they are: not here" in caplog.text
    block.close()


@pytest.mark.parametrize("model", [torch.float32], indirect=True)
def test_no_weight_is_halved_after_the_end(model: Decoder) -> None:
    halver = WeightHalver(model, steps_before=1)
    block = CpuBlock(model, None, None, halver=halver)
    block.close()
    logits(model, [1, 2], block)
    halver.wait()
    assert not any(is_packed(weight.values) for weight, _ in plain_weights(model))


def test_the_compiling_process_ends_with_its_parent_and_leaves_no_folder(
    sizes: BlockSizes, tmp_path: Path
) -> None:
    folder = tmp_path / "minisgl-compile"
    folder.mkdir()
    command = [*module_command(CHILD), json.dumps(asdict(sizes)), str(folder)]
    # A stdin that has ended is what a parent leaves that has ended.
    child = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=False)
    assert child.returncode == 1
    assert not folder.exists()
