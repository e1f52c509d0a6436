"""Small tokenizers for tests of grammars, and what drives a matcher through its masks."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from minisgl.grammar.compiler import GrammarCompiler
from minisgl.grammar.matcher import Grammar, Matcher
from minisgl.grammar.spec import GrammarSpec, json_schema_spec

EOS, SECOND_EOS = 0, 1
VOCAB = 333
"""More than the tokenizers have, and no multiple of 32."""
CLOSERS = '"}]0123456789'
"""What a walk that is late takes first: it leads to an end, unless a pattern is in the way."""


def make_tokenizer(words: Sequence[str] = (), special: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer of single bytes, of some words as one token each, and of special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=258,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>", "<end>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.add_tokens([AddedToken(one, special=True) for one in special])
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in words])
    return tokenizer


class Tokens:
    """A tokenizer with its compiler."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int = VOCAB, eos: Iterable[int] = (EOS, SECOND_EOS)):
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.compiler = GrammarCompiler(tokenizer.to_str(), vocab_size, eos)

    def compile(self, spec: GrammarSpec) -> Grammar:
        return self.compiler.compile(spec).result()

    def schema(self, schema: Any) -> Grammar:
        return self.compile(json_schema_spec(schema, "schema"))

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Whether each token of the text is in its mask, and the text may end."""
        return self.longest_prefix(grammar, text) == text and self.after(grammar, text).may_end

    def longest_prefix(self, grammar: Grammar, text: str) -> str:
        """The text as far as the masks allow it, byte by byte."""
        matcher, ids = Matcher(grammar), self.ids(text)
        for count, token_id in enumerate(ids):
            if token_id not in allowed(matcher):
                return self.tokenizer.decode(ids[:count])
            matcher.advance([token_id])
        return text

    def after(self, grammar: Grammar, text: str) -> Matcher:
        return Matcher.rebuilt(grammar, self.ids(text))

    def walk(self, grammar: Grammar, seed: int, max_tokens: int = 120) -> str:
        """A random text through the masks; it goes for the end after `max_tokens`."""
        draw = random.Random(seed)
        matcher, ids = Matcher(grammar), []
        closers = [self.ids(one)[0] for one in CLOSERS]
        while True:
            choices = sorted(allowed(matcher))
            is_late = len(ids) > max_tokens
            if EOS in choices and (is_late or draw.random() < 0.3 or len(choices) == 2):
                matcher.advance([EOS])
                return self.tokenizer.decode(ids)
            choices = [one for one in choices if one not in (EOS, SECOND_EOS)]
            closing = [one for one in closers if one in choices]
            closes = is_late and bool(closing) and draw.random() < 0.7
            token_id = closing[0] if closes else draw.choice(choices)
            assert len(ids) < 20 * max_tokens
            matcher.advance([token_id])
            ids.append(token_id)


def mask_of(matcher: Matcher) -> np.ndarray:
    """The next mask, written over garbage."""
    out = np.full(matcher.grammar.num_words, -1, np.int32)
    matcher.fill_mask(out)
    return out


def allowed(matcher: Matcher) -> set[int]:
    """The ids in the next mask."""
    bits = np.unpackbits(mask_of(matcher).view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())
