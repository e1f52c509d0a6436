"""GET /v1/models: the model that is served, in OpenAI's format."""

from typing import Literal

import msgspec
from aiohttp import web
from msgspec import Struct

from minisgl.server.http.middleware import json_answer
from minisgl.server.http.routes import Answer, Route
from minisgl.server.model_in_use import ModelInUse
from minisgl.server.streams import Streams


class ModelCard(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """Where the server has the model from: a folder, a file or a hub's name."""
    max_model_len: int | None
    """null until the engine is ready."""


class ModelList(Struct, forbid_unknown_fields=True):
    object: Literal["list"]
    data: list[ModelCard]


class ModelApi:
    """The request handlers."""

    def __init__(self, model: ModelInUse, streams: Streams) -> None:
        self._model = model
        self._streams = streams

    def routes(self) -> list[Route]:
        """The routes of this API."""
        name = {
            "name": "model",
            "in": "path",
            "required": True,
            "schema": {"type": "string"},
            "example": self._model.current.name,
        }
        return [
            Route(
                "GET", "/v1/models", "The model that is served.", self.models, Answer("A list.", ModelList)
            ),
            Route(
                "GET",
                "/v1/models/{model}",
                "One model.",
                self.one_model,
                Answer("It.", ModelCard),
                None,
                (name,),
            ),
        ]

    async def models(self, _: web.Request) -> web.Response:
        """GET /v1/models."""
        return json_answer(msgspec.json.encode(ModelList("list", [self._card()])))

    async def one_model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        self._model.current.check_name(request.match_info["model"])
        return json_answer(msgspec.json.encode(self._card()))

    def _card(self) -> ModelCard:
        max_tokens = self._streams.max_context_tokens or None
        model = self._model.current
        return ModelCard(model.name, "model", model.created, "minisgl", model.root, max_tokens)
