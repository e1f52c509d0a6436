"""`minisgl top`: watch a server until the user leaves, in a terminal; or tell of it once, elsewhere."""

import queue
import sys

from rich.console import Console
from rich.live import Live

from minisgl.errors import ConfigError
from minisgl.top.client import Client, News
from minisgl.top.screen import draw
from minisgl.top.settings import TopSettings
from minisgl.top.state import State
from minisgl.top.terminal import Keyboard, is_terminal

MIN_INTERVAL_S = 0.1


def run_top(settings: TopSettings) -> None:
    """Show the server of `settings` until the user presses q.

    Without a terminal, what a screen would show is printed once, so that scripts can use it.

    Raises:
        ConfigError: a setting is wrong; the server refuses to be watched; without a terminal: it does not
            answer.
    """
    if not settings.url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must be that of a server, as http://127.0.0.1:8000, got {settings.url!r}")
    if not settings.interval_s >= MIN_INTERVAL_S:
        raise ConfigError(f"--interval-s must be at least {MIN_INTERVAL_S:g}, got {settings.interval_s:g}")
    settings = TopSettings(
        url=settings.url.rstrip("/"), api_key=settings.api_key, interval_s=settings.interval_s
    )
    console = Console()
    if is_terminal():
        _watch(settings, console)
    else:
        _print_once(settings, console)


def _watch(settings: TopSettings, console: Console) -> None:
    state = State()
    inbox: queue.SimpleQueue[News] = queue.SimpleQueue()
    with Keyboard(sys.stdin) as keyboard:

        def tell(news: News) -> None:
            inbox.put(news)
            keyboard.wake()

        client = Client(settings, tell)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            client.start()
            while True:
                live.update(draw(state, console.width, console.height), refresh=True)
                if not all(state.take(key) for key in keyboard.wait()):
                    break
                while not inbox.empty():
                    _apply(state, inbox.get())
                for one in state.aborts:
                    client.abort(one.number, one.id)
                state.aborts.clear()
        client.close()


def _apply(state: State, news: News) -> None:
    """Show what the client found.

    Raises:
        ConfigError: the server refuses to be watched.
    """
    if news.refusal is not None:
        raise news.refusal
    if news.done:
        state.message = news.done
    elif news.snapshot is not None:
        state.snapshot, state.problem = news.snapshot, ""
    else:
        state.problem = news.problem


def _print_once(settings: TopSettings, console: Console) -> None:
    inbox: queue.SimpleQueue[News] = queue.SimpleQueue()
    client = Client(settings, inbox.put)
    client.start()
    news = inbox.get()
    client.close()
    state = State()
    _apply(state, news)
    if state.snapshot is None:
        raise ConfigError(f"no server answers at {settings.url} ({state.problem}); see --url")
    console.print(draw(state, max(console.width, 80), 1000))
