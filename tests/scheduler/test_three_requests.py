"""The page that follows three requests through the scheduler is true, and shows what it promises."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def three_requests() -> ModuleType:
    spec = importlib.util.spec_from_file_location("three_requests", ROOT / "bench" / "three_requests.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_not_stale(three_requests: ModuleType) -> None:
    assert three_requests.PAGE.read_text(encoding="utf-8") == three_requests.page(), (
        "run: python bench/three_requests.py"
    )


def test_the_requests_show_a_chunked_prompt_a_cached_prefix_and_a_preemption(
    three_requests: ModuleType,
) -> None:
    steps = list(three_requests.steps())
    chunks = [(step.row_names[chunk.row], chunk) for step in steps for chunk in step.plan.chunks]
    assert [chunk.samples for name, chunk in chunks if name == "A"] == [False, True]
    assert [chunk.num_computed_tokens for name, chunk in chunks if name == "B"] == [8]
    assert [step.preempted for step in steps].count(True) == 1
    assert len([name for name, _ in chunks if name == "C"]) == 2
