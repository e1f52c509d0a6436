"""Compiles every kernel for every generation of GPUs, without a GPU: does each fit, and what does it take?

    python bench/compile_kernels.py --out bench/results/cpu/kernels-by-gpu.json     # some minutes
    python bench/compile_kernels.py --candidates --out ...          # and all that tuning may try; an hour
    python bench/compile_kernels.py --targets sm_86,sm_120 prefill  # launches with this in their names
    python bench/compile_kernels.py --candidates --out ... rules    # replaces the rows of kernels that only
                                                                    # these launches launch
    python bench/compile_kernels.py --stop-at-shared                # no machine code: a third less time

Prints a JSON line for each kernel compiled, down to the machine code of Triton's own ptxas. Bar: every kernel
compiles, within the shared memory that the GPU gives a program. Ends with 1 if one does not.
"""

import os

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is loaded: it compiles, whatever a test run says

import argparse
import atexit
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from compiled_before import Line, is_compiled_again, key_of, read_lines, write_lines
from kernel_launches import Launch, candidate_launches, launches
from quantized_launches import quantized_launches
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import __file__ as NVIDIA_BACKEND
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonTensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

import triton_kernels.gpu
from minisgl.benchmark.reports.report import make_report, read_report, write_report
from triton_kernels.gpu import Gpu

Tables = dict[str, list[dict[str, Any]]]


class Target(NamedTuple):
    """A generation of GPUs, as one of its boards."""

    gpu: Gpu
    boards: str


