"""What a GPU has, and that the default configurations of all ops follow it."""

from pathlib import Path

import pytest
import torch

import triton_kernels
from triton_kernels.decode_config import decode_that_fits, default_decode_config
from triton_kernels.fused_moe import default_moe_config
from triton_kernels.gpu import ELSEWHERE, Gpu, gpu_of
from triton_kernels.linear_few import default_linear_config, more_rows_config
from triton_kernels.moe_gemm import gemm_stage_bytes
from triton_kernels.paged_prefill import default_prefill_config, prefill_that_fits

A100 = Gpu((8, 0), 163 << 10, 108)
L4 = Gpu((8, 9), 99 << 10, 58)
H200 = Gpu((9, 0), 227 << 10, 132)
B200 = Gpu((10, 0), 227 << 10, 148)
RTX_5090 = Gpu((12, 0), 99 << 10, 170)
EVERY = (A100, L4, H200, B200, RTX_5090)


def test_each_path_has_its_generations() -> None:
    assert [gpu.has_wgmma for gpu in EVERY] == [False, False, True, False, False]
    assert [gpu.has_tma for gpu in EVERY] == [False, False, True, True, True]
    assert [gpu.starts_early for gpu in EVERY] == [False, False, True, True, True]
    assert [gpu.multiplies_from_shared for gpu in EVERY] == [False, False, True, True, False]


def test_stages_fill_the_shared_memory_and_there_is_always_one() -> None:
    assert H200.stages_that_fit(8, 32 << 10) == 7
    assert H200.stages_that_fit(3, 32 << 10) == 3
    assert H200.stages_that_fit(8, 32 << 10, other_bytes=64 << 10) == 5
    assert L4.stages_that_fit(8, 32 << 10) == 4, "one tile of the four goes through registers"
    assert L4.stages_that_fit(8, 200 << 10) == 1


def test_only_one_file_asks_a_device_for_its_properties() -> None:
    folder = Path(triton_kernels.__file__).parent
    asking = [
        path.name
        for path in folder.glob("*.py")
        if any(word in path.read_text() for word in ("get_device_properties", "get_device_capability"))
    ]
    assert asking == ["gpu.py"]
    assert gpu_of(torch.device("cpu")) == ELSEWHERE


@pytest.mark.parametrize("gpu", EVERY)
def test_attention_has_a_pipeline_that_fits_for_every_head_size(gpu: Gpu) -> None:
    for head_dim in (16, 64, 80, 96, 128, 192, 256):
        prefill = default_prefill_config(head_dim, 2, gpu)
        assert prefill.num_stages >= 2
        assert prefill_that_fits(prefill, head_dim, 2, gpu) == prefill
        for group in (1, 2, 4, 7, 8, 16):
            for few_rows in (False, True):
                decode = default_decode_config(head_dim, 2, group, 4, few_rows, gpu=gpu)
                assert decode.num_stages >= 2
                assert decode_that_fits(decode, head_dim, 2, group, gpu) == decode
                hopper = default_decode_config(head_dim, 2, group, 4, few_rows, gpu=H200)
                assert decode[:3] == hopper[:3], (
                    "what decides the last bits of results is the same everywhere"
                )


@pytest.mark.parametrize("gpu", EVERY)
def test_linear_layers_and_experts_have_pipelines_that_fit(gpu: Gpu) -> None:
    for outputs, width in (
        (64, 576),
        (1024, 3072),
        (2048, 1024),
        (4096, 14336),
        (14336, 4096),
        (151936, 4096),
    ):
        for gated in (False, True):
            assert default_linear_config(outputs, width, gated, gpu).num_stages >= 2
            assert more_rows_config(outputs, gated, gpu).num_stages >= 2
    for tokens in (64, 256, 512, 8192):
        config = default_moe_config(tokens, 128, 768, 8, 2, gpu)
        for product, gated in ((config.gate_up, True), (config.down, False)):
            tiles = product.num_stages - (0 if gpu.multiplies_from_shared else 1)
            assert 1 <= tiles * gemm_stage_bytes(product, 2, gated=gated) <= gpu.shared_bytes
            assert product.tma == gpu.has_tma
