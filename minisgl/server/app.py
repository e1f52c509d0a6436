"""The application: all routes of the server, and the document that describes them."""

import functools
from collections.abc import Sequence

import msgspec
from aiohttp import web

from minisgl.server.admin import Admin
from minisgl.server.apis import chat, completions, generate, messages, responses
from minisgl.server.apis.models import ModelApi
from minisgl.server.apis.not_served import add_refusals
from minisgl.server.apis.tokenize import TokenApi
from minisgl.server.calls.completer import Completer
from minisgl.server.debug import Debug
from minisgl.server.http.bodies import Body
from minisgl.server.http.errors import OPENAI
from minisgl.server.http.middleware import Gate, json_answer
from minisgl.server.http.openapi import openapi_document
from minisgl.server.http.routes import Answer, Route
from minisgl.server.model_in_use import ModelInUse
from minisgl.server.page import add_page
from minisgl.server.reload.reloads import ReloadApi
from minisgl.server.watch.routes import Watch
from minisgl.text.messages import UNSUPPORTED_IN_MESSAGES, Message

MESSAGE = Body("Message", (Message,), (), UNSUPPORTED_IN_MESSAGES)
"""One message of a conversation, which `text.messages` checks."""


def all_routes(
    completer: Completer,
    tokens: TokenApi,
    models: ModelApi,
    admin: Admin,
    reload: ReloadApi,
    debug: Debug,
    watch: Watch,
) -> list[Route]:
    """The routes of all APIs."""
    return [
        *chat.routes(completer),
        *completions.routes(completer),
        *responses.routes(completer),
        *messages.routes(completer),
        *generate.routes(completer),
        *tokens.routes(),
        *models.routes(),
        *admin.routes(),
        *reload.routes(),
        *debug.routes(),
        *watch.routes(),
    ]


def make_app(routes: Sequence[Route], model: ModelInUse, gate: Gate) -> web.Application:
    """The application with `routes` and GET /openapi.json."""

    async def send_document(_: web.Request) -> web.Response:
        return json_answer(document_of(model.current.name, model.current.tokenizer.vocab_size))

    @functools.lru_cache(maxsize=1)
    def document_of(name: str, vocab_size: int) -> bytes:
        return msgspec.json.encode(openapi_document(whole, name, vocab_size, [MESSAGE]))

    description = Route("GET", "/openapi.json", "This document.", send_document, Answer("It."))
    whole = [*routes, description]
    document_of(model.current.name, model.current.tokenizer.vocab_size)
    app = web.Application()
    gate.install(app, {route.path: route.errors for route in whole if route.errors is not OPENAI})
    for route in whole:
        route.add_to(app)
    add_page(app)
    add_refusals(app)
    return app
