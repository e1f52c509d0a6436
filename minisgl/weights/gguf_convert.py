"""Turns a GGUF file of the Llama architecture into a normal Hugging Face folder, without torch.

Promise: the folder loads in transformers and in minisgl alike; every weight is the GGUF's dequantized
value rounded once to bfloat16; nothing outside `out` is written.
"""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from minisgl.errors import ModelError
from minisgl.weights.progress import Progress, no_progress

# Token types of the GGUF format; the others (1 normal, 5 unused, 6 byte) are plain vocabulary entries.
CONTROL, USER_DEFINED = 3, 4

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def convert_llama_gguf(source: Path, out: Path, *, progress: Progress = no_progress) -> None:
    """Write config.json, generation_config.json, tokenizer files and model.safetensors (bfloat16) into `out`.

    Raises:
        ModelError: the file is no Llama-architecture GGUF, or its tokenizer is of a kind not known here.
    """
    reader = gguf.GGUFReader(str(source))
    facts = {name: field.contents() for name, field in reader.fields.items()}
    if facts.get("general.architecture") != "llama":
        raise ModelError(
            f"{source.name} holds the architecture {facts.get('general.architecture')!r}; "
            "only GGUF files of the architecture 'llama' can be converted"
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = hf_config(facts, tied="output.weight" not in tensors)
    _write_json(out / "config.json", config)
    _write_json(
        out / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    progress("writing the tokenizer", 0, 1)
    build_tokenizer(facts).save(str(out / "tokenizer.json"))
    _write_json(out / "tokenizer_config.json", tokenizer_config(facts))
    progress("writing the tokenizer", 1, 1)

    with (out / "model.safetensors").open("wb") as file:
        file.write(safetensors_header({hf_name(t.name): hf_shape(t) for t in tensors.values()}))
        for done, (name, tensor) in enumerate(tensors.items()):
            progress("converting the weights", done, len(tensors))
            values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(hf_shape(tensor))
            if name.endswith("attn_q.weight"):
                values = unpermute_rope_rows(values, config["num_attention_heads"])
            elif name.endswith("attn_k.weight"):
                values = unpermute_rope_rows(values, config["num_key_value_heads"])
            file.write(round_to_bfloat16(values).tobytes())
    progress("converting the weights", len(tensors), len(tensors))


def hf_config(facts: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """A Llama `config.json` that transformers 4 and 5 both read, from GGUF's key-value fields."""
    num_heads = int(facts["llama.attention.head_count"])
    hidden_size = int(facts["llama.embedding_length"])
    # GGUF stores float32: 1e-5 comes back as 9.99999974e-06, so print it as short as float32 allows.
    eps = float(str(np.float32(facts["llama.attention.layer_norm_rms_epsilon"])))
    theta = float(facts.get("llama.rope.freq_base", 10000.0))
    if any(name.startswith("llama.rope.scaling") for name in facts):
        raise ModelError("the GGUF file asks for RoPE scaling, which its conversion does not know yet")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": int(facts["llama.block_count"]),
        "hidden_size": hidden_size,
        "intermediate_size": int(facts["llama.feed_forward_length"]),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(facts.get("llama.attention.head_count_kv", num_heads)),
        "head_dim": int(facts.get("llama.attention.key_length", hidden_size // num_heads)),
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "max_position_embeddings": int(facts["llama.context_length"]),
        "rms_norm_eps": eps,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "bos_token_id": facts.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts.get("tokenizer.ggml.padding_token_id"),
    }


def build_tokenizer(facts: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer that the GGUF's vocabulary, merges and token types describe.

    Raises:
        ModelError: another tokenizer model or pre-tokenizer than gpt2 / smollm.
    """
    model, pre = facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre")
    if (model, pre) != ("gpt2", "smollm"):
        raise ModelError(
            f"GGUF tokenizer {model!r} with pre-tokenizer {pre!r} is not known; only gpt2/smollm"
        )
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ", 1)) for line in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    for kind, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        add(
            [
                AddedToken(token, normalized=False, special=kind == CONTROL)
                for token, its_kind in zip(tokens, kinds, strict=True)
                if its_kind == kind
            ]
        )
    return tokenizer


def tokenizer_config(facts: dict[str, Any]) -> dict[str, Any]:
    """`tokenizer_config.json`: special tokens by name, the context length, the chat template."""
    tokens = facts["tokenizer.ggml.tokens"]
    named = {
        f"{short}_token": tokens[facts[f"tokenizer.ggml.{long}_token_id"]]
        for short, long in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{long}_token_id" in facts
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(facts.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(facts["llama.context_length"]),
        **named,
        "chat_template": facts["tokenizer.chat_template"],
    }


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF Llama tensor.

    Raises:
        ModelError: no Llama tensor is called so.
    """
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    raise ModelError(f"the GGUF file holds a tensor {name!r} that a Llama model does not have")


def hf_shape(tensor: gguf.ReaderTensor) -> list[int]:
    """The tensor's shape, slowest dimension first (GGUF writes the fastest first)."""
    return [int(size) for size in reversed(tensor.shape)]


def safetensors_header(shapes: dict[str, list[int]]) -> bytes:
    """What a safetensors file of bfloat16 tensors begins with; their bytes follow in this order.

    Written by hand because the library's own writer has no stable interface for bfloat16 without torch.
    Format: https://github.com/huggingface/safetensors#format
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def unpermute_rope_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows [heads * D, M] back from GGUF's order (rotary pairs adjacent) to Hugging Face's (two halves)."""
    height, width = rows.shape
    pairs = rows.reshape(num_heads, height // num_heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(height, width)


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Float32 values to bfloat16 bit patterns (uint16), to nearest, ties to even.

    Raises:
        ModelError: a value is infinite or no number.
    """
    if not np.isfinite(values).all():
        raise ModelError("the checkpoint holds infinite or undefined weights: the file is damaged")
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
