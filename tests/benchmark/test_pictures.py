"""What the documents show of the measurements is what the committed reports say."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from minisgl.benchmark.reports.report import read_report

ROOT = Path(__file__).resolve().parent.parent.parent
MAKE = "run: python bench/pictures.py"


@pytest.fixture(scope="module")
def pictures() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "bench")
        yield importlib.import_module("pictures")


@pytest.fixture(scope="module")
def result_tables(pictures: ModuleType) -> ModuleType:
    """Where `pictures` has its tables from."""
    return importlib.import_module("result_tables")


def test_no_picture_is_stale(pictures: ModuleType) -> None:
    assert pictures.stale_pictures() == [], MAKE


def test_every_picture_in_the_documents_is_made_from_a_report(pictures: ModuleType) -> None:
    # The others are of the page, by `make test-browser`.
    assert {path.name for path in pictures.IMAGES.glob("*.svg")} == set(pictures.PICTURES)


def test_readmes_table_has_the_figures_of_its_report(pictures: ModuleType) -> None:
    text = pictures.README.read_text(encoding="utf-8")
    assert pictures.with_table(text, pictures.readme_table(pictures.table_report())) == text, MAKE


def test_the_tables_of_results_have_the_figures_of_their_reports(result_tables: ModuleType) -> None:
    for page in result_tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert result_tables.with_result_tables(text) == text, MAKE


def test_every_table_of_results_is_shown_once(result_tables: ModuleType) -> None:
    texts = [page.read_text(encoding="utf-8") for page in result_tables.PAGES]
    shown = [name for text in texts for name in result_tables.MARKED.findall(text)]
    assert sorted(shown) == sorted(result_tables.TABLES)


def test_a_table_with_another_figure_is_stale(result_tables: ModuleType) -> None:
    text = "<!-- table: offline -->\n\n| model |\n\n<!-- end -->\nwords\n"
    made = result_tables.with_result_tables(text)
    assert "Llama-3.1-8B" in made
    assert made.endswith("words\n")
    assert result_tables.with_result_tables(made.replace("10,643", "10,644")) == made


def test_a_picture_of_another_report_or_of_none_is_stale(
    pictures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, other = list(pictures.PICTURES)[:2]
    monkeypatch.setattr(pictures, "PICTURES", {name: pictures.PICTURES[name]})
    monkeypatch.setattr(pictures, "IMAGES", tmp_path)
    assert pictures.stale_pictures() == [name]
    (tmp_path / name).write_bytes((ROOT / "docs" / "images" / other).read_bytes())
    assert pictures.stale_pictures() == [name]


def test_a_picture_that_is_drawn_is_not_stale(
    pictures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    name, report = "startup-qwen3-0.6b.svg", pictures.REPORTS / "startup-qwen3-0.6b.json"
    monkeypatch.setattr(pictures, "PICTURES", {name: report.name})
    monkeypatch.setattr(pictures, "IMAGES", tmp_path)
    pictures.plot_report(tmp_path / name, read_report(report), source=pictures.digest_of(report))
    assert pictures.stale_pictures() == []
