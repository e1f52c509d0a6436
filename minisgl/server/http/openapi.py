"""The OpenAPI 3.1 document, generated from the tables that check the bodies.

Promise: the server accepts a body exactly if the document allows it, except for rules that JSON Schema can't
express: min_tokens is at most max_tokens; min_tokens and bad_words leave a token to generate; a bad word has
few tokens; prompt and choices fit the limits.
"""

from typing import Any

import msgspec

from minisgl import __version__
from minisgl.ipc.messages import ProfiledSteps
from minisgl.request import MAX_TOKEN_ID
from minisgl.server.answers import ChatAnswer, CompletionAnswer, ModelCard, ModelList
from minisgl.server.http.bodies import Body
from minisgl.server.http.schemas import (
    ABORT,
    DETOKENIZE,
    GENERATE,
    TOKENIZE,
    DetokenizeAnswer,
    ErrorAnswer,
    TokenizeAnswer,
)
from minisgl.server.openai_schema import CHAT, COMPLETION, PROMPT_FORMS
from minisgl.text.messages import UNSUPPORTED_IN_MESSAGES, Message, Messages

ANSWERS = (
    ChatAnswer, CompletionAnswer, ModelList, ModelCard, TokenizeAnswer, DetokenizeAnswer, ErrorAnswer,
)  # fmt: skip
BODIES = {
    "ChatBody": CHAT, "CompletionBody": COMPLETION, "TokenizeBody": TOKENIZE, "DetokenizeBody": DETOKENIZE,
    "AbortBody": ABORT, "GenerateBody": GENERATE, "Message": Body((Message,), (), UNSUPPORTED_IN_MESSAGES),
}  # fmt: skip
JSON = "application/json"
EVENTS = "text/event-stream"
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}}
TEMPLATE = "#/components/schemas/{name}"
GETS = {
    "/health": "200 while the engine is ready and alive, else 503.",
    "/health/ready": "200 when a request would be taken now and the engine answers, else 503.",
    "/version": "minisgl's version.",
    "/server_info": "Settings, and what is held and was counted.",
    "/load": "How busy the server is.",
    "/debug/timeline": "The engine's last steps in Chrome's trace format.",
    "/openapi.json": "This document.",
}


