"""Models with layers of linear attention: their checkpoints, their states in an engine, what they refuse."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_variants import DELTA, DELTA_EXPERTS
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

from minisgl.config import GIB, EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine, resolve_for_folder
from minisgl.engine.start.memory import (
    MemoryBudget,
    check_states_fit,
    plan_memory,
    row_state_bytes,
    states_bytes,
)
from minisgl.errors import ConfigError, ModelError
from minisgl.ipc.messages import AddRequest
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.request import SamplingParams

EYES = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "max_context_tokens": 256}


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def with_packed_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the public checkpoints have them: all experts of a layer in two tensors."""
    packed = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:

        def stacked(part: str, layer: str = layer) -> Tensor:
            names = [f"{layer}.experts.{expert}.{part}.weight" for expert in range(4)]
            return torch.stack([tensors[name] for name in names])

        packed[f"{layer}.experts.gate_up_proj"] = torch.cat((stacked("gate_proj"), stacked("up_proj")), dim=1)
        packed[f"{layer}.experts.down_proj"] = stacked("down_proj")
    return packed


def test_a_checkpoint_that_sees_drafts_and_packs_its_experts_gives_its_texts_logits(tmp_path: Path) -> None:
    text: dict[str, Any] = {"model_type": "qwen3_5_moe_text", **DELTA_EXPERTS}
    theirs = random_model_that_sees("qwen3_5_moe", {"text_config": text, "vision_config": EYES}, tied=False)
    theirs.save_pretrained(tmp_path)
    token_ids = random.Random(3).choices(range(90), k=80)
    expected = logits_of(theirs, token_ids)

    def as_published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return with_packed_experts(tensors) | {"mtp.layers.0.input_layernorm.weight": torch.ones(48)}

    for change in (lambda tensors: tensors, as_published):
        rewrite(tmp_path, change)
        names = load_file(tmp_path / "model.safetensors").keys()
        assert any(name.startswith("model.visual.") for name in names)
        runner = PagedRunner(load_ours(tmp_path), num_rows=1, page_size=16, max_tokens=80, seed=0)
        assert (runner.feed([(0, token_ids)]) - expected).abs().max() < 1e-4
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in names


def test_rows_keep_their_states_beside_others_and_begin_with_none(tmp_path: Path) -> None:
    """Three rows in ever other company; row 1 is given to another sequence in between."""
    theirs = random_model(family="qwen3_5_text", **DELTA)
    theirs.save_pretrained(tmp_path)
    ours = load_ours(tmp_path)
    source = random.Random(5)
    texts = [source.choices(range(VOCAB_SIZE), k=length) for length in (150, 90, 70, 80)]
    expected = [logits_of(theirs, text) for text in texts]
    runner = PagedRunner(ours, num_rows=3, page_size=16, max_tokens=160, seed=2)
    text_of, fed = {0: 0, 1: 1, 2: 2}, [0] * len(texts)
    while any(fed[text] < len(texts[text]) for text in text_of.values()):
        step = []
        for row, text in text_of.items():
            count = min(source.choice((0, 1, 3, 40, 70)), len(texts[text]) - fed[text])
            if count:
                step.append((row, texts[text][fed[text] : fed[text] + count]))
                fed[text] += count
        if step:
            logits = runner.feed(step)
            for row, tokens in step:
                end = fed[text_of[row]]
                mine, logits = logits[: len(tokens)], logits[len(tokens) :]
                error = (mine - expected[text_of[row]][end - len(tokens) : end]).abs().max()
                assert error < 1e-4
        if fed[1] == len(texts[1]) and text_of[1] == 1:
            text_of[1], runner.lengths[1] = 3, 0


def engine_for(folder: Path, **settings: Any) -> Engine:
    config = EngineConfig(model=str(folder), **SETTINGS | settings)
    return build_engine(config, folder, lambda name, duration_ms: None)


