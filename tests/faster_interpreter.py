"""Leaves out work of Triton's interpreter that has no effect: up to half of a small kernel's time.

Promise: kernels run the same functions as without, and compute the same. Written for Triton 3.6 to 3.8; where
an interpreter has none of these parts, nothing changes.
"""

import dataclasses
import functools
import inspect
from typing import Any


def make_interpreter_faster() -> None:
    """Change the interpreter in this process, if Triton is installed."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    _patch_once_a_launch(interpreter)
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    options: Any = getattr(builder, "options", None)
    if hasattr(options, "sanitize_overflow") and not getattr(options, "debug", True):
        # Each sum of integers is computed again in 64 bits for an assertion that only `debug` turns on.
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _patch_once_a_launch(interpreter: Any) -> None:
    """Without this, each call of a device function patches `triton.language` again, and finds it patched."""
    patch: Any = getattr(interpreter, "_patch_lang", None)
    scope_type: Any = getattr(interpreter, "_LangPatchScope", None)
    if patch is None or scope_type is None:
        return
    language: Any = interpreter.tl

    @functools.cache
    def modules_that_it_sees(function: Any) -> list[Any]:
        seen = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return [module for module in (language, language.core) if module in seen]

    def patch_once(function: Any) -> Any:
        seen = modules_that_it_sees(function)
        # What patching replaces is marked as built in; what it puts there is not.
        is_patched = seen and not any(language.core.is_builtin(module.load) for module in seen)
        return scope_type() if is_patched else patch(function)

    interpreter._patch_lang = patch_once
