"""What the sampling fields do over HTTP: `minisgl serve` with a tiny random model, against transformers.

The tokenizer is the built-in model's, so that tokens are words.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from minisgl.errors import MinisglError
from minisgl.text.tokenizer import Tokenizer
from minisgl.weights.sources import resolve_model_folder

FLAGS = ("--port", "0", "--device", "cpu", "--dtype", "float32", "--cpu-threads", "1", "--num-pages", "200")
PROMPT = "The capital of France is"
FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = "Café 🎉 in Paris"
MODEL = "tiny"
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def reference() -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.25,
        eos_token_id=2,
        bos_token_id=1,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        builtin = resolve_model_folder("smollm2-135m")
    except MinisglError as error:
        pytest.skip(f"the built-in model is not on this machine and can't be fetched: {error}")
    made = tmp_path_factory.mktemp("sampling") / MODEL
    reference.save_pretrained(made)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(builtin / file, made)
    return made


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    command = [sys.executable, "-m", "minisgl", "serve", "--model", str(folder), *FLAGS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if line.startswith("curl "))
        address = re.search(r"http://[^/ ]+", line)
        assert address is not None
        with openai.OpenAI(base_url=f"{address[0]}/v1", api_key="none", max_retries=0) as made:
            yield made
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def truth(reference: Any, token_ids: list[int]) -> torch.Tensor:
    """Log probabilities [T, V] by transformers."""
    with torch.no_grad():
        return reference(torch.tensor([token_ids])).logits[0].double().log_softmax(1)


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    """The choices of a greedy completion; fields that OpenAI has not go beside the others."""
    own = {"n", "logprobs", "echo", "seed", "temperature", "max_tokens", "stop", "logit_bias", "stream"}
    known: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    known |= {name: value for name, value in fields.items() if name in own}
    extra = {name: value for name, value in fields.items() if name not in own}
    return client.completions.create(model=MODEL, prompt=prompt, extra_body=extra, **known)


def text_of(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> str:
    return complete(client, prompt, **fields).choices[0].text


def test_a_prompt_may_be_a_text_token_ids_or_a_list_of_either(
    client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(PROMPT, True)
    for prompt in (PROMPT, [PROMPT], ids, [ids]):
        assert text_of(client, prompt) == text_of(client)
    for several in ([PROMPT, TEXT], [ids, tokenizer.encode(TEXT, True)]):
        answers = [choice.text for choice in complete(client, several).choices]
        assert answers == [text_of(client), text_of(client, TEXT)]


def test_n_choices_differ_and_the_first_is_that_of_one(client: openai.OpenAI) -> None:
    choices = complete(client, n=3, temperature=1, seed=5).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert len({choice.text for choice in choices}) == 3
    assert choices[0].text == text_of(client, temperature=1, seed=5)


def test_what_ended_the_reply_is_part_of_it_only_if_asked(
    client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    ids = complete(client, return_token_ids=True).choices[0].token_ids
    before, word = tokenizer.decode(ids[:2]), tokenizer.decode(ids[2:3])
    assert len(set(ids[:3])) == 3, "a poor example"
    assert text_of(client, stop=[word]) == before
    assert text_of(client, stop=[word], include_stop_str_in_output=True) == before + word
    assert text_of(client, stop_token_ids=[ids[2]]) == before
    assert text_of(client, stop_token_ids=[ids[2]], include_stop_str_in_output=True) == before + word


def test_min_tokens_holds_for_stop_strings_and_stop_tokens(
    client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    ids = complete(client, return_token_ids=True).choices[0].token_ids
    first = tokenizer.decode(ids[:1])
    assert text_of(client, stop=[first]) == ""
    assert text_of(client, stop=[first], min_tokens=3).startswith(tokenizer.decode(ids[:3]))
    answer = complete(client, stop_token_ids=ids, min_tokens=4, return_token_ids=True)
    assert len(answer.choices[0].token_ids) >= 4
    assert not set(answer.choices[0].token_ids[:4]) & set(ids)


def test_special_tokens_are_text_only_if_asked(client: openai.OpenAI) -> None:
    end: dict[str, Any] = {"logit_bias": {"2": 100}, "max_tokens": 3}
    assert complete(client, **end).usage.completion_tokens == 1
    ignored = complete(client, ignore_eos=True, **end)
    assert (ignored.usage.completion_tokens, ignored.choices[0].text) == (3, "")
    shown = text_of(client, ignore_eos=True, skip_special_tokens=False, **end)
    assert shown == "<|im_end|>" * 3


def test_bias_bans_and_penalties_reach_the_sampler(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = complete(client, return_token_ids=True).choices[0].token_ids
    other = tokenizer.encode(" London", False)[0]
    for only in ({"logit_bias": {str(other): 100}}, {"allowed_token_ids": [other]}):
        assert text_of(client, max_tokens=2, **only) == " London London"
    first = tokenizer.decode(ids[:1])
    assert first not in text_of(client, logit_bias={str(ids[0]): -100})
    assert first not in text_of(client, bad_words=[first])


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_reach_the_sampler(
    client: openai.OpenAI, tokenizer: Tokenizer, reference: Any, penalty: str
) -> None:
    allowed = list(range(5000, 5006))
    prompt = tokenizer.encode(PROMPT, True) + allowed[:2]

    def greedy(value: float) -> list[int]:
        tokens = list(prompt)
        for _ in range(8):
            with torch.no_grad():
                logits = reference(torch.tensor([tokens])).logits[0, -1]
            for token_id in allowed:
                count = tokens[len(prompt) :].count(token_id)
                if penalty == "repetition_penalty":
                    seen = token_id in tokens
                    logits[token_id] *= 1 if not seen else 1 / value if logits[token_id] > 0 else value
                else:
                    logits[token_id] -= value * (count if penalty == "frequency_penalty" else count > 0)
            tokens.append(max(allowed, key=lambda token_id: float(logits[token_id])))
        return tokens[len(prompt) :]

    fields: dict[str, Any] = {"allowed_token_ids": allowed, "return_token_ids": True, penalty: 2}
    assert complete(client, prompt, **fields).choices[0].token_ids == greedy(2)
    assert greedy(2) != greedy(1 if penalty == "repetition_penalty" else 0), "a poor example"


def test_a_chats_logprobs_have_openais_form_and_transformers_values(
    client: openai.OpenAI, tokenizer: Tokenizer, reference: Any
) -> None:
    ask: dict[str, Any] = {
        "model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 12,
        "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    free: Any = client.chat.completions.create(**ask, extra_body={"return_token_ids": True})
    extra = {"return_token_ids": True, "stop_token_ids": [free.choices[0].token_ids[7]]}
    answer: Any = client.chat.completions.create(**ask, extra_body=extra)
    (choice,) = answer.choices
    content = choice.logprobs.content
    assert len(content) == len(choice.token_ids) == answer.usage.completion_tokens
    *shown, end = content
    assert end.token == tokenizer.decode(extra["stop_token_ids"])
    assert bytes(byte for entry in shown for byte in entry.bytes).decode() == choice.message.content
    wanted = truth(reference, answer.prompt_token_ids + choice.token_ids)[len(answer.prompt_token_ids) - 1 :]
    for entry, token_id, line in zip(content, choice.token_ids, wanted, strict=False):
        assert entry.logprob == pytest.approx(float(line[token_id]), abs=TOLERANCE)
        best = line.topk(3)
        assert [top.token for top in entry.top_logprobs] == [
            tokenizer.token_bytes(top).decode("utf-8", "replace") for top in best.indices.tolist()
        ]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(
            best.values.tolist(), abs=TOLERANCE
        )
    chunks: list[Any] = list(client.chat.completions.create(**ask, stream=True, extra_body=extra))
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    plain: Any = client.chat.completions.create(model=MODEL, messages=FRANCE, max_tokens=2)
    assert plain.choices[0].logprobs is None


def test_a_completions_logprobs_have_openais_form(client: openai.OpenAI) -> None:
    answer = complete(client, logprobs=2).choices[0]
    found = answer.logprobs
    assert "".join(found.tokens) == answer.text
    assert [answer.text.index(found.tokens[0]), *found.text_offset[1:]] == found.text_offset
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) == 2
        assert top[token] == logprob == max(top.values())  # greedy
    bare = complete(client, logprobs=0).choices[0].logprobs
    assert [list(top) for top in bare.top_logprobs] == [[token] for token in bare.tokens]
    chunks = list(complete(client, logprobs=2, stream=True))
    assert [t for c in chunks for t in c.choices[0].logprobs.tokens] == found.tokens
    assert [o for c in chunks for o in c.choices[0].logprobs.text_offset] == found.text_offset


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_gives_the_log_likelihood_of_token_ids(
    client: openai.OpenAI, tokenizer: Tokenizer, reference: Any, max_tokens: int
) -> None:
    """lm-eval's way: token ids in, nothing or one token out, the prompt's own log probabilities back."""
    ids = tokenizer.encode(f"{TEXT} {PROMPT}", True)
    for _ in range(2):  # cold, then with the prompt in the prefix cache
        answer = complete(client, ids, echo=True, logprobs=1, max_tokens=max_tokens)
        (choice,) = answer.choices
        found = choice.logprobs
        assert len(found.tokens) == len(ids) + max_tokens
        assert answer.usage.completion_tokens == max_tokens
        assert found.token_logprobs[0] is None
        assert found.top_logprobs[0] is None
        wanted = truth(reference, ids)
        scores = [float(wanted[place, token_id]) for place, token_id in enumerate(ids[1:])]
        assert found.token_logprobs[1 : len(ids)] == pytest.approx(scores, abs=TOLERANCE)
        best = [max(top.values()) for top in found.top_logprobs[1 : len(ids)]]
        assert best == pytest.approx(wanted[:-1].max(1).values.tolist(), abs=TOLERANCE)
        assert choice.text.startswith(f"{TEXT} {PROMPT}")
        for token, begin, end in zip(found.tokens, found.text_offset, found.text_offset[1:], strict=False):
            if not token.startswith("bytes:"):
                assert choice.text[begin:end] == token


def test_echo_without_logprobs_is_the_prompt_and_the_answer(client: openai.OpenAI) -> None:
    assert text_of(client, echo=True) == PROMPT + text_of(client)
    assert text_of(client, echo=True, max_tokens=0) == PROMPT
    several = complete(client, [PROMPT, TEXT], echo=True, max_tokens=1, n=2).choices
    assert [choice.text[: len(PROMPT)] for choice in several[:2]] == [PROMPT] * 2
    assert [choice.text[: len(TEXT)] for choice in several[2:]] == [TEXT] * 2
    chunks = list(complete(client, echo=True, logprobs=1, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + text_of(client)
    tokens = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
    assert tokens == complete(client, echo=True, logprobs=1).choices[0].logprobs.tokens


def test_prompt_logprobs_and_token_ids_come_beside_the_answer(
    client: openai.OpenAI, tokenizer: Tokenizer, reference: Any
) -> None:
    ids = tokenizer.encode(PROMPT, True)
    choice = complete(client, prompt_logprobs=1, return_token_ids=True).choices[0]
    assert choice.prompt_token_ids == ids
    assert tokenizer.decode(choice.token_ids) == choice.text
    first, *others = choice.prompt_logprobs
    assert first is None
    for entry, token_id, line in zip(others, ids[1:], truth(reference, ids), strict=False):
        own = entry[str(token_id)]
        assert own["logprob"] == pytest.approx(float(line[token_id]), abs=TOLERANCE)
        likelier = [int((line > own["logprob"] + slack).sum()) for slack in (TOLERANCE, -TOLERANCE)]
        assert likelier[0] < own["rank"] <= likelier[1] + 1
        assert own["decoded_token"] == tokenizer.decode([token_id])
        assert next(iter(entry.values()))["rank"] == 1
        assert str(int(line.argmax())) in entry
    chat: Any = client.chat.completions.create(
        model=MODEL, messages=FRANCE, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, prompt_logprobs=1, stream=True)
    assert cast(Any, refused.value).param == "prompt_logprobs"


def test_every_choice_has_the_prompts_logprobs(client: openai.OpenAI) -> None:
    (alone,) = complete(client, prompt_logprobs=1, max_tokens=2).choices
    several = complete(client, [PROMPT, TEXT], prompt_logprobs=1, max_tokens=2, n=2).choices
    assert several[0].prompt_logprobs == several[1].prompt_logprobs
    assert several[2].prompt_logprobs == several[3].prompt_logprobs
    assert [set(entry or ()) for entry in several[1].prompt_logprobs] == [
        set(entry or ()) for entry in alone.prompt_logprobs
    ]
    (alone,) = complete(client, echo=True, logprobs=1, max_tokens=2).choices
    chunks = complete(client, echo=True, logprobs=1, max_tokens=2, n=2, stream=True)
    streamed: list[list[str]] = [[], []]
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].logprobs.tokens
    assert streamed == [alone.logprobs.tokens] * 2


def test_the_field_that_the_engine_refuses_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, logit_bias={"60000": 1})
    assert (refused.value.code, refused.value.param) == ("invalid_token_id", "logit_bias")
