"""Small tokenizers of the kinds that models have, built on the spot."""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "def main(argv): return 0  # numbers 1234567890",
    "Grüße aus Köln, déjà vu, naïve façade",
    "你好，世界。日本語のテキスト 안녕하세요",
    "👩‍👩‍👧‍👦 🎉🎉 ½ × ÷ € … “quotes”",
]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level(bos: bool = False) -> Tokenizer:
    """Byte-level BPE like GPT-2, Llama 3, Qwen, SmolLM2; `bos`: puts <s> in front, as Llama 3 does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("世界", special=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Words with "▁" and <0xHH> for the rest, like Llama 2 and Gemma."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted(set("▁abcdefghijklmnopqrstuvwxyz.,é"))
    vocab = {piece: rank for rank, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    """A unigram model with the Metaspace decoder, which strips the first space of a text."""
    letters = [(char, -5.0) for char in "▁abcdefghijklmnopqrstuvwxyz."]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁the", -1.0), ("fox", -1.0), *letters], 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    """A model folder as far as the text side reads one."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
