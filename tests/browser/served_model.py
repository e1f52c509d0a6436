"""`minisgl serve` with the built-in model on this machine's CPU."""

import subprocess
import sys

LIMIT_S = 60.0


class Served:
    """The command as a user starts it, on a free port. A context manager that leaves nothing running."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minisgl", "serve", "--port", "0", "--device", "cpu", *flags],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = ""

    def __enter__(self) -> "Served":
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("curl "):
                self.url = line.split("/v1/")[0].removeprefix("curl ")
                return self
        raise AssertionError(f"the server ended with exit code {self.process.wait(LIMIT_S)}")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(LIMIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
