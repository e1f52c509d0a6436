"""The conversion of GGUF against the model and the tokenizer the GGUF was written from."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from minisgl.errors import ModelError
from minisgl.model_config import read_model_config
from minisgl.weights.gguf_convert import (
    LAYER_NAMES,
    TOP_NAMES,
    convert_llama_gguf,
    round_to_bfloat16,
    unpermute_rope_rows,
)

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


def write_gguf(path: Path, *, pre: str = "smollm") -> LlamaForCausalLM:
    """A tiny Llama as llama.cpp's converter would store it; returns transformers' own."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
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
    names = {hf: ours for ours, hf in TOP_NAMES.items() if hf != "lm_head.weight"}
    names |= {
        f"model.layers.{i}.{hf}.weight": f"blk.{i}.{ours}.weight"
        for i in range(2)
        for ours, hf in LAYER_NAMES.items()
    }
    for hf, ours in names.items():
        values = theirs[hf].numpy().copy()
        if ours.endswith(("attn_q.weight", "attn_k.weight")):
            heads = 4 if "attn_q" in ours else 2
            values = values.reshape(heads, 2, 8, 64).swapaxes(1, 2).reshape(values.shape).copy()
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


@pytest.fixture
def converted(tmp_path: Path) -> tuple[Path, LlamaForCausalLM]:
    model = write_gguf(tmp_path / "m.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    convert_llama_gguf(tmp_path / "m.gguf", folder)
    return folder, model


def test_the_weights_are_the_originals_rounded_to_bfloat16(converted: tuple[Path, LlamaForCausalLM]) -> None:
    folder, original = converted
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    expected = original.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name].to(torch.bfloat16)), name
    ids = torch.arange(12)[None]
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert torch.equal(loaded(ids).logits, original(ids).logits)


def test_the_config_says_what_the_gguf_says(converted: tuple[Path, LlamaForCausalLM]) -> None:
    config = read_model_config(converted[0])
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.rms_norm_eps, config.rope_theta, config.max_position) == (1e-5, 5000.0, 128)
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.checkpoint_dtype == "bfloat16"


def test_the_tokenizer_splits_digits_merges_and_keeps_special_tokens_whole(
    converted: tuple[Path, LlamaForCausalLM],
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[0])

    def tokens(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)

    assert tokens("ab abc") == ["ab", "Ġab", "c"]
    assert tokens("12") == ["1", "2"], "digits stand alone, so their merge is never used"
    assert tokens("<|im_start|>a<mine>b<|im_end|>") == ["<|im_start|>", "a", "<mine>", "b", "<|im_end|>"]
    ids = tokenizer("a<mine><|im_end|>\nb").input_ids
    assert tokenizer.decode(ids) == "a<mine><|im_end|>\nb"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<mine>\nb"
    assert tokenizer.convert_tokens_to_ids("[UNUSED]") == len(TOKENS) - 1
    named = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id)
    assert named == (1, 2, 0, 2)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert rendered == "<|im_start|>a<|im_end|>"


def test_other_kinds_of_gguf_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tokenizer.gguf", pre="qwen2")
    with pytest.raises(ModelError, match="qwen2"):
        convert_llama_gguf(tmp_path / "tokenizer.gguf", tmp_path)
    writer = gguf.GGUFWriter(str(tmp_path / "architecture.gguf"), "gptj")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="gptj"):
        convert_llama_gguf(tmp_path / "architecture.gguf", tmp_path)


def test_rounding_equals_torchs() -> None:
    patterns = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    patterns[:1000] = (patterns[:1000] & 0xFFFF0000) | 0x8000  # ties
    values = patterns.view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(round_to_bfloat16(values), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused(bad: float) -> None:
    with pytest.raises(ModelError, match="damaged"):
        round_to_bfloat16(np.array([1.0, bad], dtype=np.float32))


def test_rows_of_each_head_go_back_to_two_halves() -> None:
    heads, head_dim = 3, 6
    rows = np.arange(heads * head_dim)[:, None]
    interleaved = np.concatenate(
        [[head * head_dim + i, head * head_dim + 3 + i] for head in range(heads) for i in range(3)]
    )[:, None]
    assert np.array_equal(unpermute_rope_rows(interleaved, heads), rows)
