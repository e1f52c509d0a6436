"""Starts of an engine, as far as the compile cache sees them."""

import os
from pathlib import Path

from compile_cache.key import entry_name
from compile_cache.store import OpenCache, open_cache

FACTS = {"gpu": "NVIDIA H200", "driver": "580", "torch": "2.11"}
OTHER = {**FACTS, "gpu": "NVIDIA L4"}
CONTENT = {"inductor/ab/c7tmpa.py": "print(1)", "triton/K/kernel.cubin": "\x00\x01" * 500}


def start(root: Path, facts: dict[str, str] = FACTS) -> tuple[OpenCache, dict[str, str]]:
    environ: dict[str, str] = {}
    cache = open_cache(root, facts, environ)
    assert cache is not None
    return cache, environ


def compile_something(environ: dict[str, str]) -> None:
    files = Path(environ["TRITON_CACHE_DIR"]).parent
    for name, text in CONTENT.items():
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        partial = files / f"{name}.{os.getpid()}.tmp"
        partial.write_text(text)
        partial.replace(files / name)


def files_offered(root: Path, facts: dict[str, str] = FACTS) -> tuple[dict[str, str], str]:
    """What a start finds, and what it is told."""
    cache, environ = start(root, facts)
    files = Path(environ["TRITON_CACHE_DIR"]).parent
    found = {p.relative_to(files).as_posix(): p.read_text() for p in files.rglob("*") if p.is_file()}
    cache.close()
    return found, cache.note


def entry_of(root: Path) -> Path:
    return root / entry_name(FACTS)
