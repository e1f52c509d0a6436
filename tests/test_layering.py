"""Who may import whom. The table is the drawing of the project: change it only with the design.

A unit is a folder or module directly in `minisgl/`, a module inside a folder if it has a line of its own, or
one of the two packages beside `minisgl/`. Imports are read from the source, also those inside functions and
under TYPE_CHECKING.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("minisgl", "triton_kernels", "compile_cache")

MAY_IMPORT: dict[str, set[str]] = {
    unit: set(others.split())
    for unit, others in {
        # what everyone may know
        "errors": "",
        "log": "",
        "seeds": "",
        "lives": "",
        "fields": "errors",
        "progress": "",
        "grammar": "errors fields",
        "request": "errors fields grammar",
        "model_config": "errors",
        "attention.choice": "errors",
        "config": "errors log attention.choice model_config",
        "ipc": "errors lives seeds request",
        # what decides: no torch
        "kvcache": "errors",
        "scheduler": "errors lives request kvcache",
        # what computes
        "triton_kernels": "",
        "compile_cache": "",
        "parallel": "errors model_config triton_kernels",
        "attention": "errors attention.choice triton_kernels",
        "layers": "errors model_config attention triton_kernels",
        "models": "errors model_config parallel layers attention triton_kernels",
        "weights": "errors progress ipc model_config parallel triton_kernels",
        "engine": "errors lives log progress request grammar config ipc attention.choice model_config "
        "kvcache scheduler parallel layers attention models weights triton_kernels compile_cache __init__",
        # what talks to people: no torch
        "text": "errors fields request",
        "replies": "errors fields grammar request text",
        "server": "errors lives log seeds fields grammar request replies config ipc text __init__",
        "offline": "errors seeds request ipc text",
        "llm": "errors progress config request replies text offline engine weights",
        # the user's door
        "commands.flags": "errors",
        "commands.files": "errors replies",
        "commands.api_key": "errors config",
        "commands.parser": "log request config commands.flags benchmark top __init__",
        "commands.reply_printer": "offline text",
        "top": "errors server",
        "verification": "errors config ipc request model_config scheduler engine attention layers "
        "models text",
        "commands.verify": "progress config benchmark verification",
        "commands.chat": "errors request replies text offline llm commands.reply_printer",
        "commands": "errors config attention.choice model_config parallel models weights engine "
        "compile_cache __init__",
        "benchmark": "errors progress seeds request config ipc model_config kvcache scheduler parallel "
        "weights engine text server triton_kernels compile_cache __init__",
        "cli": "errors log progress request config commands commands.files commands.flags commands.parser "
        "commands.api_key commands.chat commands.verify server llm weights engine benchmark top",
        # engines in a cluster: Ray's side; no torch
        "ray": "errors config commands.flags ipc engine",
        "ray.server_child": "config commands.flags cli ray",
        "ray_serve": "ray",
        "__init__": "errors request offline llm",
        "__main__": "cli",
        "engine.__main__": "cli",
    }.items()
}

NARROWER: dict[tuple[str, str], set[str]] = {
    ("request", "grammar"): {"minisgl.grammar.spec"},
    ("replies", "grammar"): {"minisgl.grammar.spec"},
    ("server", "grammar"): {"minisgl.grammar.spec"},
    ("layers", "attention"): {"minisgl.attention.interface"},
    ("commands.parser", "top"): {"minisgl.top.settings"},
    ("top", "server"): {"minisgl.server.watch.history", "minisgl.server.watch.views"},
    ("commands.verify", "benchmark"): {
        "minisgl.benchmark.model_configs",
        "minisgl.benchmark.reports.report",
    },
    ("weights", "ipc"): {"minisgl.ipc.child_process"},
    ("offline", "ipc"): {"minisgl.ipc.calls", "minisgl.ipc.messages"},
    ("benchmark", "compile_cache"): {"compile_cache.bytecode"},
    ("benchmark", "server"): {"minisgl.server.engines.startup_report"},
    ("benchmark", "parallel"): {"minisgl.parallel.sizes"},
    ("commands", "compile_cache"): {"compile_cache.entries", "compile_cache.manifest"},
    ("commands.parser", "benchmark"): {"minisgl.benchmark.settings"},
    ("ray", "ipc"): {"minisgl.ipc.child_process"},
    ("ray", "engine"): {"minisgl.engine.remote.supervisor"},
    ("llm", "weights"): {"minisgl.weights.sources"},
    ("cli", "engine"): {
        "minisgl.engine.device_faults",
        "minisgl.engine.ranks.job",
        "minisgl.engine.remote.connected_engine",
    },
    ("cli", "weights"): {"minisgl.weights.builtin_models", "minisgl.weights.sources"},
}
"""Where only these modules of a folder may be imported."""

LOADS_TORCH = {
    *("triton_kernels", "compile_cache", "parallel", "attention", "layers", "models", "weights", "engine"),
    *("llm", "commands", "commands.verify", "verification", "benchmark"),
}
TORCH_FREE = MAY_IMPORT.keys() - LOADS_TORCH
HEAVY = {"torch", "transformers", "triton"}

ONLY_IN: dict[str, set[str]] = {
    "zmq": {
        "minisgl/ipc/transport.py",
        "minisgl/ipc/door.py",
        "minisgl/ipc/door_keys.py",
        "minisgl/ipc/server_line.py",
    },
    "ray": {"minisgl/ray/ingress.py", "minisgl/ray/engine_replica.py", "minisgl/ray_serve.py"},
    "opentelemetry": {"minisgl/server/tracing/export.py"},
    "torch._dynamo": {"minisgl/engine/graphs/decode_graphs.py"},
    "torch._inductor": {
        "minisgl/engine/graphs/decode_graphs.py",
        "minisgl/engine/cpu_blocks/compile_child.py",
        "compile_cache/",
    },
    "sys.executable": {
        "minisgl/ipc/child_process.py",
        "minisgl/commands/doctor.py",
        "minisgl/weights/pull.py",
    },
    "os.environ": {
        "minisgl/cli.py",
        "minisgl/engine/worker.py",
        "minisgl/parallel/regions.py",
        "minisgl/ray/server_child.py",
        "compile_cache/",
    },
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
    module_of_a_folder = ".".join(parts[1:3])
    if module_of_a_folder in MAY_IMPORT:
        return module_of_a_folder
    return parts[1] if len(parts) > 1 else "__init__"


def module_name(file: Path) -> str:
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imports_of(file: Path) -> Iterator[Import]:
    return imports_in(ast.parse(file.read_text(encoding="utf-8")), file)


def imports_in(tree: ast.Module, file: Path) -> Iterator[Import]:
    for node in ast.walk(tree):
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


def imports_at_run_time(file: Path) -> set[str]:
    """The modules of this project that `file` imports, except those it names for annotations only."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    return {found.module for found in imports_in(tree, file) if found.module.split(".")[0] in PACKAGES}


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {module_name(file): imports_at_run_time(file) for file in source_files()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


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
    if name.rpartition(".")[2] not in file.read_text(encoding="utf-8"):
        return []  # parsing all files for each name takes minutes
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
        "minisgl.server.engines.launch",
        "minisgl.scheduler.scheduler",
        "minisgl.kvcache.manager",
        "minisgl.grammar.compiler",
        "minisgl.text.chat_template",
        "minisgl.weights.pull",
        "minisgl.ray.settings",
        "minisgl.ray.autoscaling",
        "minisgl.ray.forward",
        "minisgl.ray.server_child",
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
