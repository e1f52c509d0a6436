"""What happens to every HTTP call before and after its handler: identity, keys, origins, errors, the log.

Promise: every exception becomes OpenAI's error object; every answer carries its request id, is counted, and
is logged once when that is wanted.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from aiohttp import web

from minisgl.errors import MinisglError, RequestError
from minisgl.server.replies import RETRY_AFTER_S, RETRYABLE, error_body, error_of
from minisgl.server.uploads import BODY_TOO_LARGE

log = logging.getLogger(__name__)
access_log = logging.getLogger("minisgl.access")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
FACTS = "facts"
OPEN_TO_ALL = frozenset({"/health", "/health/ready", "/metrics"})
"""Need no key: load balancers and monitors ask them, and they say nothing about anybody's text."""
GOOD_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}")
CLIENT_LEFT = 499
"""What nginx logs for a client that did not wait for its answer."""
PREFLIGHT_S = "86400"


class CallFacts:
    """What is known of one HTTP call; its handler fills in the tokens."""

    __slots__ = ("arrived_at", "first_token_s", "num_output_tokens", "num_prompt_tokens", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.arrived_at = time.monotonic()
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.first_token_s: float | None = None


def facts_of(request: web.Request) -> CallFacts:
    """The call's facts."""
    return request[FACTS]


class Gate:
    """The middlewares and what they are set to.

    Args:
        api_keys: one of them must come as `Authorization: Bearer`; none = no key is needed.
        cors_origins: web pages from these origins may call; "*" = any.
        write_log: log every call as a line of JSON.
        responses: counts answers by "METHOD route status".
    """

    def __init__(
        self,
        api_keys: Sequence[str] = (),
        cors_origins: Sequence[str] = (),
        write_log: bool = False,
        responses: dict[str, int] | None = None,
    ) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._origins = frozenset(cors_origins)
        self._write_log = write_log
        self._responses = {} if responses is None else responses

    def install(self, app: web.Application) -> None:
        """Put them around all routes of `app`."""
        app.middlewares.extend([self._watch, self._check])
        app.on_response_prepare.append(self._add_headers)

    @web.middleware
    async def _watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Outermost: an id, an answer whatever happens, a count and a line."""
        given = request.headers.get("X-Request-Id", "")
        facts = CallFacts(given if GOOD_ID.fullmatch(given) else uuid.uuid4().hex)
        request[FACTS] = facts
        try:
            response = await _answered(request, handler)
        except asyncio.CancelledError:
            self._note(request, facts, CLIENT_LEFT)
            raise
        self._note(request, facts, response.status)
        return response

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """A browser's question, then the page that it shows, then the key."""
        if self._origins and request.method == "OPTIONS" and "Origin" in request.headers:
            return web.Response(status=204)
        if request.method == "POST" and self._is_foreign_page(request):
            raise RequestError(
                403, "origin_not_allowed", "web pages from other origins may not call; see --cors-origin"
            )
        if self._digests and request.path not in OPEN_TO_ALL and not self._has_key(request):
            raise RequestError(
                401, "invalid_api_key", "send one of the server's API keys as 'Authorization: Bearer KEY'"
            )
        return await handler(request)

    def _is_foreign_page(self, request: web.Request) -> bool:
        """A browser sends what looks like a form without asking, and hides only the answer from the page."""
        is_foreign = request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site")
        return is_foreign and not self._allows(request.headers.get("Origin"))

    def _allows(self, origin: str | None) -> bool:
        return origin is not None and ("*" in self._origins or origin in self._origins)

    def _has_key(self, request: web.Request) -> bool:
        """Compares with every key, in the same time wherever they differ."""
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return kind.lower() == "bearer" and any(matches)

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        facts = request.get(FACTS)
        if facts is None:  # refused before there was a call
            return
        response.headers["X-Request-Id"] = facts.request_id
        origin = request.headers.get("Origin")
        if not self._origins:
            return
        response.headers["Vary"] = "Origin"
        if origin is None or not self._allows(origin):
            return
        response.headers["Access-Control-Allow-Origin"] = "*" if "*" in self._origins else origin
        response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
        if request.method == "OPTIONS":
            response.headers["Access-Control-Allow-Methods"] = "GET, POST"
            asked = request.headers.get("Access-Control-Request-Headers", "")
            response.headers["Access-Control-Allow-Headers"] = asked or "Authorization, Content-Type"
            response.headers["Access-Control-Max-Age"] = PREFLIGHT_S

    def _note(self, request: web.Request, facts: CallFacts, status: int) -> None:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "other"
        key = f"{request.method if route != 'other' else '-'} {route} {status}"
        self._responses[key] = self._responses.get(key, 0) + 1
        if not self._write_log:
            return
        line = {
            "time": round(time.time(), 3),
            "request_id": facts.request_id,
            "client": request.remote,
            "method": request.method,
            "path": request.path,
            "status": status,
            "duration_s": round(time.monotonic() - facts.arrived_at, 4),
            "first_token_s": facts.first_token_s and round(facts.first_token_s, 4),
            "prompt_tokens": facts.num_prompt_tokens,
            "output_tokens": facts.num_output_tokens,
        }
        access_log.info("%s", msgspec.json.encode(line).decode())


def start_access_log() -> None:
    """Send the access log to stderr, each call a line that is JSON and nothing else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access_log.handlers[:] = [handler]
    access_log.setLevel(logging.INFO)
    access_log.propagate = False


def json_answer(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """An answer whose body is JSON."""
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every exception as OpenAI's error object."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        known = {
            404: ("not_found", f"there is no {request.path[:200]}"),
            405: ("method_not_allowed", f"{request.path[:200]} does not take {request.method}"),
            413: ("body_too_large", BODY_TOO_LARGE),
        }
        code, message = known.get(error.status, (None, error.reason))
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return json_answer(error_body(error.status, code, message), error.status, allow)
    except (web.RequestPayloadError, ConnectionError) as error:  # the latter: the client left meanwhile
        words = " ".join(str(error).split())
        return json_answer(error_body(400, "invalid_body", f"the body can't be read: {words}"), 400)
    except Exception as error:
        if not isinstance(error, MinisglError):
            log.exception("%s %s failed in the server", request.method, request.path)
        status, body = error_of(error)
        return json_answer(body, status, _headers_of(error, status))


def _headers_of(error: Exception, status: int) -> dict[str, str]:
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if status == 409:  # OpenAI's clients would send a call that was aborted again
        return {"X-Should-Retry": "false"}
    if status not in RETRYABLE:
        return {}
    known = error.retry_after_s if isinstance(error, RequestError) else None
    return {"Retry-After": str(RETRY_AFTER_S if known is None else known)}
