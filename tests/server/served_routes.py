"""The routes of a server, for tests that only read what the routes say of themselves."""

from types import SimpleNamespace
from typing import Any

from minisgl.server.admin import Admin
from minisgl.server.apis.models import ModelApi
from minisgl.server.apis.tokenize import TokenApi
from minisgl.server.app import all_routes
from minisgl.server.calls.completer import Completer
from minisgl.server.debug import Debug
from minisgl.server.engines.engines import Engines
from minisgl.server.http.routes import Route
from minisgl.server.processes.siblings import Siblings
from minisgl.server.reload.reloads import ReloadApi, Reloads
from minisgl.server.watch.routes import Watch

NOTHING: Any = None


def model(vocab_size: int, **defaults: float) -> Any:
    """A served model, as far as request bodies are read with it."""
    return SimpleNamespace(
        name="tiny",
        tokenizer=SimpleNamespace(vocab_size=vocab_size),
        template=SimpleNamespace(source=None),
        defaults=defaults,
        reply_format=None,
    )


def served_routes() -> list[Route]:
    """All routes; their handlers can't be called."""
    served: Any = SimpleNamespace(current=model(300))
    none = Siblings(NOTHING, NOTHING, NOTHING)
    return all_routes(
        Completer(served, NOTHING, NOTHING, NOTHING, 1.0, NOTHING),
        TokenApi(served, NOTHING, NOTHING, NOTHING),
        ModelApi(served, NOTHING),
        Admin(served, NOTHING, NOTHING, NOTHING, NOTHING),
        ReloadApi(served, none, NOTHING, Reloads()),
        Debug(NOTHING),
        Watch(served, NOTHING, Engines([]), none, NOTHING, 0),
    )
