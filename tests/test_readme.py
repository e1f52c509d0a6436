"""What the documents show exists: commands parse, paths are there, examples compile and import.

Only names are checked here; that the examples answer is checked where a model runs.
"""

import argparse
import ast
import functools
import importlib
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from minisgl.commands.parser import build_parser

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
READING = re.compile(r"^\| `([\w/.]+\.py)` \| (\d+) \| ", re.MULTILINE)
GPU_ROW = re.compile(r"^\| ([^|]+) \| (\d+\.\d) \| (\w*) ?\|[^|]*\| ?([^|]*?) ?\|$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
PATH = re.compile(r"\.?[\w-]+(/[\w.-]+)*(/|\.(py|md|toml|json))")
NAMES_ELSEWHERE = {"config.json", "tokenizer.json", "generation_config.json"}
"""Files of a model folder."""


def blocks(document: Path, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(document.read_text(encoding="utf-8")) if kind == language]


def inline_code(document: Path) -> list[str]:
    return INLINE.findall(FENCE.sub("", document.read_text(encoding="utf-8")))


def command_lines(document: Path) -> list[str]:
    """Shell lines of all bash blocks and the inline `minisgl ...` and `make ...`, pipes and comments cut."""
    lines = [line for block in blocks(document, "bash") for line in block.splitlines()]
    lines += [code for code in inline_code(document) if code.startswith(("minisgl ", "make "))]
    parts = [part.strip() for line in lines for part in re.split(r"[|>]", line)]
    return [part for part in parts if part]


def documented(command: str) -> list[tuple[str, str]]:
    lines = [(document.name, line) for document in DOCUMENTS for line in command_lines(document)]
    return [(name, line) for name, line in lines if line.startswith(command + " ")]


@functools.cache
def command_line() -> argparse.ArgumentParser:
    return build_parser({})


def known_flags() -> set[str]:
    return {option for parser in all_parsers(command_line()) for option in options_of(parser)}


def all_parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    below = [inner for action in actions for inner in action.choices.values()]
    return [parser, *(found for inner in below for found in all_parsers(inner))]


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


@pytest.mark.parametrize(("document", "line"), documented("minisgl"))
def test_every_minisgl_command_parses(document: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    if words[-1:] == ["--help"]:
        words = words[:-1]
    try:
        command_line().parse_args(words)
    except SystemExit:
        pytest.fail(f"{document}: {line}")


@pytest.mark.parametrize(("document", "line"), documented("make"))
def test_every_make_target_exists(document: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    answer = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, f"{document}: {line}: {answer.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_flag_that_is_named_exists(document: Path) -> None:
    named = {flag for code in inline_code(document) for flag in re.findall(r"^--[a-z][\w-]*", code)}
    assert named - known_flags() == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_variable_that_is_named_belongs_to_a_setting(document: Path) -> None:
    settings = {"MINISGL_" + flag[2:].upper().replace("-", "_") for flag in known_flags()}
    named = set(re.findall(r"MINISGL_[A-Z_]+", document.read_text(encoding="utf-8")))
    assert named - settings - {"MINISGL_CACHE", "MINISGL_ENGINE_SECRET"} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_that_is_named_exists(document: Path) -> None:
    named = {code for code in inline_code(document) if PATH.fullmatch(code)} - NAMES_ELSEWHERE
    missing = [
        path for path in named if not (ROOT / path).exists() and not (ROOT / "minisgl" / path).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    for path, anchor in LINK.findall(document.read_text(encoding="utf-8")):
        target = document.parent / path if path else document
        assert target.exists(), path
        if anchor:
            headings = HEADING.findall(target.read_text(encoding="utf-8"))
            assert anchor in {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in headings}


def test_the_map_of_folders_in_the_architecture_is_true() -> None:
    """Each line names a folder or files; lines further in lie in the folder above them."""
    (tree,) = [block for block in blocks(ROOT / "docs/architecture.md", "") if block.startswith("minisgl/\n")]
    missing, here = [], ROOT
    for line in tree.splitlines():
        names = re.split(r"\s{2,}", line.strip())
        inside = here if line.startswith(" ") else ROOT
        missing += [name for name in names[0].split() if not (inside / name).exists()]
        if not line.startswith(" "):
            here = ROOT / names[0].split()[0]
        elif len(names) > 1:
            folder = inside / names[0].split()[0]
            listed = [word for word in names[1].split() if word.endswith(".py")]
            missing += [word for word in listed if not (folder / word).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_examples_compile_and_their_imports_resolve(document: Path) -> None:
    for block in blocks(document, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    importlib.import_module(alias.name)


def test_the_first_screen_has_the_two_commands() -> None:
    first = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:12])
    assert "make serve" in first
    assert "make test" in first


def test_the_table_of_gpus_says_what_was_compiled_and_tuned() -> None:
    rows = GPU_ROW.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    report = json.loads((ROOT / "bench/results/cpu/kernels-by-gpu.json").read_text(encoding="utf-8"))
    targets = {row["target"] for row in report["tables"]["targets"]}
    assert {f"sm_{compute.replace('.', '')}" for _, compute, compiled, _ in rows if compiled} == targets
    tables = (ROOT / "triton_kernels/tuned").glob("*.json")
    tuned = {json.loads(path.read_text(encoding="utf-8"))["gpu"] for path in tables}
    assert {f"NVIDIA {gpu}" for gpu, _, _, state in rows if state == "yes"} == tuned


def test_the_reading_list_has_the_files_and_lines_that_it_says() -> None:
    """Line counts within 10 %, about a dozen files, and no more than an afternoon's reading."""
    listed = {
        path: int(lines) for path, lines in READING.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    }
    real = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in listed}
    assert {path: lines for path, lines in real.items() if abs(listed[path] - lines) > lines / 10} == {}
    assert 10 <= len(listed) <= 14
    assert sum(real.values()) <= 3500


def test_the_tour_of_the_architecture_stays_short() -> None:
    assert len((ROOT / "docs/architecture.md").read_text(encoding="utf-8").splitlines()) <= 250
