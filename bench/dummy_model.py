"""Makes a folder for `minisgl serve --dummy-weights`: a public model's shape and a synthetic tokenizer.

    python bench/dummy_model.py qwen3-14b /tmp/qwen3-14b
    minisgl serve --model /tmp/qwen3-14b --dummy-weights

Random weights choose tokens all over the vocabulary. A real tokenizer has no text for many of them, and
clients get no event for a token without text. Here nearly every id is a word.
"""

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minisgl.benchmark.load.prompts import WORDS
from minisgl.benchmark.model_configs import MODEL_CONFIGS

TEMPLATE = (
    "{% for message in messages %} {{ message['role'] }}: {{ message['content'] }}{% endfor %} assistant:"
)


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """The 256 bytes, the words that `minisgl bench serve` makes texts of, then numbered words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*alphabet, *(f"Ġ{word}" for word in WORDS)]
    texts += [f"Ġw{number}" for number in range(len(texts), vocab_size)]
    vocab = {text: token_id for token_id, text in enumerate(texts[:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", choices=MODEL_CONFIGS, metavar="MODEL", help=", ".join(MODEL_CONFIGS))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    config = MODEL_CONFIGS[arguments.model]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(config["vocab_size"]).save(str(arguments.folder / "tokenizer.json"), pretty=False)
    (arguments.folder / "config.json").write_text(json.dumps(config, indent=1))
    (arguments.folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    print(arguments.folder)


if __name__ == "__main__":
    main()
