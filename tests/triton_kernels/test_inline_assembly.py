"""Strings of kernels must survive torch.compile, which writes a kernel's source into a string of its code.

There an escape in a constant's repr becomes a line break or a quote, and the copy is no Python any more. Only
a GPU runs that code, so nothing else here would notice.
"""

import importlib
import pkgutil

import pytest
import triton.language as tl

import triton_kernels

MODULES = sorted(one.name for one in pkgutil.iter_modules(triton_kernels.__path__))


def strings_of(module: str) -> dict[str, str]:
    found = vars(importlib.import_module(f"triton_kernels.{module}"))
    return {
        name: one.value
        for name, one in found.items()
        if isinstance(one, tl.constexpr) and isinstance(one.value, str)
    }


@pytest.mark.parametrize("module", MODULES)
def test_a_copy_of_each_constant_is_the_same(module: str) -> None:
    for name, value in strings_of(module).items():
        copied: dict[str, str] = {}
        exec(f"source = '''\n{name} = {value!r}\n'''", copied)
        exec(copied["source"], copied)
        assert copied[name] == value


def test_the_constants_of_assembly_are_found() -> None:
    found = {name for module in MODULES for name in strings_of(module)}
    assert {"_PAIRS_TO_FP16", "E2M1_PAIRS", "INT4_PAIRS", "_WAIT"} <= found
