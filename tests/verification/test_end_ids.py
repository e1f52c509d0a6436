"""Which tokens end an answer, ours beside those of transformers, of the tokenizer and of the template."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.verification.end_ids import EndIds, check_end_ids, find_end_ids

TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }} {{ message['content'] }}<|end|>\n{% endfor %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose answers end with <|end|>, id 3, or <eos>, id 2."""
    vocab = {word: index for index, word in enumerate(["<unk>", "<|turn|>", "<eos>", "<|end|>", "x"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [AddedToken(text, special=True) for text in ("<|turn|>", "<eos>", "<|end|>")]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", {"eos_token": "<eos>", "chat_template": TEMPLATE})
    write(
        tmp_path / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": 5,
            "max_position_embeddings": 512,
            "eos_token_id": 2,
            "dtype": "bfloat16",
        },
    )
    write(tmp_path / "generation_config.json", {"eos_token_id": [2, 3]})
    return tmp_path


def write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def test_all_four_are_read(folder: Path) -> None:
    config = read_model_config(folder)
    found = find_end_ids(folder, config)
    assert found == EndIds(ours=(2, 3), transformers=(2, 3), tokenizer=2, template=3)
    assert check_end_ids(found, config.vocab_size) == ([], [])


def test_without_generation_config_transformers_reads_config_json(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    found = find_end_ids(folder, read_model_config(folder))
    assert found.transformers == (2,)
    wrong, notes = check_end_ids(found, 5)
    assert wrong == []
    assert "ends a turn with token 3" in notes[0]


def test_an_id_that_we_lack_is_wrong(folder: Path) -> None:
    config = replace(read_model_config(folder), eos_token_ids=(2,))
    (finding,) = check_end_ids(find_end_ids(folder, config), 5)[0]
    assert finding.check == "end of sequence"
    assert "transformers ends an answer at [3] and minisgl does not" in finding.what


def test_ids_that_no_answer_would_end_with_are_wrong_though_both_agree(folder: Path) -> None:
    write(folder / "generation_config.json", {"eos_token_id": 4})
    write(folder / "config.json", json.loads((folder / "config.json").read_text()) | {"eos_token_id": 4})
    found = find_end_ids(folder, read_model_config(folder))
    (finding,) = check_end_ids(found, 5)[0]
    assert "no answer would end" in finding.what
    assert "generation_config.json" in finding.likely


def test_an_id_outside_of_the_vocabulary_is_wrong() -> None:
    (finding,) = check_end_ids(EndIds((7,), (7,), None, None), 5)[0]
    assert "outside of the vocabulary" in finding.what


def test_ids_that_config_json_adds_are_noted() -> None:
    wrong, notes = check_end_ids(EndIds((2, 3), (2,), 2, 3), 5)
    assert wrong == []
    assert notes[0].startswith("minisgl also ends an answer at [3]")