def serve(engine: Engine, prompts: list[list[int]], max_tokens: int = 9) -> list[list[int]]:
    """The greedy tokens of all prompts, which come at once."""
    got: list[list[int]] = [[] for _ in prompts]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(AddRequest(index, np.asarray(prompt, dtype="<i4").tobytes(), params))
    while engine.has_work:
        for output in engine.step():
            got[output.request_id] += output.token_ids
    engine.check_at_idle()
    return got


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_answers_do_not_depend_on_company_chunks_or_preemption(family: str, tmp_path: Path) -> None:
    theirs = random_model(family=family, **(DELTA if family == "qwen3_5_text" else DELTA_EXPERTS))
    theirs.save_pretrained(tmp_path)
    source = random.Random(4)
    common = source.choices(range(VOCAB_SIZE), k=70)
    prompts = [
        common[:begin] + source.choices(range(VOCAB_SIZE), k=length)
        for begin, length in ((0, 1), (70, 5), (0, 40), (70, 30), (0, 150), (70, 5))
    ]
    alone = engine_for(tmp_path, num_pages=40, overlap=False)
    expected = [serve(alone, [prompt])[0] for prompt in prompts]
    alone.close()
    together = engine_for(
        tmp_path,
        overlap=True,
        page_size=4,
        num_pages=60,
        max_running_requests=5,
        max_step_tokens=90,
        output_reserve_tokens=0,
    )
    assert serve(together, prompts) == expected
    assert serve(together, prompts) == expected
    status = together.status(0)
    assert status.num_preemptions > 0
    assert status.num_cached_tokens > 0
    together.close()


