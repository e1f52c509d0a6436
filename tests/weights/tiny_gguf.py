"""Tiny random models as GGUF files."""

from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from minisgl.weights.gguf_convert import ARCHITECTURES, TOP_NAMES

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
# Byte-level letters, so that every one of the tokens below can be reached by merges.
LETTERS = ["!", "a", "b", "c", "1", "2", "Ġ", "Ċ"]
MERGES = ["a b", "Ġ ab", "1 2", "ab c"]
TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *LETTERS,
    *(m.replace(" ", "") for m in MERGES),
    "<mine>",
    "[UNUSED]",
]
KINDS = [3, 3, 3, *[1] * (len(LETTERS) + len(MERGES)), 4, 5]


def write_gguf(path: Path, *, pre: str = "smollm", architecture: str = "llama") -> PreTrainedModel:
    """A tiny model as llama.cpp's converter would store it; returns transformers' own."""
    torch.manual_seed(1)
    kind = ARCHITECTURES[architecture]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 5000.0}
    settings: dict[str, Any] = {}
    if architecture == "gemma3":
        settings = {"query_pre_attn_scalar": 16, "sliding_window": 7}
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    num_layers = 7 if architecture == "gemma3" else 2
    config = AutoConfig.for_model(
        kind.model_type,
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        tie_word_embeddings=True,
        initializer_range=0.2,
        **settings,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.copy_(torch.randint(-64, 64, parameter.shape) / 128)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(num_layers)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if architecture == "gemma3":
        writer.add_sliding_window(7)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(KINDS)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    theirs = model.state_dict()
    of_gguf = {hf: ours for ours, hf in TOP_NAMES.items() if hf != "lm_head.weight"}
    of_gguf |= {
        f"model.layers.{i}.{hf}.{end}": f"blk.{i}.{ours}.{end}"
        for i in range(num_layers)
        for ours, hf in kind.layer_names.items()
        for end in ("weight", "bias")
    }
    for hf in theirs:
        if hf == "lm_head.weight":
            continue
        ours = of_gguf[hf]
        values = theirs[hf].numpy().copy()
        if kind.rope_pairs_adjacent and ours.endswith(("attn_q.weight", "attn_k.weight")):
            heads = 4 if "attn_q" in ours else 2
            values = values.reshape(heads, 2, 8, 64).swapaxes(1, 2).reshape(values.shape).copy()
        if kind.norms_have_one_added and "norm" in ours:
            values = values + 1
        if "ffn" in ours and values.ndim == 2:
            blocks = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            theirs[hf].copy_(torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)))
            writer.add_tensor(ours, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(ours, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
