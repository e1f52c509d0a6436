"""The API described as OpenAPI 3.1, generated from the structs that read the bodies.

Promise: a field that a body may have is in the document, and the other way round.
"""

from typing import Any

import msgspec

from minisgl import __version__
from minisgl.server.openai_schema import ChatFields, CompletionFields, SharedFields
from minisgl.server.schemas import (
    AbortBody,
    DetokenizeAnswer,
    DetokenizeBody,
    ErrorAnswer,
    GenerateBody,
    TokenizeAnswer,
    TokenizeBody,
)

BODIES = (
    SharedFields, ChatFields, CompletionFields, TokenizeBody, TokenizeAnswer, DetokenizeBody,
    DetokenizeAnswer, AbortBody, GenerateBody, ErrorAnswer,
)  # fmt: skip
JSON = "application/json"
EVENTS = "text/event-stream"
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}}
GETS = {
    "/v1/models": "The model that is served.",
    "/health": "200 while the engine is ready and alive, else 503.",
    "/health/ready": "200 when a request would be taken now and the engine answers, else 503.",
    "/version": "minisgl's version.",
    "/server_info": "Settings, and what is held and was counted.",
    "/load": "How busy the server is.",
    "/debug/timeline": "The engine's last steps in Chrome's trace format.",
    "/openapi.json": "This document.",
}


def openapi_document(model: str) -> dict[str, Any]:
    """The document; `model` is the name that calls may give."""
    (refs, schemas) = msgspec.json.schema_components(BODIES, ref_template="#/components/schemas/{name}")
    ref = dict(zip(BODIES, refs, strict=True))
    error = _answer("Why the call was refused or failed.", JSON, ref[ErrorAnswer])

    def post(summary: str, body: Any, answer: dict[str, Any]) -> dict[str, Any]:
        content = {JSON: {"schema": body}}
        return {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": content},
                "responses": {"200": answer, "default": error},
            }
        }

    def get(summary: str, answer: dict[str, Any]) -> dict[str, Any]:
        return {"get": {"summary": summary, "responses": {"200": answer, "default": error}}}

    any_object = {"type": "object"}
    reply = _answer("The answer, or its events when stream is true.", JSON, any_object)
    reply["content"][EVENTS] = {"schema": EVENT}
    done = _answer("What was done.", JSON, any_object)
    card = get("One model.", _answer("The model.", JSON, any_object))
    card["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}, "example": model}
    ]
    paths = {
        "/v1/chat/completions": post(
            "Continue a conversation.", {"allOf": [ref[ChatFields], ref[SharedFields]]}, reply
        ),
        "/v1/completions": post(
            "Continue a text.", {"allOf": [ref[CompletionFields], ref[SharedFields]]}, reply
        ),
        "/tokenize": post(
            "Token ids of a text or a conversation.",
            ref[TokenizeBody],
            _answer("The ids.", JSON, ref[TokenizeAnswer]),
        ),
        "/detokenize": post(
            "The text of token ids.", ref[DetokenizeBody], _answer("The text.", JSON, ref[DetokenizeAnswer])
        ),
        "/generate": post(
            "Continue a text, greedily, as a stream of text.",
            ref[GenerateBody],
            _answer("One event for each new piece of text, then [DONE].", EVENTS, EVENT),
        ),
        "/abort": post("End open calls.", ref[AbortBody], done),
        "/flush_cache": {
            "post": {"summary": "Drop the prefix cache.", "responses": {"200": done, "default": error}}
        },
        "/debug/profile": {
            "post": {
                "summary": "Have torch's profiler watch the next steps.",
                "parameters": [
                    {"name": "steps", "in": "query", "schema": {"type": "integer", "default": 20}}
                ],
                "responses": {"200": done, "default": error},
            }
        },
        **{path: get(summary, _answer("It.", JSON, any_object)) for path, summary in GETS.items()},
        "/v1/models/{model}": card,
        "/metrics": get("Figures for Prometheus.", _answer("It.", "text/plain", {"type": "string"})),
    }
    for path in ("/health", "/health/ready"):
        paths[path]["get"]["responses"]["503"] = _answer("Why not.", JSON, any_object)
    return {
        "openapi": "3.1.0",
        "info": {"title": "minisgl", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _answer(description: str, kind: str, schema: Any) -> dict[str, Any]:
    return {"description": description, "content": {kind: {"schema": schema}}}
