"""Window layers keep what prefill's tiles touch, so no configuration may have larger tiles."""

import json
from pathlib import Path

import pytest

import triton_kernels
from minisgl.attention.choice import WINDOW_TILE_TOKENS
from minisgl.benchmark.kernels.model_shapes import read_model_shape
from minisgl.benchmark.kernels.ops.attention_ops import hopper_candidates, prefill_candidates
from triton_kernels.gpu import Gpu
from triton_kernels.paged_prefill import default_prefill_config
from triton_kernels.paged_prefill_hopper import default_hopper_config

H100 = Gpu(capability=(9, 0), shared_bytes=232448, multiprocessors=132)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-1b", "phi-3-mini-4k"])
def test_no_candidate_of_a_prefill_kernel_has_larger_tiles_of_keys(model: str) -> None:
    shape = read_model_shape(model)
    candidates = [*prefill_candidates(shape, H100), *prefill_candidates(shape, H100, is_fp8=True)]
    candidates += hopper_candidates(shape, H100)
    assert candidates
    assert all(WINDOW_TILE_TOKENS % config.block_n == 0 for config in candidates)


def test_no_default_and_no_tuned_configuration_has_larger_tiles_of_keys() -> None:
    sizes = [default_prefill_config(dim, size, H100).block_n for dim in (16, 64, 128, 256) for size in (2, 4)]
    sizes += [default_hopper_config(dim, 8, 100, 132).block_n for dim in (64, 128, 256)]
    for table in (Path(triton_kernels.__file__).parent / "tuned").glob("*.json"):
        for line in table.read_text(encoding="utf-8").splitlines():
            if '"op": "paged_prefill' in line:
                sizes.append(json.loads(line.rstrip().rstrip(","))["config"]["block_n"])
    assert len(sizes) > 11
    assert all(WINDOW_TILE_TOKENS % size == 0 for size in sizes)
