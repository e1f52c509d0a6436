"""Every family that is read, against the same tiny random model in transformers, in float32 on the CPU."""

import copy
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from family_variants import BY_FLAG, VARIANTS
from safetensors.torch import load_file, save_file
from tiny_models import (
    VOCAB_SIZE,
    PagedRunner,
    load_ours,
    logits_of,
    random_model,
    random_model_that_sees,
)
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.errors import ModelError
from minisgl.ipc.messages import AddRequest
from minisgl.model_config.hf_folder.families import FAMILIES
from minisgl.model_config.hf_folder.rope_config import ROPE_TYPES
from minisgl.models.decoder import Decoder
from minisgl.request import SamplingParams

LONGEST = 300
NEW_TOKENS = 8
TOLERANCE = 1e-4
"""Between float32 logits; where transformers' own are further than half of it from float64, twice that. They
are on some processors, for a model that amplifies roundings."""


FIRST_OF_A_FAMILY = list({family: name for name, (family, _) in reversed(VARIANTS.items())}.values())


STATEFUL = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Hits need a snapshot of their states; test_delta_net.py serves them."""


class Pair(NamedTuple):
    """One model in both engines, a text, and transformers' logits of it."""

    theirs: PreTrainedModel
    ours: Decoder
    token_ids: list[int]
    expected: Tensor  # float32 [LONGEST, V]
    tolerance: float


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    if request.param in BY_FLAG and not request.config.option.all_families:
        pytest.skip("a variant for --all-families")
    family, settings = VARIANTS[request.param]
    folder: Path = tmp_path_factory.mktemp("model")
    theirs = random_model(family=family, **settings)
    theirs.save_pretrained(folder)
    token_ids = random.Random(7).choices(range(VOCAB_SIZE), k=LONGEST)
    expected = logits_of(theirs, token_ids)
    wide = copy.deepcopy(theirs).double()
    wide.set_experts_implementation("eager")  # the others refuse float64
    exact = logits_of(wide, token_ids)
    tolerance = max(TOLERANCE, 2 * (expected - exact).abs().max().item())
    assert tolerance < 3 * TOLERANCE
    return Pair(theirs, load_ours(folder), token_ids, expected, tolerance)


def runner_for(pair: Pair, page_size: int = 16) -> PagedRunner:
    return PagedRunner(pair.ours, num_rows=1, page_size=page_size, max_tokens=LONGEST, seed=page_size)


def assert_same(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    assert ours.shape == theirs.shape
    assert torch.isfinite(ours).all()
    assert (ours - theirs).abs().max().item() < tolerance


def test_logits_equal_transformers_however_a_prompt_is_fed(pair: Pair) -> None:
    assert pair.expected.std() > 0.5, "a flat model would hide mistakes"
    for length, chunk in ((1, 1), (2, 2), (17, 17), (LONGEST, LONGEST), (LONGEST, 77), (70, 7), (LONGEST, 1)):
        runner = runner_for(pair, page_size=8 if chunk == 7 else 16)
        token_ids = pair.token_ids[:length]
        parts = [runner.feed([(0, token_ids[i : i + chunk])]) for i in range(0, length, chunk)]
        assert_same(torch.cat(parts), pair.expected[:length], pair.tolerance)


def greedy(theirs: PreTrainedModel, prompt: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    """transformers' next tokens; the mask says that a pad token in the prompt is none."""
    generate: Any = theirs.generate
    token_ids = torch.tensor([prompt])
    with torch.no_grad():
        answer = generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
        )
    return answer[0, len(prompt) :].tolist()


def test_greedy_tokens_equal_transformers(pair: Pair) -> None:
    prompt = pair.token_ids[:45]
    runner = runner_for(pair)
    fed = prompt
    for expected in greedy(pair.theirs, prompt):
        token = int(runner.feed([(0, fed)], last_only=True).argmax())
        assert token == expected
        fed = [token]


def small_engine(folder: Path, max_context_tokens: int, num_pages: int = 32) -> Engine:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        max_context_tokens=max_context_tokens,
        max_running_requests=3,
        chunk_tokens=23,
        num_pages=num_pages,
    )
    return build_engine(config, folder, lambda stage, ms: None)


