"""The conversion of GGUF against the model and the tokenizer the GGUF was written from."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tiny_gguf import KINDS, MERGES, TOKENS, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minisgl.errors import ModelError
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.weights.gguf_convert import (
    ARCHITECTURES,
    build_tokenizer,
    convert_gguf,
    hf_name,
    llama3_rope,
    round_to_bfloat16,
    unpermute_rope_rows,
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_model_is_the_original_rounded_to_bfloat16(architecture: str, tmp_path: Path) -> None:
    original = write_gguf(tmp_path / "m.gguf", architecture=architecture)
    folder = tmp_path / "folder"
    folder.mkdir()
    convert_gguf(tmp_path / "m.gguf", folder)
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
    assert read_model_config(folder).architecture == ARCHITECTURES[architecture].hf_class


@pytest.fixture
def converted(tmp_path: Path) -> tuple[Path, PreTrainedModel]:
    model = write_gguf(tmp_path / "m.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    convert_gguf(tmp_path / "m.gguf", folder)
    return folder, model


def test_the_config_says_what_the_gguf_says(converted: tuple[Path, PreTrainedModel]) -> None:
    config = read_model_config(converted[0])
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.rms_norm_eps, config.rope_theta, config.max_position) == (1e-5, 5000.0, 128)
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.checkpoint_dtype == "bfloat16"


def test_the_tokenizer_splits_digits_merges_and_keeps_special_tokens_whole(
    converted: tuple[Path, PreTrainedModel],
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


def test_llama_3s_frequencies_are_known_by_their_factors() -> None:
    for factor in (8.0, 32.0):
        settings = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        config = LlamaConfig(
            head_dim=128,
            max_position_embeddings=131072,
            rope_parameters={**settings, "rope_theta": 500000.0},
        )
        plain = 500000.0 ** -(np.arange(64) / 64)
        factors = (plain / LlamaRotaryEmbedding(config).inv_freq.numpy()).astype(np.float32)
        assert llama3_rope(factors, 500000.0) == settings
    with pytest.raises(ModelError, match=r"Llama 3\.1"):
        llama3_rope(np.full(64, 2.0, dtype=np.float32), 500000.0)


def test_numbers_and_words_are_cut_as_the_family_cuts_them() -> None:
    """Four digits, a contraction, a space before a word: each pre-tokenizer has its own way."""
    facts = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": KINDS,
        "tokenizer.ggml.bos_token_id": 1,
    }
    expected = {
        "smollm": ["1", "2", "3", "4", "Ġwe", "'ll"],
        "qwen2": ["1", "2", "3", "4", "Ġwe", "'ll"],
        "llama-bpe": ["123", "4", "Ġwe", "'ll"],
    }
    for pre, pieces in expected.items():
        tokenizer = build_tokenizer(facts | {"tokenizer.ggml.pre": pre})
        assert tokenizer.pre_tokenizer is not None
        assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("1234 we'll")] == pieces
        starts_with_bos = tokenizer.encode("a").ids[0] == 1
        assert starts_with_bos == (pre == "llama-bpe")


def test_other_kinds_of_gguf_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tokenizer.gguf", pre="tekken")
    with pytest.raises(ModelError, match=r"tekken.*--tokenizer"):
        convert_gguf(tmp_path / "tokenizer.gguf", tmp_path)
    convert_gguf(tmp_path / "tokenizer.gguf", tmp_path, with_tokenizer=False)
    assert not (tmp_path / "tokenizer.json").exists()
    writer = gguf.GGUFWriter(str(tmp_path / "architecture.gguf"), "gptj")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="gptj"):
        convert_gguf(tmp_path / "architecture.gguf", tmp_path)
    with pytest.raises(ModelError, match="ffn_gate_exps"):
        hf_name("blk.0.ffn_gate_exps.weight", ARCHITECTURES["qwen3"])
    (tmp_path / "no.gguf").write_bytes(b"no GGUF at all" * 10)
    with pytest.raises(ModelError, match="can't be read as GGUF"):
        convert_gguf(tmp_path / "no.gguf", tmp_path)


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
