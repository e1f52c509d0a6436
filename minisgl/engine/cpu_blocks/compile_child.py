"""A child process that compiles the parts of a block for this CPU. Arguments: SIZES as JSON, FOLDER.

Promise: once torch is loaded, it takes only time that no other process wants. It ends when its parent does,
and then deletes FOLDER, which nobody else would. It needs no weights.
"""

import json
import os
import shutil
import sys
import threading
from pathlib import Path

import torch

from minisgl.engine.cpu_blocks.compiled_block import part_file
from minisgl.engine.cpu_blocks.parts import Part, parts_of
from minisgl.engine.cpu_blocks.sizes import BlockSizes


def main() -> None:
    """Compile all parts."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _set_compiler_up()
    for name, part in parts_of(BlockSizes(**json.loads(sys.argv[1]))).items():
        compile_part(part, part_file(Path(sys.argv[2]), name))


def compile_part(part: Part, file: Path) -> None:
    """Compile a part for any number of rows."""
    lines = {name: torch.export.Dim(name, min=1, max=1 << 24) for name in part.lines.values()}
    shapes = tuple(
        {0: lines[part.lines[place]]} if place in part.lines else None for place in range(len(part.inputs))
    )
    with torch.no_grad():
        program = torch.export.export(part.module, part.inputs, dynamic_shapes=shapes, strict=False)
        torch._inductor.aoti_compile_and_package(program, package_path=str(file))


def _set_compiler_up() -> None:
    from torch._inductor import config  # lazy: it takes seconds

    config.compile_threads = 1
    config.cpp.threads = 1  # a part takes less time than waking a thread


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # the parent never writes, so this returns when it has ended
    shutil.rmtree(sys.argv[2], ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    main()
