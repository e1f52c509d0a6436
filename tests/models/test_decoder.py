"""Our decoder: batches, pages, padding, tracing; against transformers in float32 where it counts."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_config import TINY
from tiny_models import VOCAB_SIZE, PagedRunner, int32, load_ours, logits_of, random_model

from minisgl.attention import torch as torch_attention
from minisgl.attention.interface import Attend, AttentionInputs
from minisgl.engine.graphs.decode_graphs import compiled_block
from minisgl.layers.moe import MoeMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.weight import PlainWeight
from minisgl.model_config.config import ExpertsConfig
from minisgl.models.checkpoint import pack_weights
from minisgl.models.decoder import Decoder, MakeBlock
from minisgl.models.gemma import GemmaBlock
from minisgl.weights.dummy import fill_dummy
from triton_kernels.packed_weights import can_pack
from triton_kernels.registry import KERNELS

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TOLERANCE = 1e-4


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(VOCAB_SIZE), k=length)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert torch.isfinite(ours).all()
    assert (ours - theirs).abs().max().item() < TOLERANCE


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 127, 300])
@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_logits_equal_transformers_at_every_length_and_page_size(
    length: int, page_size: int, tmp_path: Path
) -> None:
    reference = random_model(seed=1, rope_parameters=LLAMA3_ROPE)
    reference.save_pretrained(tmp_path)
    token_ids = prompt(length)
    runner = PagedRunner(load_ours(tmp_path), num_rows=1, page_size=page_size, max_tokens=300, seed=3)
    assert_same(runner.feed([(0, token_ids)]), logits_of(reference, token_ids))


@pytest.mark.parametrize("attention_backend", ["torch", "triton"])
def test_a_ragged_batch_gives_each_row_what_it_gets_alone(attention_backend: str, tmp_path: Path) -> None:
    reference = random_model(seed=2)
    reference.save_pretrained(tmp_path)
    model = load_ours(tmp_path, attention_backend)
    prompts = [prompt(length, seed=9) for length in (33, 1, 90, 17, 64)]
    expected = [logits_of(reference, token_ids) for token_ids in prompts]
    runner = PagedRunner(model, num_rows=5, page_size=8, max_tokens=96, seed=5)
    fed = [0] * 5
    # Prefills, chunks over a paged context and single decodes, mixed; the last step is decodes alone.
    for chunks in ({2: 40, 0: 5}, {1: 1, 2: 1, 3: 16, 0: 27}, {4: 63, 2: 48}, {0: 1, 2: 1, 3: 1, 4: 1}):
        rows = [(row, prompts[row][fed[row] : fed[row] + count]) for row, count in chunks.items()]
        last = runner.feed(rows, last_only=True)
        for place, (row, token_ids) in enumerate(rows):
            fed[row] += len(token_ids)
            assert_same(last[place], expected[row][fed[row] - 1])
    assert fed == [len(token_ids) for token_ids in prompts]


def test_padding_tokens_leave_the_pool_alone_and_other_rows_unchanged(tmp_path: Path) -> None:
    reference = random_model(seed=4)
    reference.save_pretrained(tmp_path)
    model = load_ours(tmp_path)
    token_ids = prompt(20)
    runner = PagedRunner(model, num_rows=2, page_size=4, max_tokens=24, seed=1)
    runner.feed([(0, token_ids[:19])])
    written = [~torch.isnan(attention.k_cache) for attention in model.attention_layers()]
    slot = int(runner.page_table[0, 4]) * 4 + 3
    inputs = AttentionInputs(
        page_table=runner.page_table,
        row_ids=int32([0, 1, 1]),
        context_len=int32([20, 0, 0]),
        slot_mapping=int32([slot, -1, -1]),
        row_start=int32([0, 1, 2, 3]),
        max_query_len=1,
    )
    with torch.inference_mode():
        logits = model(int32([token_ids[19], 0, 0]), int32([19, 0, 0]), inputs)
    assert_same(logits[0], logits_of(reference, token_ids)[-1])
    assert torch.isfinite(logits).all()
    for before, attention in zip(written, model.attention_layers(), strict=True):
        before[slot // 4, slot % 4] = True
        assert torch.equal(~torch.isnan(attention.k_cache), before)


@pytest.mark.parametrize(("make_block", "has_experts"), [(None, False), (None, True), (GemmaBlock, False)])
def test_tokens_without_logits_end_behind_the_last_attention(
    make_block: MakeBlock | None, has_experts: bool
) -> None:
    model = tiny_decoder(
        tie_word_embeddings=False, make_block=make_block, experts=EXPERTS if has_experts else None
    )
    fill_dummy(model, seed=0)
    runner = PagedRunner(model, num_rows=4, page_size=4, max_tokens=16, seed=0)
    shapes: list[tuple[int, ...]] = []
    last_projection = model.get_submodule("layers.1.self_attn.o_proj")
    last_projection.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
    first, second = prompt(9), prompt(5)
    every = runner.feed([(0, first), (1, second)])
    last = runner.feed([(2, first), (3, second)], last_only=True)
    assert [shape[0] for shape in shapes] == [14, 2]
    assert torch.allclose(last, every[[8, 13]], atol=1e-5)
    for attention in model.attention_layers():
        for pool in (attention.k_cache, attention.v_cache):
            stored = pool[runner.page_table.long()].flatten(1, 2)
            assert torch.allclose(stored[2, :9], stored[0, :9], atol=1e-6)
            assert torch.allclose(stored[3, :5], stored[1, :5], atol=1e-6)


def test_tied_embeddings_are_one_parameter() -> None:
    tied = tiny_decoder(tie_word_embeddings=True)
    untied = tiny_decoder(tie_word_embeddings=False)
    assert tied.lm_head.weight.values is tied.embed_tokens.weight
    assert "lm_head.weight" not in tied.checkpoint_tensors()
    assert "lm_head.weight" in untied.checkpoint_tensors()
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 97 * 32


def test_all_weights_are_packed_and_a_head_that_is_the_embedding_is_a_copy() -> None:
    for is_tied in (True, False):
        model = tiny_decoder(tie_word_embeddings=is_tied).bfloat16()
        embedding, head = model.embed_tokens.weight, model.lm_head.weight
        if not can_pack(embedding):
            pytest.skip("needs a processor with AVX-512")
        assert isinstance(head, PlainWeight)
        torch.nn.init.normal_(head.values)
        x = torch.randn(3, embedding.shape[1]).bfloat16()
        logits = x.float() @ head.values.float().T
        pack_weights(model)
        packed = {name: parameter.is_mkldnn for name, parameter in model.named_parameters()}
        assert packed.pop("embed_tokens.weight") is False
        assert packed["lm_head.weight.values"]
        assert all(is_packed == name.endswith(".values") for name, is_packed in packed.items())
        assert torch.allclose(model.lm_head(x).float(), logits, rtol=1e-2, atol=1e-2)
        assert not any(tensor.is_mkldnn for tensor in model.checkpoint_tensors().values())
        head.unpack()
        assert (head.values is embedding) is is_tied


EXPERTS = ExpertsConfig(num_experts=5, experts_per_token=2, intermediate_size=16, renormalize=True)


@pytest.mark.parametrize("experts", [None, EXPERTS])
def test_a_decode_step_of_any_batch_size_is_one_graph(experts: ExpertsConfig | None) -> None:
    model = traceable_decoder(experts)
    graphs = CountingBackend()
    compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=False)
    for batch in (3, 5, 2, 7):
        token_ids, positions, inputs = decode_batch(batch)
        for tensor in (token_ids, positions, *(one for one in inputs if isinstance(one, torch.Tensor))):
            torch._dynamo.mark_dynamic(tensor, 0)
        with torch.inference_mode():
            traced = compiled(token_ids, positions, inputs)
            assert torch.allclose(traced, model(token_ids, positions, inputs), atol=1e-5)
    assert graphs.count == 1


@pytest.mark.parametrize(("family", "kinds"), [("dense", 1), ("experts", 1), ("both", 2), ("gemma3", 1)])
def test_blocks_of_a_kind_share_one_compilation_for_few_rows_and_one_for_many(
    family: str, kinds: int
) -> None:
    experts = {"experts": EXPERTS, "both": replace(EXPERTS, dense_layers=frozenset({1}))}.get(family)
    model = traceable_decoder(experts, GemmaBlock if family == "gemma3" else None)
    graphs = CountingBackend()
    run_block = compiled_block(max_batch=24, backend=graphs)
    for batch, expected in ((24, 1), (17, 1), (16, 2), (2, 2), (20, 2), (5, 2)):
        token_ids, positions, inputs = decode_batch(batch)
        with torch.inference_mode():
            ours = model(token_ids, positions, inputs, run_block=run_block)
            assert torch.allclose(ours, model(token_ids, positions, inputs), atol=1e-5)
        assert graphs.count == kinds * expected


class CountingBackend:
    """Compiles nothing; counts what it is given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


