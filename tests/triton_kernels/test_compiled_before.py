"""When a kernel counts as compiled before: its key follows what it runs, and wrong records are found out."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = """
    import triton
    import triton.language as tl

    SIZE = tl.constexpr(16)
    WIDE = tl.float32
    bend = tl.sin

    @triton.jit
    def helper(x):
        return x + SIZE

    @triton.jit
    def unused(x):
        return x

    @triton.jit
    def kernel(x_ptr):
        \"\"\"Adds.\"\"\"
        tl.store(x_ptr, bend(helper(tl.load(x_ptr)).to(WIDE)))
"""
CHANGES = {
    "same": ("", ""),
    "another place": ("import triton\n", "import os\n\n\n\nimport triton\n"),
    "a comment": ("return x + SIZE", "return x + SIZE  # why"),
    "a docstring": ("Adds.", "Adds a number."),
    "what it does not run": ("return x\n", "return x + 1\n"),
    "its code": ("tl.load(x_ptr))", "tl.load(x_ptr) * 2)"),
    "what it calls": ("return x + SIZE", "return x - SIZE"),
    "a constant": ("constexpr(16)", "constexpr(32)"),
    "a type": ("WIDE = tl.float32", "WIDE = tl.float16"),
    "another name of a function": ("bend = tl.sin", "bend = tl.cos"),
}
KEYS = """
import importlib.util, json, pathlib, sys
from compiled_before import key_of
keys = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.py")):
    spec = importlib.util.spec_from_file_location("kernels", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernels"] = module
    spec.loader.exec_module(module)
    keys[path.stem] = key_of(module.kernel, "sm_80", 1)
keys["other arguments"] = key_of(module.kernel, "sm_80", 2)
print(json.dumps(keys))
"""
WRONG_RECORD = """
import json
import compile_kernels
from kernel_launches import launches
from compile_kernels import TARGETS, Compiler

wanted = [one for one in launches(TARGETS["sm_80"].gpu) if one.name.startswith("silu_mul")]
compiler = Compiler("sm_80", True)
compiler.run(wanted)
(right,) = compiler.by_key.items()
compile_kernels.is_compiled_again = lambda key: True
wrong = {right[0]: right[1] | {"mma": 1}}
print(json.dumps([Compiler("sm_80", True, known).run(wanted)[0] for known in (dict([right]), wrong)]))
"""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or sys.platform != "linux", reason="needs Triton's compiler"
)


def result_of(program: str, *arguments: str) -> str:
    """The last line that a program of bench's modules prints, run with Triton's interpreter off."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'bench'}"
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_a_key_changes_with_what_the_kernel_runs_and_with_nothing_else(tmp_path: Path) -> None:
    for name, (old, new) in CHANGES.items():
        source = textwrap.dedent(KERNELS)
        assert old in source
        (tmp_path / f"{name}.py").write_text(source.replace(old, new) if old else source)
    keys = json.loads(result_of(KEYS, str(tmp_path)))
    alike = {name for name, key in keys.items() if key == keys["same"]}
    assert alike == {"same", "another place", "a comment", "a docstring", "what it does not run"}
    assert len(set(keys.values())) == 7


def test_a_record_that_compiling_does_not_confirm_is_a_failure() -> None:
    right, wrong = json.loads(result_of(WRONG_RECORD))
    assert "failed" not in right
    assert "compiled to other than what is recorded" in wrong["failed"]
