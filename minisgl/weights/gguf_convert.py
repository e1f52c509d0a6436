"""Turns a GGUF file into a normal Hugging Face folder, without torch.

Promise: the folder loads in transformers and in minisgl alike; every weight is the GGUF's dequantized
value rounded once to bfloat16; nothing outside `out` is written; host memory holds one tensor at a time.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from minisgl.errors import ModelError
from minisgl.progress import BYTES, Progress, no_progress

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
QK_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor by which GGUF stretches Llama 3's frequencies: what each is divided by."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How GGUF keeps one of its architectures."""

    hf_class: str
    model_type: str
    layer_names: dict[str, str] = field(default_factory=lambda: LAYER_NAMES)
    biases: tuple[str, ...] = ()
    rope_pairs_adjacent: bool = False
    """Rows of q and k lie so that a rotary pair is adjacent; Hugging Face's pairs are half a head apart."""
    norms_have_one_added: bool = False


ARCHITECTURES = {
    "llama": Architecture(hf_class="LlamaForCausalLM", model_type="llama", rope_pairs_adjacent=True),
    "qwen2": Architecture(
        hf_class="Qwen2ForCausalLM", model_type="qwen2", biases=("attn_q", "attn_k", "attn_v")
    ),
    "qwen3": Architecture(
        hf_class="Qwen3ForCausalLM", model_type="qwen3", layer_names=LAYER_NAMES | QK_NORM_NAMES
    ),
    "gemma3": Architecture(
        hf_class="Gemma3ForCausalLM",
        model_type="gemma3_text",
        layer_names=LAYER_NAMES
        | QK_NORM_NAMES
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norms_have_one_added=True,
    ),
}

LLAMA3_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PIECES = LLAMA3_PIECES.replace(r"\p{N}{1,3}", r"\p{N}")