def test_tokens_without_a_slot_go_to_no_expert() -> None:
    model = tiny_decoder(tie_word_embeddings=True, experts=EXPERTS)
    fill_dummy(model, seed=0)
    mixture = model.get_submodule("layers.0.mlp")
    assert isinstance(mixture, MoeMLP)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    norm = model.get_submodule("layers.0.post_attention_layernorm")
    assert isinstance(norm, RMSNorm)
    every, stream = mixture.forward_add(x, x, norm, int32([3, 9, 5, 0]))
    some, _ = mixture.forward_add(x, x, norm, int32([3, -1, 5, -1]))
    torch.testing.assert_close(stream, 2 * x)
    torch.testing.assert_close(some[[0, 2]], every[[0, 2]])
    assert (every != 0).all()
    assert (some[[1, 3]] == 0).all()


@pytest.mark.parametrize("op", ["add_rms_norm", "linear"])
def test_an_op_in_the_place_of_ours_runs_in_front_of_experts_too(op: str) -> None:
    model = tiny_decoder(tie_word_embeddings=True, experts=EXPERTS)
    fill_dummy(model, seed=0)
    calls = []

    def theirs(*arguments: Any) -> Any:
        calls.append(op)
        return getattr(KERNELS, op)(*arguments)

    norm, mixture = model.get_submodule("layers.0.post_attention_layernorm"), model.expert_layers()[0]
    assert isinstance(norm, RMSNorm)
    x, slots = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)), int32([3, -1, 5, 0])
    expected = mixture.forward_add(x, x, norm, slots)
    norm.kernels = mixture.kernels = KERNELS._replace(**{op: theirs})
    torch.testing.assert_close(mixture.forward_add(x, x, norm, slots), expected)
    assert calls == [op]


