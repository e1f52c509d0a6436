"""The block of a CPU's decode steps: uncompiled, until a child process has compiled it or a cache has it.

Promise: no step waits for the compiler, and whatever fails, the uncompiled block goes on. All rows of a step
run the same code, and the code changes once, between two steps. Meanwhile float32 weights become smaller
(half_weights.py).
"""

import json
import logging
import os
import shutil
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from compile_cache.key import processor_facts, sources_digest
from compile_cache.manifest import CacheError
from compile_cache.store import OpenCache, open_cache
from minisgl.config import ResolvedConfig
from minisgl.engine.cpu_blocks.compiled_block import PARTS, load_block, part_file
from minisgl.engine.cpu_blocks.half_weights import WeightHalver
from minisgl.engine.cpu_blocks.sizes import BlockSizes, sizes_of_blocks
from minisgl.engine.graphs.rank_compile_cache import publish_compile_cache
from minisgl.ipc.child_process import module_command
from minisgl.models.decoder import Decoder, RunBlock, call_block

logger = logging.getLogger(__name__)

CHILD = "minisgl.engine.cpu_blocks.compile_child"
STEPS_BEFORE_COMPILING = 256
"""Decode steps after which compiling pays: the first answers are over, and short runs compile nothing."""
COMPILER = "g++"


class CpuBlock:
    """A `RunBlock`. Not thread-safe, as an engine.

    Args:
        sizes: of all blocks; None = they are not compiled.
        cache: keeps the compiled code; None = nothing does.
        command: starts the compiling process, less its arguments.
        steps_before: decode steps before it is started.
        halver: makes weights smaller.
    """

    def __init__(
        self,
        model: Decoder,
        sizes: BlockSizes | None,
        cache: OpenCache | None,
        command: tuple[str, ...] = tuple(module_command(CHILD)),
        steps_before: int = STEPS_BEFORE_COMPILING,
        halver: WeightHalver | None = None,
    ) -> None:
        self.run: RunBlock = call_block
        self._model = model
        self._first = model.layers[0]
        self._sizes = sizes
        self._cache = cache
        self._command = command
        self._steps_left = None if sizes is None else steps_before  # None: compiling, done, or not wanted
        self._compiling: _Compiling | None = None
        self._halver = halver
        if cache is not None and all(part_file(cache.files, name).exists() for name in PARTS):
            self._load(cache.files)

    @property
    def is_compiled(self) -> bool:
        """Whether steps run compiled code."""
        return self.run is not call_block

    @property
    def is_waiting(self) -> bool:
        """Whether steps may run compiled code later."""
        return self._steps_left is not None or self._compiling is not None

    def __call__(self, block: nn.Module, *arguments: Any) -> tuple[Tensor, Tensor]:
        """See `call_block`."""
        if block is self._first:
            self._before_step()
        return self.run(block, *arguments)

    def close(self) -> None:
        """End the compiling process, leave the cache, and halve no more weights."""
        self._steps_left = None
        if self._halver is not None:
            self._halver.stop()
        # What waits comes last, as an interrupt may end it.
        if self._compiling is not None:
            self._compiling.close()
            self._compiling = None
        if self._cache is not None:
            self._cache.close()
        if self._halver is not None:
            self._halver.wait()

    def _before_step(self) -> None:
        if self._halver is not None:
            self._halver.before_step()
        if self._steps_left is not None and self._sizes is not None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                self._steps_left = None
                self._start(self._sizes)
        elif self._compiling is not None and self._compiling.has_ended:
            self._finish(self._compiling)

    def _start(self, sizes: BlockSizes) -> None:
        try:
            self._compiling = _Compiling(self._command, sizes)
        except OSError as error:
            _warn(error)

    def _finish(self, compiling: "_Compiling") -> None:
        self._compiling = None
        error = compiling.error
        if error:
            _warn(error)
        else:
            self._load(compiling.folder)
            if self._cache is not None and self.is_compiled:
                self._keep(compiling.folder, self._cache)
        compiling.close()

    def _load(self, folder: Path) -> None:
        self._steps_left = None
        try:
            self.run = load_block(folder, self._model)
        except (RuntimeError, OSError) as error:
            _warn(error)
        else:
            logger.info("decode steps run compiled code from now on")

    def _keep(self, folder: Path, cache: OpenCache) -> None:
        try:
            for name in PARTS:
                unfinished = part_file(cache.files, f"tmp.{os.getpid()}.{name}")
                shutil.copyfile(part_file(folder, name), unfinished)
                unfinished.replace(part_file(cache.files, name))
        except OSError as error:
            logger.warning("the next start compiles again: %s", error)
        else:
            publish_compile_cache(cache)


class _Compiling:
    """The compiling process and its folder."""

    def __init__(self, command: tuple[str, ...], sizes: BlockSizes) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="minisgl-compile-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        # torch's compiler writes its own files to these places.
        places = [f"{name}={self.folder}" for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR")]
        with open(self._log, "wb") as log:
            self._child = subprocess.Popen(
                ["env", *places, *command, json.dumps(asdict(sizes)), str(self.folder)],
                stdin=subprocess.PIPE,  # its end tells the child that this process has ended
                stdout=log,
                stderr=log,
            )

    @property
    def _log(self) -> Path:
        return self.folder / "log"

    @property
    def has_ended(self) -> bool:
        return self._child.poll() is not None

    @property
    def error(self) -> str:
        """Why the process failed, once it has ended; empty = it did not."""
        if self._child.returncode == 0:
            return ""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the compiling process ended with {self._child.returncode}"

    def close(self) -> None:
        """End the process and delete the folder."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.kill()
        self._child.wait()
        self._temporary.cleanup()


def make_cpu_block(config: ResolvedConfig, model: Decoder) -> CpuBlock | None:
    """The block for the decode steps of a loaded model with a KV pool; None = the model's own, for good."""
    if not config.compile_on_cpu or config.kernel:
        return None
    halver = WeightHalver(model)
    compiles = config.tp == 1 and shutil.which(COMPILER) is not None
    sizes = sizes_of_blocks(model) if compiles else None
    if sizes is None and not halver.has_work:
        return None
    cache = None if sizes is None else _open_cache(config, sizes)
    return CpuBlock(model, sizes, cache, halver=halver)


def _open_cache(config: ResolvedConfig, sizes: BlockSizes) -> OpenCache | None:
    if not config.compile_cache:
        return None
    facts = processor_facts() | {
        "block": json.dumps(asdict(sizes)),
        "code": sources_digest([Path(__file__).parent]),
    }
    try:
        cache = open_cache(Path(config.compile_cache).expanduser(), facts, environ={})
    except CacheError as error:
        logger.warning("compiled code is not kept: %s", error)
        return None
    if cache is not None:
        if cache.note:
            logger.warning("%s", cache.note)
        publish_compile_cache(cache)  # other starts may use it now
    return cache


def _warn(error: object) -> None:
    logger.warning("decode steps stay uncompiled: %s", error)
