"""Settings every test runs under."""

import gc
import logging
import os
import shutil
import signal
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

# Tests share few cores with the servers they start: threads that wait must not spin. Before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:
    # One core for each worker: threads of several that meet at OpenMP's barriers wait for each other's.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

HAS_GPU = shutil.which("nvidia-smi") is not None

if not HAS_GPU:
    # Without a GPU the kernels run in Triton's interpreter. It must be chosen before the first import of a
    # kernel, which may come from any test file, so it is chosen here; the engine's own CPU path runs the
    # kernels' references and does not notice.
    os.environ.setdefault("TRITON_INTERPRET", "1")

    from faster_interpreter import make_interpreter_faster  # after the choice

    make_interpreter_faster()

# A shell that starts the tests in the background has SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "minisgl", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("minisgl")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many workers `-n auto` means: few, as every one starts servers; on a GPU one, for its memory.

    One more than processors, because tests of servers wait for a third of their time.
    """
    return 1 if HAS_GPU else min(4, len(os.sched_getaffinity(0)) + 1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-rounds", type=int, default=3, help="rounds of the engine fuzz test")
    parser.addoption("--all-pairs", action="store_true", help="every two features together, not a sample")
    parser.addoption("--all-families", action="store_true", help="every variant of a family, not a sample")
    parser.addoption("--all-kernels", action="store_true", help="compile every kernel, not what changed")
    parser.addoption("--record-kernels", action="store_true", help="record what kernels compile to")
    parser.addoption("--ray", action="store_true", help="also what needs a real Ray (make test-ray)")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests, and all that they import, stay: the garbage collector need not look at them again.

    With it at work tests of engines took twice as long, because each engine that ends has garbage collected.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


_unfreeze = gc.unfreeze
_unfrozen: list[bool] = []


def _noted_unfreeze() -> None:
    _unfrozen.append(True)
    _unfreeze()


gc.unfreeze = _noted_unfreeze


def pytest_runtest_teardown() -> None:
    """After a test that let all objects go, which is noted, as counting them takes 40 ms."""
    if _unfrozen:
        _unfrozen.clear()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _loggers_as_before_the_module() -> Iterator[None]:
    """A command that a fixture of a module runs in this process sets up logging, too."""
    yield from _restored_loggers()


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    """A command that a test runs in this process sets up logging, which would hide later messages from
    `caplog`."""
    yield from _restored_loggers()


def _restored_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("minisgl", "triton_kernels")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(scope="session")
def fuzz_rounds(request: pytest.FixtureRequest) -> int:
    return request.config.option.fuzz_rounds


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What fuzz tests met, also in a run that passes."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "fuzz":
                terminalreporter.write_line(f"fuzz: {report.nodeid}: {value}")
