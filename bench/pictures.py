"""Draws docs/images, and writes the tables of results in the documents, all from bench/results.

    python bench/pictures.py

Run it after a change of a report shown there or of the code that draws. A picture's metadata contains a
digest of its sources, so tests/benchmark/test_pictures.py finds stale pictures without drawing.
"""

import hashlib
import re
import sys
from pathlib import Path

from result_tables import PAGES, REPORTS, ROOT, TABLE_CONTEXT, with_result_tables

from minisgl.benchmark.reports import panels, plots
from minisgl.benchmark.reports.plots import plot_report
from minisgl.benchmark.reports.report import Report, read_report
from triton_kernels.tuning import code_only

README = ROOT / "README.md"
IMAGES = ROOT / "docs" / "images"
PICTURES = {
    "offline-llama-3.1-8b.svg": "offline-llama-3.1-8b.json",
    "offline-qwen3-0.6b.svg": "offline-qwen3-0.6b.json",
    "offline-qwen3-14b.svg": "offline-qwen3-14b.json",
    "serve-qwen3-14b-no-prefix-cache.svg": "serve-qwen3-14b-no-prefix-cache.json",
    "serve-qwen3-14b-prefix-cache.svg": "serve-qwen3-14b-prefix-cache.json",
    "startup-llama-3.1-8b.svg": "startup-llama-3.1-8b.json",
    "startup-qwen3-0.6b.svg": "startup-qwen3-0.6b.json",
    "startup-qwen3-14b.svg": "startup-qwen3-14b.json",
    "step-llama-3.1-8b.svg": "step-llama-3.1-8b-cc60122.json",
    "step-qwen3-0.6b.svg": "step-qwen3-0.6b-cc60122.json",
    "step-qwen3-14b.svg": "step-qwen3-14b-cc60122.json",
}
"""Picture in docs/images -> its report."""
TABLE_PICTURE = "step-llama-3.1-8b.svg"
"""README's table shows the same report as this picture."""
TABLE_BATCHES = (1, 8, 64, 256)
BEGIN, END = "<!-- by bench/pictures.py -->\n\n", "\n<!-- end -->\n"
SOURCE = re.compile(r"<dc:source>(\w+)</dc:source>")


def digest_of(report: Path) -> str:
    """Digest of the sources of a picture: the report's file and the code that draws."""
    digest = hashlib.sha256(report.read_bytes())
    for path in (panels.__file__, plots.__file__):
        digest.update(code_only(Path(path).read_text(encoding="utf-8")).encode())
    return digest.hexdigest()[:16]


def digest_in(picture: Path) -> str | None:
    """The digest in an SVG picture's metadata; None without a picture or a digest."""
    found = SOURCE.search(picture.read_text(encoding="utf-8")) if picture.is_file() else None
    return found[1] if found else None


def stale_pictures() -> list[str]:
    """Names of pictures that are missing, or whose report or code has changed."""
    return [
        name for name, report in PICTURES.items() if digest_in(IMAGES / name) != digest_of(REPORTS / report)
    ]


def readme_table(report: Report) -> str:
    """README's table of decode steps, from a report of `minisgl bench step`."""
    rows = {row["batch"]: row for row in report.tables["decode"] if row["context"] == TABLE_CONTEXT}
    steps = [(float(rows[b]["wall_ms"] or 0), float(rows[b]["fraction"] or 0)) for b in TABLE_BATCHES]
    environment = report.environment
    torch = ".".join((environment.torch or "").split(".")[:2])
    gpu = (environment.gpu or "").removeprefix("NVIDIA ")
    lines = [
        f"Decode step of a Llama-3.1-8B shape (random bfloat16 weights, context {TABLE_CONTEXT}) on one "
        f"{gpu}, {environment.date[:10]}, torch {torch}, by `minisgl bench step` "
        f"([all results](docs/results.md), [picture](docs/images/{TABLE_PICTURE})); "
        "floor = bytes of weights and K/V over the card's copy bandwidth:",
        "",
        f"| batch | {' | '.join(map(str, TABLE_BATCHES))} |",
        f"|---|{'---|' * len(TABLE_BATCHES)}",
        f"| step, ms | {' | '.join(f'{wall_ms:.2f}' for wall_ms, _ in steps)} |",
        f"| of the floor | {' | '.join(f'{fraction:.2f}' for _, fraction in steps)} |",
    ]
    return "\n".join(lines) + "\n"


def with_table(text: str, table: str) -> str:
    """README's text with `table` in place of the old table."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table + END + rest.split(END, 1)[1]


def table_report() -> Report:
    """The report that README's table shows."""
    return read_report(REPORTS / PICTURES[TABLE_PICTURE])


def main() -> int:
    """Draw all stale pictures and update the tables."""
    for name in stale_pictures():
        report = REPORTS / PICTURES[name]
        plot_report(IMAGES / name, read_report(report), source=digest_of(report))
        print(IMAGES / name)
    made = {README: with_table(README.read_text(encoding="utf-8"), readme_table(table_report()))}
    made |= {page: with_result_tables(page.read_text(encoding="utf-8")) for page in PAGES}
    for path, text in made.items():
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
