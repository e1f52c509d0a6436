"""Tiny random models that transformers builds, and a paged store to run ours with.

R rows, T new tokens, P pages, S page size.
"""

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from minisgl.attention.interface import AttentionInputs
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.models.decoder import Decoder
from minisgl.models.registry import build_model
from minisgl.weights.loader import load_weights

VOCAB_SIZE = 97
TEXT_SETTINGS: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "eos_token_id": 2,
}


def random_model(seed: int = 0, family: str = "llama", **settings: object) -> PreTrainedModel:
    """A float32 model whose logits spread over several units (transformers' own scale is nearly flat).

    Args:
        family: transformers' model_type.
    """
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **(TEXT_SETTINGS | settings))
    return _spread(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def random_model_that_sees(family: str, settings: dict[str, Any], *, tied: bool) -> PreTrainedModel:
    """The same for a model of text and images; its last token stands for images.

    Args:
        settings: "text_config", which the usual text settings lie under, and "vision_config".
    """
    torch.manual_seed(0)
    text = TEXT_SETTINGS | settings["text_config"] | {"tie_word_embeddings": tied}
    config = AutoConfig.for_model(
        family,
        **(settings | {"text_config": text}),
        tie_word_embeddings=tied,
        image_token_index=VOCAB_SIZE - 1,
    )
    return _spread(AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval())


def _spread(model: PreTrainedModel) -> PreTrainedModel:
    """The same, with norms and biases that are not all alike."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            if name.endswith(("bias", "sinks", "per_expert_scale", "router.scale")):
                parameter.normal_()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.3)
    return model


def load_ours(folder: Path, attention_backend: str = "torch", kv_dtype: str | None = None) -> Decoder:
    """Our float32 model from a Hugging Face folder, as the engine would load it."""
    config = read_model_config(folder, kv_dtype=kv_dtype)
    model = build_model(config, attention_backend=attention_backend, dtype=torch.float32, device="cpu")
    load_weights(model, folder, config, dtype=torch.float32, device="cpu")
    return model


def logits_of(reference: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """transformers' logits [T, V] of one sequence in one pass."""
    with torch.no_grad():
        return reference(torch.tensor([token_ids])).logits[0]


class PagedRunner:
    """Feeds rows of tokens through our decoder: pages in random order, everything unused filled with NaN."""

    def __init__(
        self,
        model: Decoder,
        *,
        num_rows: int,
        page_size: int,
        max_tokens: int,
        seed: int,
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.page_size = page_size
        pages_per_row = -(-max_tokens // page_size)
        num_pages = num_rows * pages_per_row + 3
        model.allocate_kv(num_pages, page_size, cache_dtype, "cpu")
        for attention in model.attention_layers():
            attention.k_cache.fill_(float("nan"))
            attention.v_cache.fill_(float("nan"))
        states = model.allocate_states(num_rows, 0, torch.float32, "cpu")
        for state in states.states if states is not None else ():
            state.fill_(float("nan"))
        pages = random.Random(seed).sample(range(num_pages), num_rows * pages_per_row)
        self.page_table = torch.tensor(pages, dtype=torch.int32).view(num_rows, pages_per_row)
        self.lengths = [0] * num_rows

    def feed(self, rows: list[tuple[int, list[int]]], *, last_only: bool = False) -> Tensor:
        """One step: each (row, new tokens). Logits [T, V], or [R, V] of each row's last token."""
        positions: list[int] = []
        slots: list[int] = []
        row_start = [0]
        for row, token_ids in rows:
            for position in range(self.lengths[row], self.lengths[row] + len(token_ids)):
                page = int(self.page_table[row, position // self.page_size])
                positions.append(position)
                slots.append(page * self.page_size + position % self.page_size)
            self.lengths[row] += len(token_ids)
            row_start.append(len(positions))
        inputs = AttentionInputs(
            page_table=self.page_table,
            row_ids=int32([row for row, _ in rows]),
            context_len=int32([self.lengths[row] for row, _ in rows]),
            slot_mapping=int32(slots),
            row_start=int32(row_start),
            max_query_len=max(len(token_ids) for _, token_ids in rows),
        )
        token_ids = int32([token for _, tokens in rows for token in tokens])
        logit_index = int32(row_start[1:]) - 1 if last_only else None
        with torch.inference_mode():
            return self.model(token_ids, int32(positions), inputs, logit_index)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
