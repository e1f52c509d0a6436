"""Paths of OpenAI's, Anthropic's and other engines' APIs that this server does not have.

Promise: a call to one of them is a 404 that says what to use instead. It is no 501, which clients retry.
"""

from aiohttp import web

from minisgl.errors import RequestError

GENERATES = "this server generates text, and can't {}"
STATELESS = "this server stores nothing; send the whole conversation in each call"
NOT_SERVED = {
    **dict.fromkeys(
        ("/v1/embeddings", "/embeddings", "/encode", "/v1/pooling", "/pooling"),
        GENERATES.format("embed it; use a server for embedding models"),
    ),
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/classify", "/v1/classify"),
        GENERATES.format("score or rank it; log probabilities of a text are in /v1/completions with echo"),
    ),
    "/v1/moderations": GENERATES.format("moderate it; use a chat with response_format json_schema"),
    "/v1/audio/{rest:.*}": GENERATES.format("hear or speak; use a server for speech models"),
    "/v1/images/{rest:.*}": GENERATES.format("make images; use a server for image models"),
    **dict.fromkeys(
        ("/v1/responses/{rest:.+}", "/v1/conversations", "/v1/conversations/{rest:.*}"), STATELESS
    ),
    **dict.fromkeys(
        ("/v1/files", "/v1/files/{rest:.*}", "/v1/batches", "/v1/batches/{rest:.*}", "/v1/messages/batches"),
        "this server has no files and batches; send many calls at once, and it runs them together",
    ),
}
"""A path -> what to do instead."""


def add_refusals(app: web.Application) -> None:
    """Answer calls to these paths. Add the routes that exist before."""
    for path, advice in NOT_SERVED.items():
        app.router.add_route("*", path, _refuse(advice))


def _refuse(advice: str):
    async def refuse(request: web.Request) -> web.StreamResponse:
        raise RequestError(404, "not_served", f"{request.path[:200]} is not served here: {advice}")

    return refuse
