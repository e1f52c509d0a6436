"""Which attention backend runs where, and what the refusals say."""

from dataclasses import replace

import pytest
from tiny_config import TINY

from minisgl.attention.choice import (
    NAMES,
    AttentionEnvironment,
    Backends,
    available,
    choose,
    parse,
    reason_unavailable,
)
from minisgl.config import DeviceFacts, EngineConfig, ResolvedConfig, resolve_engine_config
from minisgl.errors import ConfigError

H200 = AttentionEnvironment("cuda", (9, 0), "0.6.14", "bfloat16", 32, 8, 128, 16)
MODEL = replace(TINY, hidden_size=256, head_dim=64, max_position=2048, checkpoint_dtype="bfloat16")


def resolve(backend: str | None, **settings: object) -> ResolvedConfig:
    facts = DeviceFacts(has_cuda=True, compute_capability=(9, 0), flashinfer="0.6.14")
    return resolve_engine_config(EngineConfig(attention_backend=backend, **settings), MODEL, facts)  # type: ignore[arg-type]  (any field)


@pytest.mark.parametrize(
    ("text", "backends"),
    [
        ("triton", ("triton", "triton")),
        ("triton,flashinfer", ("triton", "flashinfer")),
        ("flashinfer-fa3, triton", ("flashinfer-fa3", "triton")),
    ],
)
def test_one_name_is_both_and_two_are_prefill_and_decode(text: str, backends: tuple[str, str]) -> None:
    assert parse(text) == backends


@pytest.mark.parametrize("text", ["", "flash", "triton,", "triton,torch,triton", "triton flashinfer"])
def test_what_is_no_backend_is_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match=r"triton, flashinfer, .*got '"):
        parse(text)


def test_fa3_is_refused_for_decode() -> None:
    with pytest.raises(ConfigError, match="for decode take flashinfer-fa2"):
        parse("triton,flashinfer-fa3")


@pytest.mark.parametrize(
    ("asked", "capability", "chosen"),
    [
        (None, (9, 0), ("triton", "triton")),
        ("flashinfer", (9, 0), ("flashinfer-fa3", "flashinfer-fa2")),
        ("flashinfer", (8, 0), ("flashinfer-fa2", "flashinfer-fa2")),
        ("flashinfer", (12, 0), ("flashinfer-fa2", "flashinfer-fa2")),
        ("flashinfer-fa2", (9, 0), ("flashinfer-fa2", "flashinfer-fa2")),
        ("flashinfer-fa3", (9, 0), ("flashinfer-fa3", "flashinfer-fa2")),
        ("triton,flashinfer", (9, 0), ("triton", "flashinfer-fa2")),
        ("flashinfer,triton", (9, 0), ("flashinfer-fa3", "triton")),
        ("trtllm", (10, 0), ("trtllm", "trtllm")),
        ("torch,triton", (9, 0), ("torch", "triton")),
    ],
)
def test_a_choice_names_the_kernels_exactly(
    asked: str | None, capability: tuple[int, int], chosen: tuple[str, str]
) -> None:
    assert choose(asked, H200._replace(capability=capability)) == Backends(*chosen)


