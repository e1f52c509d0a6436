"""A model folder as far as the server process reads one: a small tokenizer with a chat template."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTEXT = 256
EOS = "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{% if message['content'] == 'template error' %}{{ raise_exception('not this') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_folder(
    folder: Path, template: str | None = CHATML, generation: dict[str, Any] | None = None, **knobs: Any
) -> Path:
    """Write the folder; `knobs` go to the fake engine (see fake_engine.py)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog and says hello world"], trainer
    )
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": EOS, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation or {}))
    (folder / "fake.json").write_text(json.dumps({"start": "ok", "context": CONTEXT, **knobs}))
    return folder