def traceable_decoder(experts: ExpertsConfig | None = None, make_block: MakeBlock | None = None) -> Decoder:
    """With stand-ins for two ops, whose CPU references look at values as their kernels don't."""
    torch._dynamo.reset()
    model = tiny_decoder(
        tie_word_embeddings=True, attend=attend_without_looking, experts=experts, make_block=make_block
    )
    kernels = KERNELS._replace(rope_store=store_without_looking)
    for attention in model.attention_layers():
        attention.kernels = kernels
    fill_dummy(model, seed=0)
    model.allocate_kv(24, 4, torch.float32, "cpu")
    return model


def decode_batch(batch: int) -> tuple[torch.Tensor, torch.Tensor, AttentionInputs]:
    """Token ids, positions and inputs of rows that decode their first token, each on a page of its own."""
    rows = torch.arange(batch, dtype=torch.int32)
    inputs = AttentionInputs(
        page_table=torch.arange(24, dtype=torch.int32)[:, None].repeat(1, 2),
        row_ids=rows.clone(),
        context_len=torch.ones_like(rows),
        slot_mapping=rows * 4,
        row_start=torch.arange(batch + 1, dtype=torch.int32),
        max_query_len=1,
    )
    return rows + 11, torch.zeros_like(rows), inputs


def store_without_looking(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """Stores unrotated keys (every token here is at position 0, where rotation changes nothing)."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.unflatten(1, (-1, head_dim))
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping.long(), heads[:, -2 * num_kv_heads : -num_kv_heads])
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping.long(), heads[:, -num_kv_heads:])
    return heads[:, : -2 * num_kv_heads]


def attend_without_looking(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    inputs: AttentionInputs,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    kv_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode attention over full pages with a mask."""
    pages = inputs.page_table[inputs.row_ids.long()].long()
    groups = q.shape[1] // k_cache.shape[2]
    keys = k_cache[pages].flatten(1, 2).repeat_interleave(groups, dim=2)
    values = v_cache[pages].flatten(1, 2).repeat_interleave(groups, dim=2)
    scores = torch.einsum("rhd,rnhd->rhn", q, keys) * scale
    assert window == 0
    unseen = torch.arange(keys.shape[1]) >= inputs.context_len[:, None]
    weights = scores.masked_fill(unseen[:, None], float("-inf")).softmax(-1)
    return torch.einsum("rhn,rnhd->rhd", weights, values)


def tiny_decoder(
    *,
    tie_word_embeddings: bool,
    attend: Attend = torch_attention.attend,
    experts: ExpertsConfig | None = None,
    make_block: MakeBlock | None = None,
) -> Decoder:
    config = replace(TINY, tie_word_embeddings=tie_word_embeddings, experts=experts)
    return Decoder(config, attend, make_block=make_block)
