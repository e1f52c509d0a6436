"""What compile_kernels.py found earlier, so that it need not compile what has not changed.

What a kernel compiles to depends on its code, its arguments, the GPU and Triton. A key stands for all of
these: a line with the same key says what compiling would say. Each target has a file of such lines of JSON.

Promise: an edit of code that a kernel does not run, of comments or of the order of functions changes no key.
"""

import ast
import functools
import hashlib
import inspect
import json
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from triton_kernels.tuning import code_only

Line = dict[str, Any]


def key_of(kernel: JITFunction[Any], *rest: Any) -> str:
    """The key of a kernel, and of all else that it depends on."""
    parts = [triton.__version__, *code_of(kernel), *map(str, rest)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def is_compiled_again(key: str) -> bool:
    """One in sixteen is, every time, and must say what is recorded."""
    return key.startswith("0")


def read_lines(path: Path) -> dict[str, Line]:
    """Key -> line. A file that is not there has none."""
    if not path.exists():
        return {}
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    return {line.pop("key"): line for line in lines}


def write_lines(path: Path, lines: dict[str, Line]) -> None:
    """Write the file, in the order of the keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}")
    texts = [json.dumps({"key": key, **lines[key]}) for key in sorted(lines)]
    beside.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    os.replace(beside, path)


@functools.cache
def code_of(function: JITFunction[Any]) -> list[str]:
    """The code of a kernel and of all it calls, and the values of the constants that these name."""
    found: dict[str, list[str]] = {}
    _collect(function, found)
    return [text for name in sorted(found) for text in found[name]]


def _collect(function: JITFunction[Any], found: dict[str, list[str]]) -> None:
    name = f"{function.__module__}.{function.__name__}"
    if name in found:
        return
    source = code_only(textwrap.dedent(function.src))
    parts = found[name] = [name, source, f"noinline={getattr(function, 'noinline', False)}"]
    for named, value in sorted(dict(_globals_of(ast.parse(source), function.__globals__)).items()):
        if isinstance(value, JITFunction):
            _collect(value, found)
        elif isinstance(value, tl.constexpr | tl.dtype | int | float | str | tuple):
            parts.append(f"{named}={value}")
        elif not isinstance(value, ModuleType):
            parts.append(f"{named}={_name_of(value)}")


def _name_of(value: Any) -> str:
    """A name for a function of Triton's, or any other value: where it is defined, and of ours its code."""
    inner = getattr(value, "fn", value)
    place = f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', repr(inner))}"
    if not place.startswith("triton_kernels"):
        return place
    return place + code_only(textwrap.dedent(inspect.getsource(inner)))


def _globals_of(tree: ast.AST, names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What the code names of its file's globals, and of those modules of this project that are among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names:
            yield node.id, names[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = names.get(node.value.id)
            if isinstance(module, ModuleType) and module.__name__.startswith("triton_kernels"):
                yield f"{node.value.id}.{node.attr}", getattr(module, node.attr, None)
