"""Recognises the CUDA errors after which a process can't use its GPU any more ("GPU faults").

CUDA's documentation says of these errors that the process must be terminated and started again. Other CUDA
errors, as too little memory, leave the context usable and are no faults.

Promise: nothing here calls CUDA or loads torch.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn, Protocol, TypeVar

from minisgl.errors import DEVICE_FAULT_EXIT_CODE, DeviceFaultError, MinisglError

Result = TypeVar("Result")


class Fault(NamedTuple):
    """One of CUDA's errors."""

    code: int
    """In `cudaError_t` and in `CUresult`, which number these errors alike."""
    text: str
    """A part of every message about it: CUDA's own description of the error."""
    meaning: str
    of_kernel: bool = True
    """A kernel of ours may be the cause; False = only hardware, driver or operator."""


FAULTS = (
    Fault(700, "an illegal memory access was encountered", "a kernel accessed memory that is not its own"),
    Fault(710, "device-side assert triggered", "a check inside a kernel failed"),
    Fault(719, "unspecified launch failure", "a kernel was ended by an exception on the GPU"),
    Fault(716, "misaligned address", "a kernel accessed a misaligned address"),
    Fault(715, "an illegal instruction was encountered", "a kernel had an instruction that the GPU lacks"),
    Fault(714, "hardware stack error", "a kernel's stack was corrupt or too large"),
    Fault(717, "operation not supported on global/shared address space", "a kernel mixed address spaces"),
    Fault(718, "invalid program counter", "a kernel left its own code"),
    Fault(721, "tensor memory not completely freed", "a kernel kept tensor memory"),
    Fault(702, "the launch timed out and was terminated", "a kernel took longer than the driver allows"),
    Fault(709, "context is destroyed", "the CUDA context was destroyed"),
    Fault(214, "uncorrectable ECC error encountered", "the GPU's memory lost data", False),
    Fault(220, "uncorrectable NVLink error", "the connection between GPUs lost data", False),
    Fault(226, "Invalid access of peer GPU memory over nvlink", "the GPU contained an error", False),
    Fault(46, "CUDA-capable device(s) is/are busy or unavailable", "the GPU is busy or lost", False),
    Fault(100, "no CUDA-capable device is detected", "the GPU is lost", False),
    Fault(810, "MPS client has been terminated", "the MPS server ended this process's use of the GPU", False),
    Fault(911, "external device", "a device that shares data with the GPU failed", False),
    Fault(999, "CUDA error: unknown error", "the driver failed, as it does when a GPU is lost", False),
)
"""The first whose code or text an error has counts."""

_OF_KERNEL = "if it happens again, please report it with the log and the request"
_OF_HARDWARE = "if it happens again, look for Xid in the kernel's log and at 'nvidia-smi -q'"


def device_fault_of(error: BaseException) -> DeviceFaultError | None:
    """The GPU fault behind an exception: the exception itself, or what caused it. None = no fault.

    Our own exceptions are never the fault, so another rank's is not found.
    """
    for each in _with_causes(error):
        if isinstance(each, MinisglError):
            continue
        code, text = getattr(each, "error_code", None), str(each)
        for fault in FAULTS:
            if code == fault.code or fault.text in text:
                advice = _OF_KERNEL if fault.of_kernel else _OF_HARDWARE
                return DeviceFaultError(
                    f"GPU fault: {fault.meaning} (CUDA error {fault.code}, {fault.text}). This process can't "
                    f"use the GPU any more; start it again, and {advice}"
                )
    return None


@contextlib.contextmanager
def name_device_faults() -> Iterator[None]:
    """Turn an exception behind which is a GPU fault into a `DeviceFaultError`. Usable as a decorator."""
    try:
        yield
    except Exception as error:
        fault = None if isinstance(error, DeviceFaultError) else device_fault_of(error)
        if fault is None:
            raise
        keep_for_ever(error)
        raise fault from error


class OtherRanks(Protocol):
    """The part of `FollowerLink` that this module uses."""

    def raise_if_lost(self) -> None: ...
    def cause_of(self, error: Exception, /) -> Exception: ...


class DeviceUse:
    """Lets an engine use its GPU until that has a fault.

    Args:
        others: the ranks whose loss explains an error of this one; None = there are none.
    """

    def __init__(self, others: OtherRanks | None) -> None:
        self._others = others
        self._fault: DeviceFaultError | None = None  # of this rank's GPU

    @property
    def has_failed(self) -> bool:
        """Whether nothing may call CUDA any more."""
        return self._fault is not None

    def run(self, work: Callable[[], Result]) -> Result:
        """Call `work`, and return its result. Its error is replaced by one of these, if one is behind it.

        Args:
            work: a function that refers to the engine, so that a fault keeps the whole engine.

        Raises:
            DeviceFaultError: this GPU, or another rank's, has a fault.
            ConfigError, EngineDeadError: another rank has ended.
        """
        if self._fault is not None:
            raise DeviceFaultError(str(self._fault))
        try:
            if self._others is not None:
                self._others.raise_if_lost()
            return work()
        except Exception as error:
            cause = self._note(error) or error
            if self._others is not None:
                cause = self._others.cause_of(cause)
            raise cause from (error if cause is not error else None)

    def finish(self, work: Callable[[], None]) -> None:
        """Call `work` at the end of the engine, whatever became of the other ranks; not after a fault.

        Raises:
            DeviceFaultError: this GPU has a fault.
        """
        if self._fault is not None:
            return
        try:
            work()
        except Exception as error:
            fault = self._note(error)
            if fault is None:
                raise
            raise fault from error

    def _note(self, error: Exception) -> DeviceFaultError | None:
        """Remember the fault behind `error`. Its traceback refers to `work`, which is kept with it."""
        self._fault = device_fault_of(error)
        if self._fault is not None:
            keep_for_ever(error)
        return self._fault


def keep_for_ever(*objects: object) -> None:
    """Let no object, and nothing that it refers to, be destroyed, not even when Python ends.

    For what uses a GPU that has failed. When page-locked memory is freed, torch records an event, and the
    error of that call ends the process by SIGABRT (seen with torch 2.11 on an H200).
    """
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def exit_after_device_fault() -> NoReturn:
    """End this process at once: destructors would call CUDA, which may hang, and aborts the process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()
    os._exit(DEVICE_FAULT_EXIT_CODE)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """The exception, then what it was raised from or while handling, down to the first one."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__
