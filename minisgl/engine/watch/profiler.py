"""Runs torch's profiler over the next steps of a running engine. Perfetto opens the resulting file.

Promise: files are written only to the folder that the operator named. A request that can't be served raises
an error that says why. The engine pauses after each part of a profile, while torch collects and writes its
events: for about `PAUSE_S`, or for the events of one step if they take longer. Where steps become larger than
those before, a pause may be longer once.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from minisgl.errors import ConfigError
from minisgl.ipc.questions import MAX_PROFILED_STEPS

logger = logging.getLogger(__name__)

PAUSE_S = 0.05
"""The pause after a part that the number of its steps aims at. On a CPU, torch takes about 5 us to collect an
event and 3 us to write it, and holds Python's lock in both, so a thread would not avoid the pause. A forked
child could only do the writing, and copying the page tables of an engine's process takes as long."""
MAX_PART_STEPS = 10
"""The most steps of a part. Longer parts show more steps whose overlap no pause has disturbed."""
CLOSE_S = 5.0
"""How long `close` waits for a thread that joins traces."""


class StepProfiler:
    """Profiles steps on request. It is off until `start`.

    Args:
        folder: the folder for traces; None = profiling is refused.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._left = 0  # steps still to be profiled
        self._part_steps = 1  # of the part that runs
        self._left_in_part = 0
        self._profile: torch.profiler.profile | None = None
        self._path = Path()
        self._parts: list[Path] = []  # written so far
        self._joining: threading.Thread | None = None

    def start(self, num_steps: int) -> Path:
        """Profile the next `num_steps` steps. Returns the file, which appears soon after the last step.

        Raises:
            ConfigError: there is no usable folder, a profile already runs, the number is out of range, or
                torch's profiler can't begin.
        """
        if self._folder is None:
            raise ConfigError("profiling is off; start with --profile-dir FOLDER, where traces then go")
        if self._profile is not None:
            raise ConfigError(f"a profile of {self._left} more steps runs already; wait for its end")
        if self._joining is not None and self._joining.is_alive():
            raise ConfigError(f"{self._path} is still being written; wait for its end")
        if not 1 <= num_steps <= MAX_PROFILED_STEPS:
            raise ConfigError(f"steps must be between 1 and {MAX_PROFILED_STEPS}, got {num_steps}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--profile-dir {self._folder} can't be used: {error.strerror}") from error
        self._path = self._folder / f"profile-{time.strftime('%Y%m%d-%H%M%S')}-{num_steps}-steps.json"
        self._parts = []
        self._left = num_steps
        try:
            self._begin_part(1)
        except RuntimeError as error:
            raise ConfigError(f"torch's profiler can't begin: {error}") from error
        return self._path

    def count_step(self) -> None:
        """Call it after every step. After the last step of a part, it writes the part, which takes time."""
        if self._profile is None:
            return
        self._left -= 1
        self._left_in_part -= 1
        if self._left_in_part:
            return
        try:
            pause_s = self._end_part()
            if self._left:
                self._begin_part(steps_of_next_part(self._part_steps, pause_s))
                return
        except (OSError, RuntimeError) as error:
            self._left = 0
            logger.warning("the profile %s can't be written: %s", self._path, error)
            _delete(self._parts)
            return
        self._joining = threading.Thread(
            target=join_traces, args=(self._parts, self._path), name="join-traces", daemon=True
        )
        self._joining.start()

    @property
    def is_running(self) -> bool:
        """Whether the next step is profiled."""
        return self._profile is not None

    def close(self) -> None:
        """Drop an incomplete profile. Wait up to `CLOSE_S` for a complete one to be joined."""
        if self._profile is not None:
            profile, self._profile = self._profile, None
            profile.stop()
            _delete(self._parts)
        if self._joining is not None:
            self._joining.join(CLOSE_S)

    def _begin_part(self, num_steps: int) -> None:
        """Begin the next part, which has `num_steps` steps, or those that are left.

        Raises:
            RuntimeError: torch's profiler can't begin.
        """
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=activities)
        profile.start()
        self._profile = profile
        self._part_steps = self._left_in_part = min(num_steps, self._left)

    def _end_part(self) -> float:
        """Collect and write the events of the steps since `_begin_part`. Returns the seconds that torch took.

        Raises:
            OSError, RuntimeError: the file can't be written.
        """
        profile, self._profile = self._profile, None
        assert profile is not None, "no part has begun"
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # launched steps belong to the profile
        begin_s = time.perf_counter()
        profile.stop()
        part = self._path.with_suffix(f".part-{len(self._parts) + 1}")
        self._parts.append(part)
        profile.export_chrome_trace(str(part))
        return time.perf_counter() - begin_s


def steps_of_next_part(num_steps: int, pause_s: float) -> int:
    """The steps of the part after one of `num_steps` steps, for which the engine paused `pause_s`.

    A part has at most twice the steps of the one before, because the next steps may be larger.
    """
    fitting = num_steps * PAUSE_S / max(pause_s, 1e-9)
    return max(1, int(min(fitting, 2 * num_steps, MAX_PART_STEPS)))


def join_traces(parts: Sequence[Path], path: Path) -> None:
    """Join traces that torch wrote into one file, delete them, and log the result.

    It copies bytes without parsing them, so a thread can do it without holding Python's lock for long.
    """
    joining = path.with_suffix(".joining")
    last = len(parts) - 1
    try:
        with joining.open("wb") as out:
            for number, part in enumerate(parts):
                data = part.read_bytes()
                begin, end = _events_of(data)
                out.write(b"," if number else data[:begin])
                out.write(memoryview(data)[begin : end if number < last else len(data)])
        os.replace(joining, path)
    except (OSError, ValueError) as error:  # ValueError: not the format of torch's traces
        joining.unlink(missing_ok=True)
        logger.warning("the profile %s can't be joined, its parts stay: %s", path, error)
        return
    _delete(parts)
    logger.info("profile written: %s", path)


def _events_of(trace: bytes) -> tuple[int, int]:
    """The begin and end of the events in torch's trace: {..., "traceEvents": [...], "traceName": ...}.

    Raises:
        ValueError: the bytes are not such a trace.
    """
    begin = trace.index(b"[", trace.index(b'"traceEvents"')) + 1
    return begin, trace.rindex(b"]", begin, trace.rindex(b'"traceName"'))


def _delete(parts: Sequence[Path]) -> None:
    for part in parts:
        part.unlink(missing_ok=True)