def openapi_document(model: str, vocab_size: int) -> dict[str, Any]:
    """The document. `model`: the name that calls may give; `vocab_size`: bound on token ids."""
    schemas = _schemas(model, vocab_size)
    ref = {name: {"$ref": TEMPLATE.format(name=name)} for name in schemas}
    error = _answer("Why the call was refused or failed.", JSON, ref["ErrorAnswer"])

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

    def reply(whole: dict[str, Any]) -> dict[str, Any]:
        answer = _answer("The answer, or its events when stream is true.", JSON, whole)
        answer["content"][EVENTS] = {"schema": EVENT}
        return answer

    any_object = {"type": "object"}
    done = _answer("What was done.", JSON, any_object)
    card = get("One model.", _answer("The model.", JSON, ref["ModelCard"]))
    card["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}, "example": model}
    ]
    paths = {
        "/v1/chat/completions": post("Continue a conversation.", ref["ChatBody"], reply(ref["ChatAnswer"])),
        "/v1/completions": post("Continue a text.", ref["CompletionBody"], reply(ref["CompletionAnswer"])),
        "/tokenize": post(
            "Token ids of a text or a conversation.",
            ref["TokenizeBody"],
            _answer("The ids.", JSON, ref["TokenizeAnswer"]),
        ),
        "/detokenize": post(
            "The text of token ids.",
            ref["DetokenizeBody"],
            _answer("The text.", JSON, ref["DetokenizeAnswer"]),
        ),
        "/generate": post(
            "Continue a text, greedily, as a stream of text.",
            ref["GenerateBody"],
            _answer("One event for each new piece of text, then [DONE].", EVENTS, EVENT),
        ),
        "/abort": post("End open calls.", ref["AbortBody"], done),
        "/flush_cache": {
            "post": {"summary": "Drop the prefix cache.", "responses": {"200": done, "default": error}}
        },
        "/debug/profile": {
            "post": {
                "summary": "Have torch's profiler watch the next steps.",
                "parameters": [
                    {
                        "name": "steps",
                        "in": "query",
                        "schema": msgspec.json.schema(ProfiledSteps) | {"default": 20},
                    }
                ],
                "responses": {"200": done, "default": error},
            }
        },
        **{path: get(summary, _answer("It.", JSON, any_object)) for path, summary in GETS.items()},
        "/v1/models": get("The model that is served.", _answer("It.", JSON, ref["ModelList"])),
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


def _schemas(model: str, vocab_size: int) -> dict[str, Any]:
    """All schemas by name."""
    kinds = [kind for body in BODIES.values() for kind in body.structs]
    refs, components = msgspec.json.schema_components(
        [Messages, *PROMPT_FORMS, *kinds, *ANSWERS], ref_template=TEMPLATE
    )
    messages, *prompts = refs[: 1 + len(PROMPT_FORMS)]
    made = {name: _body(body, components) for name, body in BODIES.items()}
    read = {kind.__name__ for kind in kinds}
    made |= {name: schema for name, schema in components.items() if name not in read}
    for name in ("ChatBody", "TokenizeBody"):
        properties = made[name]["properties"]
        is_optional = "messages" not in made[name]["required"]
        properties["messages"] = {"anyOf": [messages, {"type": "null"}]} if is_optional else messages
    made["CompletionBody"]["properties"]["prompt"] = {"anyOf": prompts}
    for name in BODIES:
        if "model" in made[name]["properties"]:
            made[name]["properties"]["model"] = {"enum": [model, None], "default": None}
    for schema in made.values():
        _limit_token_ids(schema, vocab_size)
    return made


def _body(body: Body, components: dict[str, Any]) -> dict[str, Any]:
    """The schema of a body with all its fields."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    for kind in body.structs:
        properties |= components[kind.__name__]["properties"]
        required += components[kind.__name__]["required"]
    for name, neutral in body.unsupported.items():
        properties[name] = {} if neutral is None else {"enum": [*neutral, None]}
    schema = {
        "type": "object",
        "description": body.structs[0].__doc__,
        "properties": properties,
        "required": required,
        "additionalProperties": {"type": "null"},
    }
    if body.conditions:
        schema["allOf"] = [condition.as_schema() for condition in body.conditions]
    return schema


def _limit_token_ids(schema: Any, vocab_size: int) -> None:
    """Bound all token ids in `schema`, in place, to the model's vocabulary."""
    if isinstance(schema, list):
        for item in schema:
            _limit_token_ids(item, vocab_size)
    elif isinstance(schema, dict):
        if schema.get("title") == "Token id":
            if "pattern" in schema:
                schema["pattern"] = f"^({_numbers_up_to(vocab_size - 1)})$"
            elif schema["maximum"] == MAX_TOKEN_ID:
                schema["maximum"] = vocab_size - 1
        for item in schema.values():
            _limit_token_ids(item, vocab_size)


def _numbers_up_to(most: int) -> str:
    """A regular expression for the decimal numbers 0 to `most`, without leading zeros."""
    digits = str(most)
    forms = ["0", *(f"[1-9][0-9]{{{count}}}" for count in range(len(digits) - 1))]
    for place, digit in enumerate(digits):
        # Equal digits before this place, a smaller digit here, any digits after it.
        least = 1 if place == 0 else 0
        if int(digit) > least:
            rest = len(digits) - place - 1
            forms.append(f"{digits[:place]}[{least}-{int(digit) - 1}][0-9]{{{rest}}}")
    return "|".join([*forms, digits])


def _answer(description: str, kind: str, schema: Any) -> dict[str, Any]:
    return {"description": description, "content": {kind: {"schema": schema}}}