@pytest.mark.parametrize(
    ("asked", "changed", "said"),
    [
        ("flashinfer", {"flashinfer": ""}, "needs the package flashinfer-python"),
        ("flashinfer-fa2", {"dtype": "float32"}, "takes bfloat16 and float16, and --dtype is float32"),
        ("triton,flashinfer", {"head_dim": 96}, "takes head dims of 64, 128, 256, and the model's is 96"),
        ("flashinfer", {"capability": (7, 5)}, "needs an Ampere GPU or a newer one"),
        ("flashinfer-fa3", {"capability": (8, 9)}, "needs a Hopper GPU .* this is compute 8.9"),
        ("trtllm", {}, "trtllm needs a Blackwell GPU .* this is compute 9.0"),
        ("trtllm,triton", {"capability": (8, 0)}, "needs a Blackwell GPU"),
        (
            "trtllm",
            {"capability": (10, 0), "page_size": 4},
            "pages of 16, 32, 64 tokens, and --page-size is 4",
        ),
        ("triton", {"capability": (7, 5)}, "needs an Ampere GPU or a newer one"),
        ("triton", {"head_dim": 100}, "multiples of 8, and the model's is 100"),
        ("triton", {"num_heads": 64, "num_kv_heads": 2}, "at most 16 query heads .* the model has 32"),
        ("triton", {"device": "cpu", "capability": (0, 0)}, "triton needs --device cuda"),
        ("trtllm", {"device": "cpu", "capability": (0, 0)}, "trtllm needs --device cuda"),
        ("flashinfer", {"device": "cpu", "capability": (0, 0)}, "flashinfer needs --device cuda"),
    ],
)
def test_what_a_backend_lacks_is_said_with_what_runs_instead(
    asked: str, changed: dict[str, object], said: str
) -> None:
    place = H200._replace(**changed)  # type: ignore[arg-type]  (any field)
    with pytest.raises(
        ConfigError, match=f"--attention-backend {asked}: .*{said}.*; what runs here: "
    ) as error:
        choose(asked, place)
    assert str(error.value).endswith(", ".join(available(place)))


def test_without_a_wish_the_first_that_runs_is_chosen() -> None:
    wide = H200._replace(num_heads=64, num_kv_heads=2)
    assert choose(None, wide) == Backends("flashinfer-fa3", "flashinfer-fa2")
    assert choose(None, wide._replace(flashinfer="")) == Backends("torch", "torch")
    assert choose(None, H200._replace(device="cpu", capability=(0, 0))) == Backends("torch", "torch")


def test_every_backend_has_an_answer_everywhere() -> None:
    for device, capability in (("cpu", (0, 0)), ("cuda", (7, 5)), ("cuda", (9, 0)), ("cuda", (10, 0))):
        place = H200._replace(device=device, capability=capability)
        runs = available(place)
        assert [name for name in NAMES if reason_unavailable(name, place) is None] == runs
        assert "torch" in runs


def test_decode_is_recorded_with_kernels_and_prompts_with_triton_only() -> None:
    config = resolve("flashinfer")
    assert config.attention_backend == "flashinfer-fa3,flashinfer-fa2"
    assert (config.max_graph_batch, config.max_graph_tokens, config.compile_mode) == (256, 0, "layers")
    config = resolve("triton,flashinfer")
    assert (config.max_graph_batch, config.max_graph_tokens) == (256, 8192)
    config = resolve("flashinfer,torch")
    assert (config.max_graph_batch, config.max_graph_tokens, config.compile_mode) == (0, 0, "off")


@pytest.mark.parametrize(
    ("backend", "settings", "said"),
    [
        ("flashinfer", {"max_graph_tokens": 64}, "--max-graph-tokens 64 takes .*triton for prefill"),
        ("flashinfer", {"compile_mode": "full"}, "--compile-mode full takes .*triton for decode"),
        ("triton,torch", {"max_graph_batch": 4}, "--max-graph-batch 4 needs"),
        ("triton,torch", {"compile_mode": "layers"}, "--compile-mode layers needs"),
        ("triton,flashinfer", {"kernel": ("Paged-Decode=a:b",)}, "--kernel Paged-Decode=a:b replaces"),
    ],
)
def test_what_does_not_go_with_a_backend_is_refused(
    backend: str, settings: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(backend, **settings)


def test_a_soft_cap_of_attention_scores_leaves_our_kernels_and_the_reference() -> None:
    assert available(H200._replace(has_softcap=True)) == ["triton", "torch"]
    with pytest.raises(ConfigError, match="flashinfer has no soft cap"):
        choose("triton,flashinfer", H200._replace(has_softcap=True))