@pytest.mark.parametrize("snapshots", [40, 3])
def test_prompts_go_on_from_snapshots_wherever_there_are_some(snapshots: int, tmp_path: Path) -> None:
    """Texts that branch everywhere, asked again and again, with snapshots for all places or for few."""
    random_model(family="qwen3_5_text", **DELTA).save_pretrained(tmp_path)
    source = random.Random(6)
    text = source.choices(range(VOCAB_SIZE), k=90)
    prompts = [text[:length] + source.choices(range(VOCAB_SIZE), k=3) for length in range(1, 90, 4)]
    prompts += [text[:length] for length in range(2, 90, 7)]
    source.shuffle(prompts)
    alone = engine_for(tmp_path, num_pages=40, prefix_cache=False)
    expected = [serve(alone, [prompt])[0] for prompt in prompts]
    assert alone.status(0).num_cached_tokens == 0
    alone.close()
    model = read_model_config(tmp_path)
    asked = {**SETTINGS, "num_pages": 300, "page_size": 4, "max_running_requests": 6, "overlap": True}
    each = row_state_bytes(model, resolve_for_folder(EngineConfig(model=str(tmp_path), **asked), tmp_path))
    engine = engine_for(tmp_path, **asked, state_cache_memory=(snapshots + 0.5) * each / GIB)
    hits = []
    for begin in [*range(0, len(prompts), 5)] * 2:
        before = engine.status(0).num_cached_tokens
        assert serve(engine, prompts[begin : begin + 5]) == expected[begin : begin + 5]
        hits.append(engine.status(0).num_cached_tokens - before)
    if snapshots == 40:
        assert sum(hits[len(hits) // 2 :]) > 0.5 * sum(map(len, prompts))
    assert sum(hits) > 0
    engine.close()


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_hit_of_any_length_gives_the_logits_of_transformers(page_size: int, tmp_path: Path) -> None:
    theirs = random_model(family="qwen3_5_text", **DELTA)
    theirs.save_pretrained(tmp_path)
    text = random.Random(4).choices(range(3, VOCAB_SIZE), k=150)
    expected = logits_of(theirs, text).log_softmax(-1)
    engine = engine_for(tmp_path, num_pages=2400 // page_size, page_size=page_size)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    for length in range(2, len(text)):
        engine.add(AddRequest(length, np.asarray(text[:length], dtype="<i4").tobytes(), params))
        found = []
        while engine.has_work:
            found += [one for output in engine.step() for one in output.logprobs or []]
        (one,) = found
        for token, logprob in zip(one.top_ids, one.top_logprobs, strict=True):
            assert abs(logprob - expected[length - 1, token].item()) < 1e-4
    assert engine.status(0).num_cached_tokens > 0.9 * sum(range(2, len(text))) - 16 * len(text)
    engine.close()


def test_a_conversation_goes_on_from_its_own_answer(tmp_path: Path) -> None:
    theirs = random_model(family="qwen3_5_text", **DELTA)
    theirs.save_pretrained(tmp_path)
    engine = engine_for(tmp_path, num_pages=100, page_size=4)
    prompt = list(range(30))
    for _ in range(4):
        (answer,) = serve(engine, [prompt], 30)
        assert answer == greedy(theirs, prompt, 30)
        cached = engine.status(0).num_cached_tokens
        prompt = prompt + answer + [5, 6, 7]
        serve(engine, [prompt], 1)
        assert engine.status(0).num_cached_tokens - cached >= len(prompt) - 3 - 16, "less than an answer"
    engine.close()


def greedy(theirs: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(theirs, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_prompts_are_cut_behind_multiples_of_the_kernels_chunk(tmp_path: Path) -> None:
    random_model(family="qwen3_5_text", **DELTA).save_pretrained(tmp_path)
    engine = engine_for(tmp_path, num_pages=40, chunk_tokens=100)
    ends: list[int] = []
    snapshots: list[int] = []
    launch = engine.runner.launch

    def noted(plan: Any) -> Any:
        for chunk in plan.chunks:
            ends.append(chunk.num_computed_tokens + chunk.num_new_tokens)
            snapshots.append(0 if chunk.snapshot is None else chunk.num_computed_tokens + chunk.snapshot[0])
        return launch(plan)

    engine.runner.launch = noted
    serve(engine, [list(range(90)) + list(range(90)) + list(range(30))])
    engine.close()
    assert ends == [64, 128, 210]
    assert snapshots == [0, 0, 208], "at the last page's end, without a step of its own"


def test_snapshots_leave_room_for_pages_that_are_asked_for(tmp_path: Path) -> None:
    """By themselves they take a share of what is free; what the user asks for goes first."""
    random_model(family="qwen3_5_text", **DELTA).save_pretrained(tmp_path)
    model = read_model_config(tmp_path)

    def budget(free_bytes: int, **settings: Any) -> MemoryBudget:
        config = resolve_for_folder(EngineConfig(model=str(tmp_path), **SETTINGS | settings), tmp_path)
        parts = dict.fromkeys(("weights_bytes", "activation_bytes", "tables_bytes", "reserve_bytes"), 0)
        available_bytes = states_bytes(model, config) + free_bytes
        return plan_memory(model, config, available_bytes=available_bytes, **parts)

    each = budget(100_000_000).snapshot_bytes
    page_bytes = budget(100_000_000).page_bytes
    assert budget(100 * each + 1000 * page_bytes, num_pages=1000).num_snapshots > 30
    for beside in (0, 3):
        tight = budget(beside * each + 1000 * page_bytes, num_pages=1000)
        assert (tight.num_snapshots, tight.num_pages) == (beside, 1000)
    with pytest.raises(ConfigError, match="--num-pages 1000 needs"):
        budget(1000 * page_bytes, num_pages=1000, state_cache_memory=2.5 * each / GIB)
    asked = budget(4 * GIB, state_cache_memory=2.0)
    assert asked.num_snapshots == 2 * GIB // each, "more than the pool of a CPU"
    assert asked.pool_bytes > 0
    assert budget(4 * GIB).num_snapshots == 8 * 32
    with pytest.raises(ConfigError, match=r"lower --max-running-requests \(32\), --state-cache-memory \("):
        budget(16 * each + 1, state_cache_memory=16 * each / GIB)


def test_what_a_model_with_states_can_not_have_is_refused_or_left_out_by_name(tmp_path: Path) -> None:
    random_model(family="qwen3_5_text", **DELTA).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="4 heads of linear attention"):
        engine_for(tmp_path, tp=2)
    with pytest.raises(
        ConfigError, match="--kv-events-endpoint can't tell what a prompt finds in the cache of Qwen3_5"
    ):
        engine_for(tmp_path, kv_events_endpoint="tcp://127.0.0.1:0")
    asked = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32")
    resolved, model = resolve_for_folder(asked, tmp_path), read_model_config(tmp_path)
    needed = states_bytes(model, resolved)
    assert needed == 33 * 2 * (4 * 4 * 16 * 32 + 4 * 192 * 4)
    check_states_fit(model, resolved, 100, needed + 100)
    with pytest.raises(ConfigError, match=r"the states of 32 requests .* --max-running-requests, below 15"):
        check_states_fit(model, resolved, 100, needed // 2 + 100)
    with pytest.raises(ConfigError, match="--state-cache-memory 900 leaves nothing"):
        engine_for(tmp_path, state_cache_memory=900.0)
    with pytest.raises(ConfigError, match="use a smaller model, or raise --memory-fraction"):
        check_states_fit(model, resolved, 100, 100 + needed // 33)
    config = json.loads((tmp_path / "config.json").read_text())
    for change in (
        {"linear_conv_kernel_dim": 3},
        {"linear_key_head_dim": 24},
        {"linear_num_value_heads": 3},
        {"attn_output_gate": False},
        {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match="|".join(change) if "key" not in str(change) else "24 elements"):
            read_model_config(tmp_path)
