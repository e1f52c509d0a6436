"""What a step has to do at least: counted by hand, and routed by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from tiny_config import TINY
from torch import nn

from minisgl.benchmark.kernels.kernel_timing import Ceilings
from minisgl.benchmark.model_configs import model_folder
from minisgl.benchmark.steps.step_floor import (
    Attending,
    Costs,
    Work,
    costs_of,
    expected_experts_hit,
    experts_hit,
)
from minisgl.config import EngineConfig
from minisgl.engine.model_runner import ModelRunner
from minisgl.layers.moe import MoeMLP
from minisgl.layers.norm import RMSNorm
from minisgl.model_config.config import ExpertsConfig
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.model_config.kv_groups import KVShape, StateShape
from minisgl.models.registry import build_model

COSTS = Costs(
    block_parameters=1000,
    head_parameters=100,
    item_bytes=2,
    attending=(Attending(0, kv_bytes=8, pair_flop=4),) * 2,
)


def windows(*sizes: int) -> tuple[Attending, ...]:
    return tuple(Attending(size, kv_bytes=8, pair_flop=4) for size in sizes)


def test_a_floor_counts_each_byte_and_product_once() -> None:
    assert COSTS.decode(4, 10.0) == Work(2200 + 4 * 10 * 16, 2 * 4 * 1100 + 4 * 10 * 8)
    pairs = [5 + place + 1 for place in range(3)]
    assert COSTS.prefill(3, 5) == Work(2200 + 8 * 16, 2 * 3 * 1000 + 2 * 100 + 4 * (sum(pairs) + pairs[-1]))


def test_of_the_last_layer_a_prompt_needs_all_keys_and_values_and_one_token() -> None:
    costs = COSTS._replace(
        attending=(),
        last_parameters=300,
        expert_parameters=20,
        last_expert_parameters=10,
        experts_per_token=2,
    )
    assert costs.prefill(1, 0).flop == 2 * (1000 + 2 * 20 + 100)
    assert costs.prefill(5, 0).flop == costs.prefill(1, 0).flop + 2 * 4 * (700 + 2 * 10)
    assert costs.decode(5, 1.0).flop == 5 * costs.prefill(1, 0).flop


def test_states_are_read_and_written_and_keys_are_in_the_other_layers_only() -> None:
    costs = COSTS._replace(attending=windows(0), state_bytes=500, state_flop=60)
    plain = COSTS._replace(attending=windows(0))
    assert costs.decode(4, 10.0).num_bytes - plain.decode(4, 10.0).num_bytes == 4 * 2 * 500
    assert costs.decode(4, 10.0).flop - plain.decode(4, 10.0).flop == 4 * 60
    for prefix, moved in ((0, 500), (7, 1000)):
        assert costs.prefill(3, prefix).num_bytes - plain.prefill(3, prefix).num_bytes == moved
        assert costs.prefill(3, prefix).flop - plain.prefill(3, prefix).flop == 3 * 60
    shapes = (StateShape(2, 16, 32, 96, 4), KVShape(TINY.num_kv_heads, TINY.head_dim))
    config = replace(TINY, architecture="Qwen3_5ForCausalLM", num_layers=2, cache_shapes=shapes)
    model = build_model(config, attention_backend="torch", dtype=torch.float32, device="cpu")
    found = costs_of(cast(ModelRunner, SimpleNamespace(model=model)), config)
    kv_bytes = 2 * TINY.num_kv_heads * TINY.head_dim * 4
    assert found.attending == (Attending(0, kv_bytes, 4 * TINY.num_heads * TINY.head_dim),)
    assert found.state_bytes == 4 * 2 * 16 * 32 + 4 * 96 * 4
    assert found.state_flop == 6 * 2 * 16 * 32


def test_layers_with_heads_of_two_sizes_count_as_they_are() -> None:
    with model_folder(EngineConfig(model="gemma-4-31b", dummy_weights=True)) as folder:
        config = read_model_config(folder)
    kept = ("local_rope_layers", "layers_with_keys_as_values")
    cut = {name: frozenset(layer - 4 for layer in getattr(config, name) if layer in (4, 5)) for name in kept}
    config = replace(
        config,
        num_layers=2,
        windows=config.windows[4:6],
        cache_shapes=config.cache_shapes[4:6],
        kv_sources=(),
        vocab_size=40,
        hidden_size=8,
        intermediate_size=20,
        **cut,
    )
    model = build_model(config, attention_backend="torch", dtype=torch.float32, device="cpu")
    found = costs_of(cast(ModelRunner, SimpleNamespace(model=model)), config)
    assert found.attending == (
        Attending(1024, 2 * 16 * 256 * 4, 4 * 32 * 256),
        Attending(0, 2 * 4 * 512 * 4, 4 * 32 * 512),
    )
    norms = sum(parameter.numel() for name, parameter in model.layers[1].named_parameters() if "norm" in name)
    assert found.last_parameters == 2 * 32 * 512 * 8 + 3 * 8 * 20 + norms + 1  # the last scales the layer


@pytest.mark.parametrize("window", [1, 2, 6, 7, 100])
@pytest.mark.parametrize(("num_tokens", "prefix"), [(1, 0), (3, 5), (9, 0), (9, 20)])
def test_a_layer_with_a_window_reads_only_what_is_inside(window: int, num_tokens: int, prefix: int) -> None:
    seen = [
        range(max(0, position - window + 1), position + 1) for position in range(prefix, prefix + num_tokens)
    ]
    full = COSTS._replace(attending=windows(0)).prefill(num_tokens, prefix)
    both = COSTS._replace(attending=windows(window, 0)).prefill(num_tokens, prefix)
    assert both.num_bytes - full.num_bytes == 8 * len({key for keys in seen for key in keys})
    assert both.flop - full.flop == 4 * sum(map(len, seen))
    one = COSTS._replace(attending=windows(window)).decode(3, prefix + 1)
    assert one.num_bytes == 2200 + 3 * 8 * len(seen[0])


def test_a_floor_counts_the_experts_that_were_hit() -> None:
    costs = COSTS._replace(attending=(), expert_parameters=10, experts_per_token=2)
    assert costs.decode(2, 10.0, experts_hit=3.5) == Work(2 * (1100 + 3.5 * 10), 2 * 2 * 1120)
    assert costs.prefill(100, 0, experts_hit=8.0).num_bytes == 2 * 1180


@pytest.mark.parametrize("shared_width", [4, 12])
def test_a_shared_expert_is_read_by_every_step(shared_width: int) -> None:
    experts = ExpertsConfig(
        num_experts=4,
        experts_per_token=2,
        intermediate_size=4,
        renormalize=True,
        shared_intermediate_size=shared_width,
    )
    config = replace(TINY, experts=experts, architecture="Qwen2MoeForCausalLM")
    model = build_model(config, attention_backend="torch", dtype=torch.float32, device="cpu")
    assert {layer.has_shared_among_experts for layer in model.expert_layers()} == {shared_width == 4}
    found = costs_of(cast(ModelRunner, SimpleNamespace(model=model)), config)
    each = 3 * config.hidden_size * 4
    assert found.expert_parameters == each * config.num_layers
    assert found.saved_expert_bytes == 0
    # The head is the embedding.
    of_blocks = sum(one.numel() for one in model.parameters()) - found.head_parameters
    assert found.block_parameters == of_blocks - 4 * found.expert_parameters
    last = sum(one.numel() for one in model.layers[-1].parameters()) - 4 * each
    kv_projections = 2 * config.num_kv_heads * config.head_dim * config.hidden_size
    assert found.last_parameters == last - kv_projections


MODEL = replace(
    TINY,
    num_layers=3,
    hidden_size=8,
    intermediate_size=20,
    head_dim=4,
    vocab_size=30,
    tie_word_embeddings=False,
)
QKV, OUT, DENSE, NORMS = 8 * (16 + 8 + 8), 16 * 8, 3 * 8 * 20, 2 * 8
EXPERT, ROUTER = 3 * 8 * 6, 5 * 8


@pytest.mark.parametrize("dense_layers", [None, frozenset(), frozenset({0}), frozenset({2})])
def test_a_models_costs_are_those_of_its_parts(dense_layers: frozenset[int] | None) -> None:
    config = MODEL
    if dense_layers is not None:
        experts = ExpertsConfig(
            num_experts=5,
            experts_per_token=2,
            intermediate_size=6,
            renormalize=True,
            dense_layers=dense_layers,
        )
        config = replace(MODEL, experts=experts)
    model = build_model(config, attention_backend="torch", dtype=torch.float32, device="cpu")
    costs = costs_of(cast(ModelRunner, SimpleNamespace(model=model)), config)
    dense = {0, 1, 2} if dense_layers is None else dense_layers
    rest = [DENSE if layer in dense else ROUTER for layer in range(3)]
    assert costs.block_parameters == 3 * (QKV + OUT + NORMS) + sum(rest) + 8  # the last is the final norm
    assert costs.head_parameters == 30 * 8
    assert costs.last_parameters == QKV - 2 * 8 * 8 + OUT + NORMS + rest[-1]
    assert costs.expert_parameters == EXPERT * (3 - len(dense))
    assert costs.last_expert_parameters == (0 if 2 in dense else EXPERT)
    assert costs.prefill(1, 0).flop == costs.decode(1, 1.0).flop


def test_even_routing_hits_few_experts_of_the_last_layer() -> None:
    experts = ExpertsConfig(num_experts=4, experts_per_token=1, intermediate_size=6, renormalize=True)
    assert expected_experts_hit(MODEL, 100, 1) == 0.0
    assert expected_experts_hit(replace(MODEL, experts=experts), 1, 1) == pytest.approx(1.0)
    first_two, last = 4 * (1 - 0.75**2), 1.0
    assert expected_experts_hit(replace(MODEL, experts=experts), 2, 1) == pytest.approx(
        (2 * first_two + last) / 3
    )
    dense_last = replace(experts, dense_layers=frozenset({2}))
    assert expected_experts_hit(replace(MODEL, experts=dense_last), 2, 1) == pytest.approx(first_two)


@pytest.mark.parametrize("shared_width", [0, 4])
def test_the_experts_that_tokens_were_sent_to_are_counted_and_those_of_padding_are_not(
    shared_width: int,
) -> None:
    config = ExpertsConfig(
        num_experts=8,
        experts_per_token=2,
        intermediate_size=4,
        renormalize=True,
        shared_intermediate_size=shared_width,
    )
    layers = [MoeMLP(config, 8, torch.float32, torch.device("cpu")) for _ in range(2)]
    for layer in layers:
        assert layer.has_shared_among_experts == bool(shared_width)
        layer.router.fill_(9.0)  # a shared one's gate
        layer.router[:8].copy_(torch.eye(8))  # a token goes to the experts of its two largest values
        for name in ("gate_up", "down"):
            nn.init.zeros_(layer.experts.get_parameter(name))
    norm = RMSNorm(8, 1e-6, torch.float32, torch.device("cpu"))
    nn.init.ones_(norm.weight)
    model = SimpleNamespace(expert_layers=lambda: layers)
    runner = cast(ModelRunner, SimpleNamespace(model=model))

    def tokens(*pairs: tuple[int, int]) -> torch.Tensor:
        return torch.stack([torch.eye(8)[first] + torch.eye(8)[second] for first, second in pairs])

    def run() -> None:
        for layer, x, slots in (
            (layers[0], tokens((0, 1), (1, 2), (5, 6)), [3, 4, -1]),
            (layers[1], tokens((0, 1), (2, 3), (4, 7)), [3, 4, 5]),
        ):
            layer.forward_add(x, torch.zeros_like(x), norm, torch.tensor(slots, dtype=torch.int32))

    assert experts_hit(runner, run) == (3 + 6) / 2
    layers.clear()
    assert experts_hit(runner, run) == 0.0


def test_the_floor_is_the_larger_of_two_times() -> None:
    ceilings = Ceilings(copy_tb_s=4.0, matmul_tflop_s=800.0)
    reading, multiplying = Work(16e9, 1e12), Work(16e9, 8e12)
    assert (reading.floor_ms(ceilings), reading.limit(ceilings)) == (pytest.approx(4.0), "memory")
    assert (multiplying.floor_ms(ceilings), multiplying.limit(ceilings)) == (pytest.approx(10.0), "compute")
