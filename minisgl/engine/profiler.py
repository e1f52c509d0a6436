"""torch's profiler on demand: the next steps of a running engine, as a file that Perfetto opens.

Promise: files go into the folder that the operator named and nowhere else; what can't be done is refused
in words and stops nothing.
"""

import logging
import time
from pathlib import Path

import torch

from minisgl.errors import ConfigError
from minisgl.messages import MAX_PROFILED_STEPS

logger = logging.getLogger(__name__)


class StepProfiler:
    """Off until `start`.

    Args:
        folder: where traces go; None = there shall be none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._left = 0
        self._profile: torch.profiler.profile | None = None
        self._path = Path()

    def start(self, num_steps: int) -> Path:
        """Profile the next `num_steps` steps; the file that appears when they are over.

        Raises:
            ConfigError: there is no folder for it, one runs already, or the number is out of range.
        """
        if self._folder is None:
            raise ConfigError("profiling is off; start with --profile-dir FOLDER, where traces then go")
        if self._profile is not None:
            raise ConfigError(f"a profile of {self._left} more steps runs already; wait for its end")
        if not 1 <= num_steps <= MAX_PROFILED_STEPS:
            raise ConfigError(f"steps must be between 1 and {MAX_PROFILED_STEPS}, got {num_steps}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--profile-dir {self._folder} can't be used: {error.strerror}") from error
        self._path = self._folder / f"profile-{time.strftime('%Y%m%d-%H%M%S')}-{num_steps}-steps.json"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=activities)
        profile.start()
        self._profile, self._left = profile, num_steps
        return self._path

    def step_is_over(self) -> None:
        """Call after every step; the last one of a profile writes the file, which takes its time."""
        if self._profile is None:
            return
        self._left -= 1
        if self._left:
            return
        profile, self._profile = self._profile, None
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what was launched belongs to it
        profile.stop()
        try:
            profile.export_chrome_trace(str(self._path))
            logger.info("profile written: %s", self._path)
        except (OSError, RuntimeError) as error:
            logger.warning("the profile %s can't be written: %s", self._path, error)