def answers(engine: Engine, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """The greedy tokens of all prompts, which come at once."""
    got: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(AddRequest(index, np.asarray(prompt, dtype="<i4").tobytes(), params))
    while engine.has_work:
        for output in engine.step():
            got[output.request_id] += output.token_ids
    return list(got.values())


def served(folder: Path, prompts: list[list[int]], max_context_tokens: int) -> list[list[int]]:
    """The tokens an engine answers with, in chunks."""
    engine = small_engine(folder, max_context_tokens)
    try:
        return answers(engine, prompts)
    finally:
        engine.close()


def prompts_of(*lengths: int) -> list[list[int]]:
    return [random.Random(length).choices(range(VOCAB_SIZE), k=length) for length in lengths]


@pytest.mark.parametrize(
    "variant",
    [
        "mistral_window",
        "qwen3_moe_4_experts",
        "gemma2_alternating_windows",
        "gemma3_windows",
        "gemma4_experts_keys_as_values_softcap",
        "gemma4_shared_kv_inputs_of_layers",
        "exaone4_windows",
        "glm4",
        "glm4_moe_groups_qk_norm_bias",
        "gpt_oss_windows_yarn",
        "granite",
        "ministral3",
        "olmo3_windows",
    ],
)
def test_an_engine_serves_a_batch_of_chunked_prompts_with_the_same_tokens(
    variant: str, tmp_path: Path
) -> None:
    family, settings = VARIANTS[variant]
    theirs = random_model(family=family, **settings)
    theirs.save_pretrained(tmp_path)
    prompts = prompts_of(60, 5, 41)
    assert served(tmp_path, prompts, 128) == [greedy(theirs, prompt) for prompt in prompts]


@pytest.mark.parametrize("variant", [name for name in FIRST_OF_A_FAMILY if VARIANTS[name][0] not in STATEFUL])
def test_a_prompt_with_a_cached_prefix_has_the_same_answer(variant: str, tmp_path: Path) -> None:
    family, settings = VARIANTS[variant]
    theirs = random_model(family=family, **settings)
    theirs.save_pretrained(tmp_path)
    first, other = prompts_of(70, 9)
    engine = small_engine(tmp_path, 128)
    answers(engine, [first])
    for length in (17, 48, 70):
        prompt = first[:length] + other
        before = engine.status(0).num_cached_tokens
        assert answers(engine, [prompt]) == [greedy(theirs, prompt)]
        assert engine.status(0).num_cached_tokens > before, "the prefix must come from the cache"
    engine.close()


@pytest.mark.parametrize(
    "variant",
    [
        "gemma4_experts_keys_as_values_softcap",
        "gemma4_shared_kv_inputs_of_layers",
        "glm4_moe_groups_qk_norm_bias",
        "gpt_oss_windows_yarn",
    ],
)
def test_answers_after_a_preemption_are_the_same(variant: str, tmp_path: Path) -> None:
    family, settings = VARIANTS[variant]
    theirs = random_model(family=family, **settings)
    theirs.save_pretrained(tmp_path)
    prompts = prompts_of(44, 31, 27)
    engine = small_engine(tmp_path, 256, num_pages=23)
    assert answers(engine, prompts, 130) == [greedy(theirs, prompt, 130) for prompt in prompts]
    assert engine.status(0).num_preemptions > 0, "the pages must not suffice"
    engine.close()


def test_experts_in_mxfp4_are_the_numbers_that_transformers_makes_of_them(tmp_path: Path) -> None:
    family, settings = VARIANTS["gpt_oss_windows_yarn"]
    theirs = random_model(family=family, **settings | {"hidden_size": 64, "intermediate_size": 32})
    theirs.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for layer, block in enumerate(theirs.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(block.mlp.experts, name)
            experts, inputs, outputs = weight.shape
            shape = (experts, outputs, inputs // 32)
            numbers = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(123, 126, shape, dtype=torch.uint8, generator=generator)
            weight.data = convert_moe_packed_tensors(numbers, scales, dtype=torch.float32).data
            prefix = f"model.layers.{layer}.mlp.experts.{name}"
            del stored[prefix]
            stored |= {f"{prefix}_blocks": numbers, f"{prefix}_scales": scales}
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    token_ids = random.Random(3).choices(range(VOCAB_SIZE), k=60)
    runner = PagedRunner(load_ours(tmp_path), num_rows=1, page_size=16, max_tokens=60, seed=0)
    expected = logits_of(theirs, token_ids)
    assert expected.std() > 0.5, "a flat model would hide mistakes"
    assert_same(runner.feed([(0, token_ids)]), expected)


def test_layers_for_multi_token_prediction_are_not_loaded(tmp_path: Path) -> None:
    family, settings = VARIANTS["glm4_moe_groups_qk_norm_bias"]
    theirs = random_model(family=family, **settings)
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    stored |= {
        "model.layers.3.eh_proj.weight": torch.ones(48, 96),
        "model.layers.3.enorm.weight": torch.ones(48),
    }
    save_file(stored, path)
    load_ours(tmp_path)
    save_file(stored | {"model.layers.4.eh_proj.weight": torch.ones(48, 96)}, path)
    with pytest.raises(ModelError, match=r"layers\.4\.eh_proj"):
        load_ours(tmp_path)


def test_contexts_within_the_original_length_have_longropes_short_factors(tmp_path: Path) -> None:
    family, settings = VARIANTS["llama_longrope"]
    theirs = random_model(family=family, **settings)
    theirs.save_pretrained(tmp_path)
    prompts = prompts_of(20, 5, 11)
    expected = [greedy(theirs, prompt) for prompt in prompts]
    assert served(tmp_path, prompts, 32) == expected
    assert served(tmp_path, prompts, 33) != expected


GEMMA_4_WITH_EYES = {
    "text_config": {"model_type": "gemma4_text", **VARIANTS["gemma4_experts_keys_as_values_softcap"][1]},
    "vision_config": {
        "model_type": "gemma4_vision",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "position_embedding_size": 32,
    },
}
GEMMA_WITH_EYES = {
    "text_config": VARIANTS["gemma3_windows"][1],
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
}
MISTRAL_WITH_EYES = {
    "text_config": {"model_type": "mistral", **VARIANTS["mistral_no_window_head_dim_given"][1]},
    "vision_config": GEMMA_WITH_EYES["vision_config"] | {"model_type": "pixtral", "head_dim": 8},
}

MINISTRAL_WITH_EYES = MISTRAL_WITH_EYES | {
    "text_config": {"model_type": "ministral3", **VARIANTS["ministral3"][1]},
}


@pytest.mark.parametrize(
    ("family", "settings", "tied"),
    [
        ("gemma3", GEMMA_WITH_EYES, True),
        ("gemma4", GEMMA_4_WITH_EYES, True),
        ("mistral3", MISTRAL_WITH_EYES, True),
        ("mistral3", MISTRAL_WITH_EYES, False),
        ("mistral3", MINISTRAL_WITH_EYES, False),
    ],
)
def test_the_text_part_of_a_model_that_sees_gives_its_logits(
    family: str, settings: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    theirs = random_model_that_sees(family, settings, tied=tied)
    theirs.save_pretrained(tmp_path)
    token_ids = random.Random(3).choices(range(90), k=60)
    runner = PagedRunner(load_ours(tmp_path), num_rows=1, page_size=16, max_tokens=60, seed=0)
    expected = logits_of(theirs, token_ids)
    assert expected.std() > 0.5, "a flat model would hide mistakes"
    assert_same(runner.feed([(0, token_ids)]), expected)


def test_every_family_that_is_read_is_compared() -> None:
    assert {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family] for family, _ in VARIANTS.values()} == set(FAMILIES)


def test_every_rope_type_of_transformers_is_compared() -> None:
    parameters = [settings.get("rope_parameters", {}) for _, settings in VARIANTS.values()]
    assert {one.get("rope_type", "default") for one in parameters} == {"default", *ROPE_INIT_FUNCTIONS}
    assert set(ROPE_TYPES) == {"default", *ROPE_INIT_FUNCTIONS}