def convert_gguf(
    source: Path, out: Path, *, with_tokenizer: bool = True, progress: Progress = no_progress
) -> None:
    """Write config.json, generation_config.json, tokenizer files and model.safetensors (bfloat16) into `out`.

    Raises:
        ModelError: it is no GGUF file or of an architecture or with settings that are not known here; or,
            `with_tokenizer`, its tokenizer is.
    """
    try:
        reader = gguf.GGUFReader(str(source))
    except (ValueError, OSError, IndexError) as error:
        raise ModelError(f"{source} can't be read as GGUF: {error}") from error
    facts = {name: field.contents() for name, field in reader.fields.items()}
    kind = ARCHITECTURES.get(str(facts.get("general.architecture")))
    if kind is None:
        raise ModelError(
            f"{source.name} holds the architecture {facts.get('general.architecture')!r}; GGUF files of "
            f"these can be read: {', '.join(ARCHITECTURES)}"
        )
    if int(facts.get("split.count", 1)) > 1:
        raise ModelError(
            f"{source.name} is one of several parts; join them with llama.cpp's gguf-split first"
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = tensors.pop(ROPE_FACTORS, None)
    try:
        config = hf_config(facts, kind, tied="output.weight" not in tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{source.name} lacks what its architecture needs: {error!r}") from error
    if factors is not None:
        values = gguf.dequantize(factors.data, factors.tensor_type)
        config["rope_parameters"] |= llama3_rope(values, config["rope_theta"])
    targets = {name: hf_name(name, kind) for name in tensors}
    if with_tokenizer:
        progress("writing the tokenizer", 0, 1)
        build_tokenizer(facts).save(str(out / "tokenizer.json"))
        _write_json(out / "tokenizer_config.json", tokenizer_config(facts, config))
        progress("writing the tokenizer", 1, 1)
    _write_json(out / "config.json", config)
    _write_json(
        out / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )

    total_bytes = sum(2 * math.prod(hf_shape(tensor)) for tensor in tensors.values())
    done = 0
    with (out / "model.safetensors").open("wb") as file:
        file.write(safetensors_header({targets[t.name]: hf_shape(t) for t in tensors.values()}))
        for name, tensor in tensors.items():
            progress("converting the weights", done, total_bytes, BYTES)
            values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(hf_shape(tensor))
            if kind.rope_pairs_adjacent and name.endswith("attn_q.weight"):
                values = unpermute_rope_rows(values, config["num_attention_heads"])
            elif kind.rope_pairs_adjacent and name.endswith("attn_k.weight"):
                values = unpermute_rope_rows(values, config["num_key_value_heads"])
            elif kind.norms_have_one_added and name.endswith("norm.weight"):
                values = values - np.float32(1)
            done += file.write(round_to_bfloat16(values).tobytes())
    progress("converting the weights", total_bytes, total_bytes, BYTES)


def hf_config(facts: dict[str, Any], kind: Architecture, *, tied: bool) -> dict[str, Any]:
    """A `config.json` that transformers 4 and 5 both read, from GGUF's key-value fields."""
    prefix = facts["general.architecture"]
    num_heads = int(facts[f"{prefix}.attention.head_count"])
    hidden_size = int(facts[f"{prefix}.embedding_length"])
    if int(facts.get(f"{prefix}.expert_count", 0)):
        raise ModelError("GGUF files with experts are not read; take the model's safetensors")
    # GGUF stores float32: 1e-5 comes back as 9.99999974e-06, so print it as short as float32 allows.
    eps = float(str(np.float32(facts[f"{prefix}.attention.layer_norm_rms_epsilon"])))
    theta = float(facts.get(f"{prefix}.rope.freq_base", 10000.0))
    head_dim = int(facts.get(f"{prefix}.attention.key_length", hidden_size // num_heads))
    scaling = _rope_scaling(facts, prefix)
    config = {
        "architectures": [kind.hf_class],
        "model_type": kind.model_type,
        "num_hidden_layers": int(facts[f"{prefix}.block_count"]),
        "hidden_size": hidden_size,
        "intermediate_size": int(facts[f"{prefix}.feed_forward_length"]),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(facts.get(f"{prefix}.attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "max_position_embeddings": int(facts[f"{prefix}.context_length"]),
        "rms_norm_eps": eps,
        "rope_theta": theta,
        "rope_parameters": {**scaling, "rope_theta": theta},
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "bos_token_id": facts.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts.get("tokenizer.ggml.padding_token_id"),
    }
    if kind.model_type == "gemma3_text":
        config |= _gemma3_config(facts, config, scaling)
    return config


def _gemma3_config(facts: dict[str, Any], config: dict[str, Any], scaling: dict[str, Any]) -> dict[str, Any]:
    """What GGUF leaves to the reader: every sixth layer is full, the others' theta, the scores' scale."""
    num_layers = config["num_hidden_layers"]
    # As llama.cpp has it: the largest model (62 layers) alone scales by its width.
    is_largest = num_layers == 62
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if is_largest else config["head_dim"],
        "sliding_window": int(facts["gemma3.attention.sliding_window"]),
        "layer_types": [
            "full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(num_layers)
        ],
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": config["rope_theta"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }


def _rope_scaling(facts: dict[str, Any], prefix: str) -> dict[str, Any]:
    """RoPE's type and what belongs to it, in transformers' names.

    Raises:
        ModelError: a type that is not known here.
    """
    kind = facts.get(f"{prefix}.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default"}
    factor = float(facts[f"{prefix}.rope.scaling.factor"])
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = int(facts[f"{prefix}.rope.scaling.original_context_length"])
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelError(f"the GGUF file asks for RoPE scaling {kind!r}; known are linear and yarn")


def llama3_rope(factors: np.ndarray, theta: float) -> dict[str, Any]:
    """Llama 3.1's or 3.2's settings, whichever give these factors, float32 [D/2].

    Raises:
        ModelError: neither does.
    """
    wavelengths = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    for factor in (8.0, 32.0):
        keep = np.clip((8192 / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        if np.allclose(factors, 1 / ((1 - keep) / factor + keep), rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
    raise ModelError("the GGUF file stretches RoPE's frequencies as neither Llama 3.1 nor 3.2 does")


def build_tokenizer(facts: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer that the GGUF's vocabulary, merges and token types describe.

    Raises:
        ModelError: another tokenizer model or pre-tokenizer than are known here.
    """
    model, pre = facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splitters = {
        "smollm": [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ],
        "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3_PIECES), "isolated"), byte_level],
        "qwen2": [pre_tokenizers.Split(Regex(QWEN2_PIECES), "isolated"), byte_level],
    }
    if model != "gpt2" or pre not in splitters:
        raise ModelError(
            f"the GGUF file's tokenizer ({model!r} with pre-tokenizer {pre!r}) is not known; known is gpt2 "
            f"with {', '.join(splitters)}. Say where the model's own is with --tokenizer"
        )
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ", 1)) for line in facts["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    is_llama3 = pre == "llama-bpe"
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=is_llama3))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters[pre])
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    kinds = facts["tokenizer.ggml.token_type"]
    for kind, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        add(
            [
                AddedToken(token, normalized=False, special=kind == CONTROL)
                for token, its_kind in zip(tokens, kinds, strict=True)
                if its_kind == kind
            ]
        )
    if _adds_bos(facts):
        bos = facts["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _adds_bos(facts: dict[str, Any]) -> bool:
    """Llama 3's files leave it to the reader."""
    return bool(facts.get("tokenizer.ggml.add_bos_token", facts.get("tokenizer.ggml.pre") == "llama-bpe"))


def tokenizer_config(facts: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """`tokenizer_config.json`: special tokens by name, the context length, the chat template if any."""
    tokens = facts["tokenizer.ggml.tokens"]
    named = {
        f"{short}_token": tokens[facts[f"tokenizer.ggml.{long}_token_id"]]
        for short, long in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{long}_token_id" in facts
    }
    template = facts.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _adds_bos(facts),
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        **named,
        **({} if template is None else {"chat_template": template}),
    }


def hf_name(name: str, kind: Architecture) -> str:
    """Hugging Face's name of a GGUF tensor.

    Raises:
        ModelError: no tensor of the architecture is called so.
    """
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in kind.layer_names:
        is_bias = parts[3] == "bias" and parts[2] in kind.biases
        if is_bias or parts[3] == "weight":
            return f"model.layers.{parts[1]}.{kind.layer_names[parts[2]]}.{parts[3]}"
    raise ModelError(f"the GGUF file holds a tensor {name!r} that a {kind.hf_class} does not have")


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
