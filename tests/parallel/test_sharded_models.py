"""Each rank's part of a model, over gloo: all ranks together give what transformers gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_on_ranks
from safetensors.torch import load_file
from tiny_models import PagedRunner, int32, logits_of, random_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from minisgl.attention.interface import AttentionInputs
from minisgl.engine.graphs.decode_graphs import compiled_block
from minisgl.engine.start.memory import module_bytes
from minisgl.layers.attention import Attention
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.models.decoder import Decoder
from minisgl.models.registry import BUILDERS, build_model
from minisgl.models.sharded import ShardedTensors, shard_model
from minisgl.parallel.mesh import Ranks
from minisgl.parallel.placements import PLANS
from minisgl.weights.loader import load_weights

TOLERANCE = 1e-4
HEADS_4_2 = {"num_attention_heads": 4, "num_key_value_heads": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama, as many KV heads as heads": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "llama with biases, tied": HEADS_4_2 | {"attention_bias": True, "tie_word_embeddings": True},
    "llama, a vocabulary smaller than it is split": HEADS_4_2 | {"vocab_size": 5},
    "qwen2, its KV heads copied, tied": HEADS_4_2 | {"family": "qwen2", "tie_word_embeddings": True},
    "qwen3, one KV head": {
        "family": "qwen3",
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 20,
    },
    "gemma2": HEADS_4_2 | {"family": "gemma2", "head_dim": 16, "sliding_window": 5},
    "gemma3": HEADS_4_2
    | {"family": "gemma3_text", "head_dim": 16, "sliding_window": 5, "num_hidden_layers": 7},
    "phi3, its checkpoint's matrices taken apart": HEADS_4_2 | {"family": "phi3", "pad_token_id": 0},
    "olmo2, norms of heads on all ranks": HEADS_4_2 | {"family": "olmo2"},
    "exaone4": HEADS_4_2 | {"family": "exaone4", "sliding_window": 5, "num_hidden_layers": 4},
    "glm4": HEADS_4_2 | {"family": "glm4", "head_dim": 16, "pad_token_id": 0},
    "granite, tied": HEADS_4_2
    | {
        "family": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "logits_scaling": 1.7,
        "attention_multiplier": 0.2,
        "tie_word_embeddings": True,
    },
    "ministral3": HEADS_4_2
    | {
        "family": "ministral3",
        "head_dim": 12,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "mixtral": HEADS_4_2 | {"family": "mixtral", "num_local_experts": 4, "intermediate_size": 64},
    "qwen2_moe, its shared expert split": HEADS_4_2
    | {
        "family": "qwen2_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 24,
    },
    "qwen2_moe, its shared expert one of the experts": HEADS_4_2
    | {
        "family": "qwen2_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "glm4_moe, its shared experts split": HEADS_4_2
    | {
        "family": "glm4_moe",
        "head_dim": 16,
        "use_qk_norm": True,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "routed_scaling_factor": 1.5,
        "num_hidden_layers": 3,
    },
    "gemma4, shared keys and values, inputs of layers": {
        "family": "gemma4_text",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 5,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 97,
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_oss, its biases and sinks split": HEADS_4_2
    | {
        "family": "gpt_oss",
        "head_dim": 16,
        "sliding_window": 5,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "qwen3_moe": HEADS_4_2
    | {
        "family": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
}


def prompt(vocab_size: int) -> list[int]:
    return [(7 * place + 3) % vocab_size for place in range(23)]


def load_part(folder: Path, ranks: Ranks) -> tuple[Decoder, ShardedTensors, int]:
    """A rank's part of the model in `folder`, and how many bytes the loader says that it read."""
    config = read_model_config(folder)
    kind: dict[str, Any] = {"attention_backend": "torch", "dtype": torch.float32, "device": "cpu"}
    model = build_model(config, tp=ranks.size, **kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    tensors = shard_model(model, config, ranks)
    progress: list[int] = []
    load_weights(
        tensors,
        folder,
        config,
        dtype=torch.float32,
        device="cpu",
        on_progress=lambda what, done, total, unit="": progress.append(done),
    )
    return model, tensors, progress[-1]


def logits_of_part(ranks: Ranks, folder: Path, token_ids: list[int]) -> Any:
    model, _, _ = load_part(folder, ranks)
    runner = PagedRunner(model, num_rows=1, page_size=4, max_tokens=24, seed=1)
    chunks = [token_ids[:9], token_ids[9:22], token_ids[22:]]
    with torch.inference_mode():
        return torch.cat([runner.feed([(0, chunk)]) for chunk in chunks]).numpy()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_rank_has_the_whole_models_logits(variant: str, size: int, tmp_path: Path) -> None:
    reference = random_model(**VARIANTS[variant])
    reference.save_pretrained(tmp_path)
    token_ids = prompt(reference.config.vocab_size)
    expected = logits_of(reference, token_ids)
    assert expected.std() > 0.5, "a flat model would hide mistakes"
    parts = [
        torch.from_numpy(each) for each in run_on_ranks(size, tmp_path, logits_of_part, tmp_path, token_ids)
    ]
    assert (parts[0] - expected).abs().max().item() < TOLERANCE
    for part in parts[1:]:
        assert torch.equal(part, parts[0]), "ranks must agree to the bit, or they sample different tokens"


def check_whole_tensors(ranks: Ranks, folder: Path) -> tuple[int, int, int]:
    """Puts every DTensor together again and compares it with the checkpoint; bytes: of parameters, of the
    tensors' local parts, and as the loader counted them."""
    model, tensors, read_bytes = load_part(folder, ranks)
    checkpoint = load_file(folder / "model.safetensors")
    placed = tensors.checkpoint_tensors()
    for name, tensor in placed.items():
        assert isinstance(tensor, DTensor)
        assert torch.equal(tensor.full_tensor(), checkpoint[name]), name
    local_bytes = sum(tensor.to_local().nbytes for tensor in placed.values() if isinstance(tensor, DTensor))
    return sum(parameter.nbytes for parameter in model.parameters()), local_bytes, read_bytes


@pytest.mark.parametrize("variant", ["llama with biases, tied", "qwen3_moe"])
def test_the_ranks_dtensors_make_up_the_checkpoint_and_no_rank_holds_more_than_its_share(
    variant: str, tmp_path: Path
) -> None:
    reference = random_model(**VARIANTS[variant])
    reference.save_pretrained(tmp_path)
    whole_bytes = sum(parameter.nbytes for parameter in reference.parameters())
    for size in (2, 4):
        for held, local, read in run_on_ranks(size, tmp_path, check_whole_tensors, tmp_path):
            assert read == local <= held
            # Norms and routers are whole on each rank, the vocabulary is padded, KV heads may be copied.
            assert held < 1.3 * whole_bytes / size


def trace_blocks(ranks: Ranks, folder: Path) -> tuple[list[int], bool]:
    """The all-reduces in each graph that the blocks are compiled to, and whether logits stay the same."""
    reductions: list[int] = []

    def note(module: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        reductions.append(sum("all_reduce_norm" in str(node.target) for node in module.graph.nodes))
        return module.forward

    # Its reference on CPU looks at values as its kernels don't. This process is the test's own.
    Attention.forward = lambda self, qkv, *_: qkv[:, : self.num_heads * self.head_dim]  # type: ignore
    model, _, _ = load_part(folder, ranks)
    run_block = compiled_block(16, note)
    token_ids = int32([3, 1, 4, 1, 5])
    inputs = AttentionInputs(token_ids, token_ids, token_ids, token_ids, token_ids, 1)
    with torch.inference_mode():
        plain = model(token_ids, token_ids, inputs)
        compiled = model(token_ids, token_ids, inputs, run_block=run_block)
    return reductions, torch.equal(plain, compiled)


def test_all_blocks_are_compiled_as_one_graph_with_its_reductions_inside(tmp_path: Path) -> None:
    random_model(**VARIANTS["llama, as many KV heads as heads"]).save_pretrained(tmp_path)
    ((reductions, same),) = run_on_ranks(1, tmp_path, trace_blocks, tmp_path)
    assert reductions == [2], "one graph, which has both"
    assert same


def test_every_family_has_a_plan() -> None:
    assert PLANS.keys() == BUILDERS.keys()


def test_a_part_takes_its_share_of_memory(tmp_path: Path) -> None:
    random_model(**VARIANTS["qwen3_moe"]).save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    kind: dict[str, Any] = {"attention_backend": "torch", "dtype": torch.float32, "device": "meta"}
    sizes = [module_bytes(build_model(config, tp=tp, **kind)) for tp in (1, 2, 4)]
    assert sizes[0] > 1.5 * sizes[1] > 2 * sizes[2]