TARGETS = {
    "sm_80": Target(Gpu((8, 0), 163 << 10, 108), "A100"),
    "sm_86": Target(Gpu((8, 6), 99 << 10, 72), "A10, RTX 30"),
    "sm_89": Target(Gpu((8, 9), 99 << 10, 142), "L4, L40S, RTX 40"),
    "sm_90": Target(Gpu((9, 0), 227 << 10, 132), "H100, H200"),
    "sm_100": Target(Gpu((10, 0), 227 << 10, 148), "B200"),
    "sm_120": Target(Gpu((12, 0), 99 << 10, 170), "RTX 50, RTX PRO"),
}
"""CUDA's programming guide has the shared memory of a program by compute capability."""
TENSOR_MEMORY_COLUMNS = 512
"""Of a multiprocessor of sm_100, for the sums of its matrix instructions."""
TYPES = {
    torch.bool: "*i1",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
MEMORY = re.compile(r"\b(?:ld\.global|st\.global|cp\.async\.[bc]|atom\.|red\.)")
COUNTED = {
    "wgmma": "wgmma.mma_async",
    "tcgen05": "tcgen05.mma",
    "mma": "mma.sync",
    "cp_async": "cp.async.c",
    "tma": "cp.async.bulk.tensor",
    "waits": "griddepcontrol.wait",
}
"""Instructions whose number each line has."""
BARE_FP8 = re.compile(r"\.e4m3x2\.f32\s+[$%]")
"""Rounding to FP8 as Triton does it, not triton_kernels/e4m3.py, which says what is wrong with that."""


class Compiler:
    """Compiles what launchers launch, each kernel with the same arguments once.

    Args:
        known: what was compiled before, by `key_of`. Of that only a sample is compiled, unless `every`.
    """

    def __init__(
        self,
        name: str,
        stop_at_shared: bool = False,
        known: Mapping[str, Line] | None = None,
        every: bool = False,
    ) -> None:
        self.name = name
        self.stop_at_shared = stop_at_shared
        self.gpu = TARGETS[name].gpu
        self.lines: list[Line] = []
        self.by_key: dict[str, Line] = {}
        """What compiling said, now or before: shared memory, instructions, registers; no failures."""
        self.every = every
        self._known = known or {}
        self._seen: dict[str, Line] = {}

    def kernels_of(self, others: list[Launch]) -> set[str]:
        """The names of all kernels that these launches launch; compiles none."""
        found: set[str] = set()
        triton_kernels.gpu.ELSEWHERE = self.gpu

        def note(kernel: Any, *args: Any, **named: Any) -> Any:
            found.add(kernel.__name__)

        instead: Any = note  # of other parameters' names than Triton's own
        triton.runtime.jit.JITFunction.run = instead
        for launch in others:
            launch.call()
        return found

    def run(self, wanted: list[Launch]) -> list[dict[str, Any]]:
        """Compile all launches; returns a line for each kernel of each of them, and prints the new ones."""
        triton_kernels.gpu.ELSEWHERE = self.gpu
        for launch in wanted:
            triton.runtime.jit.JITFunction.run = self._instead_of(launch.name)
            launch.call()
        return self.lines

    def _instead_of(self, launch: str) -> Any:
        """What replaces JITFunction.run."""

        def run(
            kernel: Any,
            *args: Any,
            grid: Any,
            warmup: bool,
            num_warps: int = 4,
            num_stages: int = 3,
            maxnreg: int | None = None,
            **named: Any,
        ) -> None:
            bound = dict(zip(kernel.arg_names, args, strict=False)) | named
            if "EARLY" in kernel.arg_names:
                bound["EARLY"] = self.gpu.starts_early  # a meta tensor's launcher does not ask for it
            signature, constants, attributes = {}, {}, {}
            for index, parameter in enumerate(kernel.params):
                value = bound[parameter.name]
                signature[parameter.name] = _type_of(value, parameter)
                if parameter.is_constexpr:
                    constants[(index,)] = value
                elif _is_multiple_of_16(value, parameter):
                    attributes[(index,)] = [["tt.divisibility", 16]]
            options = {"num_warps": num_warps, "num_stages": num_stages}
            options |= {"maxnreg": maxnreg} if maxnreg else {}
            given = (signature, constants, attributes, options)
            key = key_of(kernel, self.name, self.stop_at_shared, *given)
            if key not in self._seen:
                source_type = GluonASTSource if kernel.is_gluon() else ASTSource
                source = source_type(kernel, signature, constants, attributes)
                line = {"target": self.name, "launch": launch, "kernel": kernel.__name__, **options}
                self._seen[key] = line | self._found(key, source, options)
                print(json.dumps(self._seen[key]), flush=True)
            self.lines.append(self._seen[key] | {"launch": launch})

        return run

    def _found(self, key: str, source: Any, options: dict[str, int]) -> Line:
        """What compiling says, or has said before."""
        before = self._known.get(key)
        if before is not None and not is_compiled_again(key) and not self.every:
            self.by_key[key] = before
            return before | self._beyond_the_gpu(before["shared_bytes"])
        found = self._compile(source, options)
        if "failed" not in found:
            lasting = {name: value for name, value in found.items() if name != "seconds"}
            if before is not None and lasting != before:
                found["failed"] = f"compiled to other than what is recorded of {key}: {before}"
            else:
                self.by_key[key] = lasting
        return found

    def _compile(self, source: Any, options: dict[str, int]) -> Line:
        major, minor = self.gpu.capability
        begin = time.perf_counter()
        try:
            compiled = triton.compile(source, GPUTarget("cuda", 10 * major + minor, 32), options)
        except Exception as error:  # whatever a compiler raises is a finding
            return {"failed": f"{type(error).__name__}: {error}"[:500]}
        # LLVM's text has the instructions that Triton writes itself, too.
        text = compiled.asm["llir" if self.stop_at_shared else "ptx"]
        line: dict[str, Any] = {"shared_bytes": compiled.metadata.shared}
        line |= {name: text.count(instruction) for name, instruction in COUNTED.items()}
        line["bare_fp8"] = len(BARE_FP8.findall(text))
        if not self.stop_at_shared:
            before, _, _ = text.partition(COUNTED["waits"])
            line["before_wait"] = len(MEMORY.findall(before))
            line["triggers_before_wait"] = "griddepcontrol.launch" in before
            line |= resources(compiled.asm["cubin"])
        line["seconds"] = round(time.perf_counter() - begin, 1)
        columns = getattr(compiled.metadata, "tmem_size", None) or 0
        if columns > TENSOR_MEMORY_COLUMNS:
            line["failed"] = f"takes {columns} of {TENSOR_MEMORY_COLUMNS} columns of tensor memory"
        return line | self._beyond_the_gpu(line["shared_bytes"])

    def _beyond_the_gpu(self, shared_bytes: int) -> Line:
        if shared_bytes <= self.gpu.shared_bytes:
            return {}
        return {"failed": f"takes {shared_bytes} of {self.gpu.shared_bytes} bytes of shared memory"}


def _leave_machine_code_out(*arguments: Any) -> tuple[str, str] | None:
    """Of Triton's stages, keep those up to the one that knows a kernel's shared memory.

    From Triton 3.8 on a call without arguments asks for a key of the hook, and its hash, for the cache.
    """
    if not arguments:
        return "up to the shared memory", "up to the shared memory"
    stages: dict[str, Any] = arguments[1]

    def unnamed(source: str, metadata: dict[str, Any]) -> str:
        metadata["name"] = ""
        return ""

    stages["ptx"] = unnamed
    stages["cubin"] = lambda source, metadata: b""
    return None


def _type_of(value: Any, parameter: Any) -> str:
    if parameter.is_constexpr:
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, TensorDescriptor):
        block = ", ".join(str(n) for n in value.block_shape)
        return f"tensordesc<{TYPES[value.base.dtype][1:]}[{block}]>"
    if isinstance(value, GluonTensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype][1:]}{value.block_shape},{value.layout!r}>"
    return "i32"


