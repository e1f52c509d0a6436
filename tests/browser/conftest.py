"""A browser, and servers with a scripted engine, for tests of the page. `make test-browser` runs them."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Playwright, expect, sync_playwright
from running_server import RunningServer
from tool_model import make_tool_model
from visitor import Start, Visitor

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
HERE = Path(__file__).parent
PATHS = [str(HERE), str(HERE.parent / "server")]
ENGINE = (
    f"import sys; sys.path[:0] = {PATHS}; from fake_engine import run_engine; "
    "from page_engine import ScriptedEngine; run_engine(ScriptedEngine)"
)
CONTEXT = 1 << 16
expect.set_options(timeout=15_000)


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as running:
        yield running


@pytest.fixture(scope="session")
def browser(playwright: Playwright) -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert path is not None, "there is no Chromium on this machine; install the package chromium"
    # As root, which containers run as, Chromium starts without its sandbox only.
    running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
    yield running
    running.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers: start(api_key=("secret",), port=...)."""
    running: list[RunningServer] = []
    folder = make_tool_model(tmp_path / "tiny", context=CONTEXT)

    def start_one(**server: Any) -> RunningServer:
        one = RunningServer(folder, [sys.executable, "-c", ENGINE], **server)
        running.append(one)
        return one.ready()

    yield start_one
    for one in running:
        one.__exit__()


@pytest.fixture
def visitor(browser: Browser) -> Iterator[Visitor]:
    context = browser.new_context(
        viewport={"width": 1280, "height": 800},
        accept_downloads=True,
        permissions=["clipboard-read", "clipboard-write"],
    )
    yield Visitor(context)
    context.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", help="the folder to write pictures of the page to")
