"""An engine with quantized weights or cache: a request has the greedy tokens that it has alone."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from int4_models import INT4_FORMATS, quantize_int4
from quantized_models import FORMATS, quantize
from tiny_models import VOCAB_SIZE, random_model

from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.errors import ConfigError
from minisgl.ipc.messages import AddRequest
from minisgl.request import SamplingParams

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "cpu_threads": 1,
    "max_context_tokens": 64,
}
NUM_REQUESTS = 10
GROUPED: dict[str, Any] = {
    "family": "qwen3",
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
}
"""A model whose widths are groups of 32."""
INT4_SAMPLE = ("awq", "gptq, zero points, order of activations")


def engine_for(folder: Path, **settings: Any) -> Engine:
    config = EngineConfig(model=str(folder), **SETTINGS | settings)
    return build_engine(config, folder, lambda name, duration_ms: None)


def serve(engine: Engine, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    """The greedy tokens of each prompt."""
    answers: dict[int, list[int]] = {request_id: [] for request_id in prompts}
    for request_id, prompt in prompts.items():
        params = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
        engine.add(AddRequest(request_id, np.asarray(prompt, "<i4").tobytes(), params))
    while engine.has_work:
        for output in engine.step():
            assert not output.error_message
            answers[output.request_id] += output.token_ids
    engine.check_at_idle()
    return answers


def some_prompts() -> dict[int, list[int]]:
    """Prompts of which some begin alike."""
    source = random.Random(3)
    common = [source.randrange(3, VOCAB_SIZE) for _ in range(20)]
    return {
        request_id: common[: source.choice((0, 8, 20))]
        + [source.randrange(3, VOCAB_SIZE) for _ in range(source.randrange(1, 12))]
        for request_id in range(NUM_REQUESTS)
    }


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    random_model(seed=5, **GROUPED).save_pretrained(folder)
    return folder


FLAGS = [*(f"--quantization {name}" for name in ("fp8", "fp8-block", "int4")), "--kv-dtype fp8"]


@pytest.mark.parametrize("name", [*FORMATS, *INT4_SAMPLE, *FLAGS])
def test_greedy_tokens_do_not_depend_on_company_chunks_the_prefix_cache_or_preemption(
    name: str, plain_folder: Path, tmp_path: Path
) -> None:
    folder, settings = plain_folder, {}
    if name in FORMATS:
        folder = tmp_path
        quantize(random_model(seed=5, family="qwen3", head_dim=16), FORMATS[name], folder)
    elif name in INT4_FORMATS:
        folder = tmp_path
        quantize_int4(random_model(seed=5, **GROUPED), INT4_FORMATS[name], folder)
    else:
        flag, value = name.removeprefix("--").split()
        settings = {flag.replace("-", "_"): value}
    prompts = some_prompts()
    alone = engine_for(folder, overlap=False, prefix_cache=False, num_pages=70, page_size=1, **settings)
    expected = {each: serve(alone, {each: prompt})[each] for each, prompt in prompts.items()}
    alone.close()
    together = engine_for(
        folder,
        overlap=True,
        page_size=4,
        num_pages=40,
        max_running_requests=8,
        max_step_tokens=24,
        chunk_tokens=7,
        output_reserve_tokens=0,
        **settings,
    )
    got = serve(together, prompts)
    again = serve(together, prompts)
    status = together.status(0)
    together.close()
    assert status.num_preemptions > 0
    assert got == expected
    assert again == expected


def test_weights_take_half_or_less_of_the_memory_in_the_budget(plain_folder: Path) -> None:
    sizes = []
    for quantization in (None, "fp8", "fp8-block", "int4"):
        engine = engine_for(plain_folder, num_pages=20, quantization=quantization, dummy_weights=True)
        sizes.append(engine.weights_bytes)
        engine.close()
    assert sizes[1] < 0.6 * sizes[0]
    assert sizes[2] < 0.8 * sizes[0]  # the tiny widths are padded to whole blocks
    assert sizes[3] < 0.5 * sizes[0]  # likewise; head and embedding are float32


def test_a_page_of_an_fp8_cache_takes_a_quarter_of_one_in_float32(plain_folder: Path) -> None:
    sizes = []
    for kv_dtype in (None, "fp8"):
        engine = engine_for(plain_folder, num_pages=20, kv_dtype=kv_dtype, dummy_weights=True)
        layers = engine.runner.model.attention_layers()
        sizes.append(sum(layer.k_cache.nbytes + layer.v_cache.nbytes for layer in layers))
        engine.close()
    assert sizes[0] == 4 * sizes[1] > 0


def test_what_can_not_be_quantized_is_refused_by_name(plain_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--quantization must be one of fp8, fp8-block, int4, got int3"):
        engine_for(plain_folder, quantization="int3")
    quantize(random_model(), FORMATS["modelopt"], tmp_path)
    with pytest.raises(ConfigError, match=r"quantized already, as FP8, weights per tensor.*modelopt"):
        engine_for(tmp_path, quantization="fp8")
    with pytest.raises(ConfigError, match="--kv-dtype must be one of fp8, got int8"):
        engine_for(plain_folder, kv_dtype="int8")
