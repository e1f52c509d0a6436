"""The tokenizer against `tokenizers` itself and against transformers."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_fallback, byte_level, metaspace, save
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from minisgl.errors import ModelError, RequestError
from minisgl.text.tokenizer import Tokenizer

BYTE_LEVEL = byte_level()
OURS = Tokenizer(byte_level(), {})


@settings(max_examples=150)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_encode_gives_the_librarys_ids_and_decode_gives_the_text_back(text: str) -> None:
    ids = OURS.encode(text, add_special_tokens=False)
    assert ids == BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    assert OURS.decode(ids, skip_special_tokens=False) == text


def test_rendered_prompts_get_no_second_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save(byte_level(bos=True), tmp_path, bos_token="<s>"))
    bos = tokenizer.encode("<s>", add_special_tokens=False)
    assert len(bos) == 1
    assert tokenizer.encode("<s>hello", add_special_tokens=False).count(bos[0]) == 1
    assert tokenizer.encode("hello", add_special_tokens=True)[:1] == bos


@pytest.mark.parametrize("text", ["\ud800", "fine until \udfff here"])
def test_lone_surrogates_are_the_requests_error(text: str) -> None:
    with pytest.raises(RequestError, match=r"the lone surrogate \\ud") as caught:
        OURS.encode(text, add_special_tokens=False)
    assert caught.value.status == 400


def test_special_tokens_are_found_wherever_the_folder_names_them(tmp_path: Path) -> None:
    save(byte_level(), tmp_path, bos_token={"content": "<s>", "lstrip": False}, eos_token="<tool>")
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "<|endoftext|>"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "<tool>",
        "pad_token": "<|endoftext|>",
    }
    # A named token is special even where tokenizer.json forgot to say so.
    assert tokenizer.decode(tokenizer.encode("a<tool>b", add_special_tokens=False)) == "ab"


def test_added_tokens_of_the_config_are_known_as_transformers_knows_them(tmp_path: Path) -> None:
    entry = {"content": "<extra>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    base = byte_level()
    next_id = base.get_vocab_size()
    save(base, tmp_path, added_tokens_decoder={str(next_id): {**entry, "single_word": False}})
    ours = Tokenizer.from_folder(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "one<extra>two<tool>"
    ids = ours.encode(text, add_special_tokens=True)
    assert ids == theirs(text)["input_ids"]
    assert next_id in ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == next_id + 1


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    base = byte_level()
    base.enable_truncation(4)
    base.enable_padding(length=64)
    tokenizer = Tokenizer.from_folder(save(base, tmp_path))
    text = "The quick brown fox jumps over the lazy dog. " * 4
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("a", add_special_tokens=False)) == 1


@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace])
def test_the_bytes_of_tokens_put_together_are_the_text(make: Callable[[], FastTokenizer]) -> None:
    fast = make()
    tokenizer = Tokenizer(fast, {})
    start = fast.encode("a").ids  # so that no decoder strips the first space of what follows
    ids = (
        fast.encode("the lazy fox. é 日本").ids if make is not metaspace else fast.encode("the lazy fox.").ids
    )
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert fast.decode(start + ids) == fast.decode(start) + joined


def test_ids_that_are_no_token_have_no_bytes_and_no_text() -> None:
    for token_id in (OURS.vocab_size, 2**31 - 1, -1, 2**40):
        assert OURS.token_bytes(token_id) == b""
    assert OURS.decode([OURS.vocab_size + 5]) == ""


@pytest.mark.parametrize(
    ("content", "words"), [(None, "no tokenizer.json"), ("{", "can't be read"), ("{}", "can't be read")]
)
def test_a_folder_without_a_usable_tokenizer_is_a_model_error(
    tmp_path: Path, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=words):
        Tokenizer.from_folder(tmp_path)


def test_a_broken_config_is_a_model_error(tmp_path: Path) -> None:
    save(byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        Tokenizer.from_folder(tmp_path)


@settings(max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 30))
def test_only_text_that_is_too_long_is_refused_unread(text: str, max_tokens: int) -> None:
    for make in (byte_level, byte_fallback):
        tokenizer = Tokenizer(make(), {})
        count = len(make().encode(text, add_special_tokens=False).ids)
        with contextlib.suppress(RequestError):
            assert len(tokenizer.encode(text, False, max_tokens=max_tokens)) == count
            continue
        assert count > max_tokens


def test_far_too_long_text_is_refused_without_being_tokenized() -> None:
    tokenizer = Tokenizer(byte_level(), {})
    with pytest.raises(RequestError, match="has 100000 bytes and so more than 9 tokens") as caught:
        tokenizer.encode("x" * 100_000, False, max_tokens=9, param="messages")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_where_a_token_may_stand_for_any_length_nothing_is_refused_unread() -> None:
    swallowing = byte_level()
    swallowing.add_tokens([AddedToken("<wide>", rstrip=True)])
    stripping = byte_level()
    stripping.normalizer = normalizers.Strip()
    for fast, text in (
        (swallowing, "<wide>" + " " * 10_000),
        (stripping, "a" + " " * 10_000),
        (metaspace(), "☃" * 10_000),
    ):
        assert len(Tokenizer(fast, {}).encode(text, False, max_tokens=3)) <= 3


def test_a_text_is_refused_by_its_beginning_where_a_token_may_stand_for_any_length() -> None:
    stripping = byte_level()
    stripping.normalizer = normalizers.Strip()
    tokenizer = Tokenizer(stripping, {})
    with pytest.raises(RequestError, match="has 200000 bytes and so more than 9 tokens"):
        tokenizer.encode("☃x " * 40_000, False, max_tokens=9)
    assert len(tokenizer.encode("a" + " " * 200_000, False, max_tokens=9)) == 1


def test_bytes_the_vocabulary_lacks_do_not_count() -> None:
    lacking = FastTokenizer(models.BPE({"a": 0, "b": 1}, []))
    lacking.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert Tokenizer(lacking, {}).encode("a" + "☃" * 10_000 + "b", False, max_tokens=2) == [0, 1]


def test_long_text_leaves_other_threads_running() -> None:
    turns = 0
    ended = threading.Event()

    def count() -> None:
        nonlocal turns
        while not ended.is_set():
            turns += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = turns
        ids = OURS.encode("1" * 300_000, add_special_tokens=False)
        during = turns - before
    finally:
        ended.set()
        thread.join()
    assert ids == BYTE_LEVEL.encode("1" * 300_000, add_special_tokens=False).ids
    assert during > 50  # one or two is what the interpreter's own switching gives around a call
