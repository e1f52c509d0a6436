"""The OpenAPI 3.1 document, generated from the routes and from the bodies that check what comes in.

Promise: the server accepts a body exactly if the document allows it, except for rules that JSON Schema can't
express: min_tokens is at most max_tokens; min_tokens and bad_words leave a token to generate; a bad word has
few tokens; prompt and choices fit the limits.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from minisgl import __version__
from minisgl.request import MAX_TOKEN_ID
from minisgl.server.http.bodies import Body, documented_types
from minisgl.server.http.routes import EVENTS, JSON, TEXT, Answer, Route

TEMPLATE = "#/components/schemas/{name}"
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}}
ERROR = "Why the call was refused or failed."


def openapi_document(
    routes: Sequence[Route], model: str, vocab_size: int, parts: Sequence[Body] = ()
) -> dict[str, Any]:
    """The document of `routes`.

    Args:
        model: the name that calls may give.
        vocab_size: bound on token ids.
        parts: bodies that only occur inside of others, such as one message of a conversation.
    """
    bodies = {body.name: body for body in [*(route.body for route in routes if route.body), *parts]}
    kinds = {route.answer.kind for route in routes if route.answer.kind}
    kinds |= {route.errors.kind for route in routes}
    schemas = _schemas(list(bodies.values()), sorted(kinds, key=lambda kind: kind.__name__))
    for name in bodies:
        if "model" in schemas[name]["properties"]:
            schemas[name]["properties"]["model"] = {"enum": [model, None], "default": None}
    for schema in schemas.values():
        _limit_token_ids(schema, vocab_size)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "minisgl", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(route: Route) -> dict[str, Any]:
    """OpenAPI's operation object of a route."""
    operation: dict[str, Any] = {"summary": route.summary}
    if route.parameters:
        operation["parameters"] = list(route.parameters)
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": _ref(route.body.name)}}}
    operation["responses"] = {
        "200": _response(route.answer),
        "default": _response(Answer(ERROR, route.errors.kind)),
    }
    if route.has_503:
        operation["responses"]["503"] = _response(route.answer)
    return operation


def _response(answer: Answer) -> dict[str, Any]:
    """OpenAPI's response object of an answer."""
    whole: dict[str, Any] = {"type": "object"} if answer.kind is None else _ref(answer.kind.__name__)
    schemas = {
        JSON: {"anyOf": [whole, {"type": "array", "items": whole}]} if answer.or_list else whole,
        EVENTS: EVENT,
        TEXT: {"type": "string"},
    }
    content = {media_type: {"schema": schemas[media_type]} for media_type in answer.media_types}
    return {"description": answer.description, "content": content}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": TEMPLATE.format(name=name)}


def _schemas(bodies: Sequence[Body], answers: Sequence[type[Any]]) -> dict[str, Any]:
    """All schemas by name: bodies, answers, and the structs inside of them."""
    structs = [kind for body in bodies for kind in body.structs]
    documented = {(kind, name): types for kind in structs for name, types in documented_types(kind)}
    inner = [one for types in documented.values() for one in types]
    refs, components = msgspec.json.schema_components([*inner, *structs, *answers], ref_template=TEMPLATE)
    found = iter(refs)
    for (kind, name), types in documented.items():
        schema = components[kind.__name__]
        forms = [next(found) for _ in types]
        forms += [] if name in schema["required"] else [{"type": "null"}]
        schema["properties"][name] = {"anyOf": forms} if len(forms) > 1 else forms[0]
    made = {body.name: _body_schema(body, components) for body in bodies}
    read = {kind.__name__ for kind in structs}
    return made | {name: schema for name, schema in components.items() if name not in read}


def _body_schema(body: Body, components: dict[str, Any]) -> dict[str, Any]:
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
