"""Who may import whom. The table is the drawing of the project: change it only with the design.

A unit is a module or folder directly in `minisgl/`, or one of the two packages beside it. Imports are
read from the source, those inside functions and under TYPE_CHECKING included.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("minisgl", "triton_kernels", "compile_cache")

SEAMS = {"errors", "log", "request", "config", "messages", "transport"}
ENGINE_SIDE = {
    "kvcache",
    "scheduler",
    "parallel",
    "layers",
    "attention",
    "models",
    "weights",
    "model_config",
    "hf_config",
}

MAY_IMPORT: dict[str, set[str]] = {
    # the bottom: what everyone may know
    "errors": set(),
    "log": set(),
    "fields": {"errors"},
    "request": {"errors", "log", "fields"},
    "attention_choice": {"errors"},
    "model_config": set(),
    "config": {"errors", "log", "attention_choice", "model_config"},
    "hf_config": {"errors", "model_config"},
    "messages": {"request"},
    "transport": {"messages", "errors", "log"},
    # what decides: no torch
    "kvcache": {"errors", "log"},
    "scheduler": {"errors", "log", "request", "kvcache"},
    # what computes
    "triton_kernels": set(),
    "compile_cache": set(),
    "parallel": {"errors", "log", "model_config", "hf_config", "triton_kernels"},
    "attention": {"errors", "log", "attention_choice", "triton_kernels"},
    "layers": {"errors", "log", "model_config", "triton_kernels", "attention"},
    "models": {"errors", "log", "model_config", "parallel", "layers", "attention", "triton_kernels"},
    "weights": {"errors", "log", "model_config", "parallel"},
    "engine": SEAMS | ENGINE_SIDE | {"attention_choice", "triton_kernels", "compile_cache", "__init__"},
    # what talks to people: no torch
    "text": {"errors", "log", "fields"},
    "server": SEAMS | {"fields", "text", "__init__"},
    "offline": {"errors", "request", "messages", "text"},
    "llm": {"errors", "log", "config", "request", "text", "offline", "engine", "weights"},
    # the user's door
    "flags": {"errors"},
    "shell": {"errors", "request", "offline", "llm"},
    "doctor": {
        "compile_cache",
        "errors",
        "attention_choice",
        "config",
        "model_config",
        "hf_config",
        "weights",
        "parallel",
        "engine",
        "__init__",
    },
    "capacity": {"errors", "config", "model_config", "hf_config", "models", "parallel", "engine"},
    "benchmark": SEAMS
    | {
        "text",
        "triton_kernels",
        "compile_cache",
        "engine",
        "scheduler",
        "kvcache",
        "weights",
        "model_config",
        "hf_config",
        "parallel",
    }
    | {"server", "__init__"},
    "cli": SEAMS
    | {"flags", "shell", "doctor", "server", "llm", "weights", "benchmark", "compile_cache", "capacity"}
    | {"engine", "__init__"},
    "__init__": {"errors", "request", "offline", "llm"},
    "__main__": {"cli"},
}

NARROWER: dict[tuple[str, str], set[str]] = {
    ("layers", "attention"): {"minisgl.attention.interface"},
    ("benchmark", "compile_cache"): {"compile_cache.bytecode"},
    ("benchmark", "server"): {"minisgl.server.startup_report"},
    ("benchmark", "parallel"): {"minisgl.parallel.sizes"},
    ("doctor", "compile_cache"): {"compile_cache.entries"},
    ("doctor", "parallel"): {"minisgl.parallel.sizes"},
    ("doctor", "weights"): {"minisgl.weights.sources"},
    ("doctor", "engine"): {"minisgl.engine.device"},
    ("llm", "weights"): {"minisgl.weights.sources", "minisgl.weights.progress"},
    ("cli", "engine"): {"minisgl.engine.node"},
    ("cli", "weights"): {"minisgl.weights.sources", "minisgl.weights.progress"},
}
"""Where only these modules of a folder may be imported."""

TORCH_FREE = (
    SEAMS
    | {
        "kvcache",
        "scheduler",
        "text",
        "server",
        "model_config",
        "hf_config",
        "offline",
        "flags",
        "shell",
        "cli",
    }
) | {"fields", "attention_choice", "__init__", "__main__"}
HEAVY = {"torch", "transformers", "triton"}

ONLY_IN: dict[str, set[str]] = {
    "zmq": {"minisgl/transport.py"},
    "torch._dynamo": {"minisgl/engine/compiled.py"},
    "torch._inductor": {"minisgl/engine/compiled.py", "compile_cache/"},
    "os.environ": {"minisgl/cli.py", "minisgl/parallel/regions.py", "compile_cache/"},
    "os.getenv": set(),
    "os.putenv": set(),
}


class Import(NamedTuple):
    """One imported module, and where."""

    file: Path
    line: int
    module: str

    @property
    def where(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def unit_of(module: str) -> str:
    """The line of the table a dotted module name belongs to."""
    parts = module.split(".")
    if parts[0] != "minisgl":
        return parts[0]
    return parts[1] if len(parts) > 1 else "__init__"


def module_name(file: Path) -> str:
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imports_of(file: Path) -> Iterator[Import]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module is None:
                yield Import(file, node.lineno, ".")
                continue
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield Import(file, node.lineno, full if is_module(full) else node.module)


def all_imports() -> list[Import]:
    return [found for file in source_files() for found in imports_of(file)]


def test_every_unit_has_a_line_in_the_table() -> None:
    units = {unit_of(module_name(file)) for file in source_files()}
    assert units - MAY_IMPORT.keys() == set(), "new units need a line in MAY_IMPORT"


def test_imports_follow_the_table() -> None:
    wrong = []
    for found in all_imports():
        if found.module.split(".")[0] not in PACKAGES:
            continue
        importer, imported = unit_of(module_name(found.file)), unit_of(found.module)
        if importer == imported:
            continue
        narrower = NARROWER.get((importer, imported))
        allowed = imported in MAY_IMPORT[importer] and (narrower is None or found.module in narrower)
        if not allowed:
            wrong.append(f"{found.where} imports {found.module}")
    assert wrong == []


def test_no_relative_imports() -> None:
    assert [found.where for found in all_imports() if found.module == "."] == []


def test_torch_free_units_never_name_torch() -> None:
    wrong = [
        f"{found.where} imports {found.module}"
        for found in all_imports()
        if unit_of(module_name(found.file)) in TORCH_FREE and found.module.split(".")[0] in HEAVY
    ]
    assert wrong == []


@pytest.mark.parametrize("name", sorted(ONLY_IN))
def test_modules_with_one_home_stay_there(name: str) -> None:
    wrong = [where for file in source_files() for where in uses_of(name, file) if not allowed_in(name, file)]
    assert wrong == []


def uses_of(name: str, file: Path) -> list[str]:
    """Lines where `file` imports `name` or reaches it as an attribute (`os.environ`)."""
    found = [use.where for use in imports_of(file) if use.module == name or use.module.startswith(name + ".")]
    outer, _, attribute = name.partition(".")
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute) and node.attr == attribute:
            if isinstance(node.value, ast.Name) and node.value.id == outer:
                found.append(where)
        elif isinstance(node, ast.ImportFrom) and node.module == outer:
            found += [where for alias in node.names if alias.name == attribute]
    return found


def allowed_in(name: str, file: Path) -> bool:
    path = file.relative_to(ROOT).as_posix()
    return any(path == home or (home.endswith("/") and path.startswith(home)) for home in ONLY_IN[name])


def test_every_file_says_what_it_is_for() -> None:
    silent = []
    for file in source_files():
        text = file.read_text(encoding="utf-8")
        if text.strip() and not ast.get_docstring(ast.parse(text)):
            silent.append(str(file.relative_to(ROOT)))
    assert silent == []


@pytest.mark.parametrize(
    "module",
    [
        "minisgl",
        "minisgl.cli",
        "minisgl.server.app",
        "minisgl.server.launch",
        "minisgl.scheduler.scheduler",
        "minisgl.kvcache.manager",
        "minisgl.text.chat_template",
        "minisgl.weights.pull",
    ],
)
def test_a_fresh_interpreter_loads_no_torch(module: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps(sorted(set(sys.modules) & {HEAVY!r})))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout) == []


def test_the_public_names_resolve_and_import_minisgl_loads_none_of_them() -> None:
    code = (
        "import sys, minisgl; before = 'minisgl.errors' in sys.modules;"
        "assert all(hasattr(minisgl, name) for name in minisgl.__all__);"
        "print(before, 'torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", "False"]