def _is_multiple_of_16(value: Any, parameter: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes of a kernel, read with the cuobjdump that Triton carries."""
    tool = Path(NVIDIA_BACKEND).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    return {"registers": int(found[1]), "stack_bytes": int(found[2])} if found else {}


def summary(compiled: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each kernel and target: its launches, and the most that one of them takes."""
    rows = []
    for name, lines in compiled.items():
        for kernel in sorted({line["kernel"] for line in lines}):
            own = [line for line in lines if line["kernel"] == kernel]
            whole = [line for line in own if "failed" not in line]
            rows.append(
                {
                    "kernel": kernel,
                    "target": name,
                    "compiled": len(whole),
                    "failed": len(own) - len(whole),
                    "shared_bytes": max((line["shared_bytes"] for line in whole), default=None),
                    "registers": max((line["registers"] for line in whole), default=None),
                    "stack_bytes": max((line["stack_bytes"] for line in whole), default=None),
                }
            )
    return rows


def with_rows_of_others(
    new: Tables, old: Mapping[str, Sequence[Mapping[str, Any]]], shared: set[str]
) -> Tables:
    """The new rows, and an older report's rows of kernels that were not compiled now.

    Args:
        shared: kernels of other launches, too; their older rows, if there are any, count all launches.
    """
    known = {row["kernel"] for row in old["kernels"]}
    mine = {row["kernel"] for name in ("kernels", "candidates") for row in new[name]} - (shared & known)
    target = {name: index for index, name in enumerate(TARGETS)}
    merged: Tables = {"targets": [dict(row) for row in old["targets"]]}
    for name in ("kernels", "candidates"):
        rows = [row for row in new[name] if row["kernel"] in mine]
        rows += [dict(row) for row in old[name] if row["kernel"] not in mine]
        merged[name] = sorted(rows, key=lambda row: (target[row["target"]], row["kernel"]))
    return merged


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="only launches with one of these in their names")
    parser.add_argument("--targets", default=",".join(TARGETS), help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--candidates", action="store_true", help="also all that tuning may try")
    parser.add_argument("--stop-at-shared", action="store_true", help="make no machine code; not with --out")
    parser.add_argument("--known", type=Path, help="leave out what this folder's records say, but a sample")
    parser.add_argument("--every", action="store_true", help="compile also what --known's records say")
    parser.add_argument("--record", action="store_true", help="write what was found into --known's folder")
    parser.add_argument("--out", type=Path, help="write a report here")
    args = parser.parse_args()
    if args.record and (args.known is None or args.names):
        parser.error("--record writes whole files into the folder of --known: name no launches")
    if args.stop_at_shared:
        if args.out is not None:
            parser.error("--out needs the machine code; leave --stop-at-shared away")
        # What has no machine code must not be found by others, nor whole kernels by this run.
        knobs.cache.dir = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, knobs.cache.dir, ignore_errors=True)
        os.environ["DISABLE_LLVM_OPT"] = "1"  # its results come after the shared memory is known
        # Triton declares this attribute without the type that it takes.
        setattr(knobs.runtime, "add_stages_inspection_hook", _leave_machine_code_out)  # noqa: B010
    unknown = set(args.targets.split(",")) - set(TARGETS)
    if unknown:
        parser.error(f"--targets: {', '.join(sorted(unknown))} unknown; there are {', '.join(TARGETS)}")
    defaults: dict[str, list[dict[str, Any]]] = {}
    candidates: dict[str, list[dict[str, Any]]] = {}
    shared: set[str] = set()
    for name in args.targets.split(","):
        records = None if args.known is None else args.known / f"{name}.jsonl"
        known = None if records is None else read_lines(records)
        compiler, gpu = Compiler(name, args.stop_at_shared, known, args.every), TARGETS[name].gpu
        every = (*launches(gpu), *quantized_launches(gpu))
        wanted = [one for one in every if one.every or gpu.has_wgmma]
        shared |= compiler.kernels_of([one for one in wanted if not _is_named(one, args.names)])
        defaults[name] = list(compiler.run([one for one in wanted if _is_named(one, args.names)]))
        if args.candidates:
            num_defaults = len(compiler.lines)
            compiler.run([one for one in candidate_launches(gpu) if _is_named(one, args.names)])
            candidates[name] = compiler.lines[num_defaults:]
        if args.record and records is not None:
            write_lines(records, compiler.by_key)
    lines = [line for found in (defaults, candidates) for own in found.values() for line in own]
    failed = [line for line in lines if "failed" in line]
    for line in failed:
        print(f"FAILED {line['target']} {line['launch']} {line['kernel']}: {line['failed']}", file=sys.stderr)
    if args.out is not None:
        boards = [
            {"target": name, "boards": target.boards, "shared_bytes": target.gpu.shared_bytes}
            for name, target in TARGETS.items()
            if name in defaults
        ]
        tables = {"targets": boards, "kernels": summary(defaults), "candidates": summary(candidates)}
        if args.names and args.out.exists():
            tables = with_rows_of_others(tables, read_report(args.out).tables, shared)
        rows = [row for name in ("kernels", "candidates") for row in tables[name]]
        metrics = {name: sum(row[name] for row in rows) for name in ("compiled", "failed")}
        write_report(args.out, make_report("compile_kernels", arguments={}, metrics=metrics, tables=tables))
    print(f"{len(lines) - len(failed)} compiled, {len(failed)} failed", file=sys.stderr)
    return 1 if failed or not lines else 0


def _is_named(launch: Launch, names: list[str]) -> bool:
    return not names or any(name in launch.name for name in names)


if __name__ == "__main__":
    sys.exit(main())
