"""Middleware around every handler: request ids, API keys, Host and Origin checks, errors, the access log.

Promise: every exception becomes an error object: that of the path's API, or else OpenAI's. Every answer has a
request id, is counted, and with --access-log is logged once, except for what is no HTTP (`listener.py`).
"""

import asyncio
import hashlib
import hmac
import logging
import re
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from io import BytesIO
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from aiohttp import web

from minisgl.errors import MinisglError, RequestError
from minisgl.server.http.callers import ANY, check_host, check_origin, is_allowed_origin
from minisgl.server.http.errors import OPENAI, ErrorFormat, Fault, fault_of
from minisgl.server.keys.limits import HEADER_NAMES
from minisgl.server.keys.users import User, Users

log = logging.getLogger(__name__)
access_log = logging.getLogger("minisgl.access")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
FACTS = "facts"
OPEN_TO_ALL = frozenset({"/health", "/health/ready", "/metrics"})
"""Paths that need no key and accept every Host. Load balancers and monitors call them, and their answers
reveal nothing about anyone's text."""
GOOD_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}")
RETRYABLE = (429, 503)
"""Statuses with a Retry-After header."""
RETRY_AFTER_S = 2
"""Retry-After where an error does not say better."""
CLIENT_LEFT = 499
"""The status that nginx logs for a client that disconnects before its answer."""
PREFLIGHT_S = "86400"
EXPOSED_HEADERS = ("X-Request-Id", "Retry-After", *HEADER_NAMES)
"""Headers that web pages of allowed origins may read."""
MAX_BYTES_AT_ONCE = 1 << 20
"""Largest body that is handed to the socket in one piece, which takes the event loop about a millisecond."""


class Caller(NamedTuple):
    """The caller, identified by its key."""

    is_admin: bool = False
    """Whether it may affect other callers' requests: it sent an admin key, or the server has none."""
    key: str | None = None
    """Names the API key that it sent: by its name in the file, or as "--api-key 0"; None = it sent none."""
    user: User | None = None
    """Whose limits and counts its calls have; None = nothing checked its key."""


class CallFacts:
    """Facts about one HTTP call. Its handler fills in what it knows of the tokens."""

    __slots__ = (
        "arrived_at",
        "caller",
        "error_code",
        "finish_reasons",
        "first_token_s",
        "is_metered",
        "is_streamed",
        "num_cached_tokens",
        "num_output_tokens",
        "num_prompt_tokens",
        "request_id",
        "request_numbers",
    )

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.arrived_at = time.monotonic()
        self.caller = Caller()
        self.is_metered = False  # it counts against its user's limits
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.first_token_s: float | None = None
        self.is_streamed = False
        self.request_numbers = range(0)  # the engine's, one for each choice; empty: nothing was sent
        self.finish_reasons: dict[int, str] = {}  # by choice
        self.error_code = ""  # of the error object that it ended with


def facts_of(request: web.Request) -> CallFacts:
    """The facts that the middleware attached to the call."""
    return request[FACTS]


def require_admin(request: web.Request, what: str, param: str | None = None) -> None:
    """Refuse callers that are no admins.

    Raises:
        RequestError: 403 that names `what` and the body's field `param`.
    """
    if not facts_of(request).caller.is_admin:
        message = f"{what} needs the server's admin key; send it as 'Authorization: Bearer KEY'"
        raise RequestError(403, "admin_key_required", message, param)


class Gate:
    """The middlewares and their settings.

    Args:
        api_keys: a call must send one of them as `Authorization: Bearer`, or as `X-Api-Key`, as Anthropic's
            clients do; empty = no key is needed.
        admin_keys: each gives all rights of an API key and those that `require_admin` guards; empty = every
            caller is an admin, except those of `users`.
        users: those of the API key file. If there is one, a call must send one of its keys or of `api_keys`.
        cors_origins: origins whose web pages may call; "*" = any.
        host_names: names that calls may have as Host; "*" = any.
        write_log: whether to log every call as a line of JSON.
        responses: counts answers by "METHOD route status".
        is_full: tells whether calls must be refused because too many connections are open.
        on_refusal: is told the code of every error that asks to come again later (429, 503).
        needs_no_key: tells of a path whether it is for everyone.
        on_end: is told of every call that has ended, with its facts and status.
    """

    def __init__(
        self,
        api_keys: Sequence[str] = (),
        admin_keys: Sequence[str] = (),
        cors_origins: Sequence[str] = (),
        host_names: Collection[str] = (ANY,),
        write_log: bool = False,
        responses: dict[str, int] | None = None,
        is_full: Callable[[], bool] = lambda: False,
        on_refusal: Callable[[str], None] = lambda code: None,
        needs_no_key: Callable[[str], bool] = lambda path: False,
        users: Users | None = None,
        on_end: Callable[[web.Request, CallFacts, int], None] | None = None,
    ) -> None:
        self._api_digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._admin_digests = [hashlib.sha256(key.encode()).digest() for key in admin_keys]
        self._origins = frozenset(cors_origins)
        self._host_names = host_names
        self._write_log = write_log
        self._responses = {} if responses is None else responses
        self._is_full = is_full
        self._on_refusal = on_refusal
        self._needs_no_key = needs_no_key
        self._users = users or Users()
        self._on_end = on_end
        self._error_formats: Mapping[str, ErrorFormat] = {}

    def install(
        self, app: web.Application, error_formats: Mapping[str, ErrorFormat] = MappingProxyType({})
    ) -> None:
        """Install the middlewares around all routes of `app`.

        `error_formats` has the error objects that are not OpenAI's, by path. Paths below have the same.
        """
        self._error_formats = error_formats
        app.middlewares.extend([self._identify, self._authorize])
        app.on_response_prepare.append(self._add_headers)

    @web.middleware
    async def _identify(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The outermost middleware: assigns a request id, turns exceptions into answers, counts and logs."""
        given = request.headers.get("X-Request-Id", "")
        facts = CallFacts(given if GOOD_ID.fullmatch(given) else uuid.uuid4().hex)
        request[FACTS] = facts
        try:
            response = await self._with_error_object(request, handler)
        except asyncio.CancelledError:
            self._finish(request, facts, CLIENT_LEFT)
            raise
        self._finish(request, facts, response.status)
        return response

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check Host and Origin, answer CORS preflights, then check the key."""
        if request.path in OPEN_TO_ALL and request.method != "OPTIONS":
            return await handler(request)
        if self._is_full():
            raise RequestError(
                503, "too_many_connections", "the server has too many open connections; try again in a moment"
            )
        check_host(request.headers, self._host_names)
        check_origin(request.method, request.headers, self._origins)
        if self._origins and request.method == "OPTIONS" and "Origin" in request.headers:
            return web.Response(status=204)
        caller = self._caller(request)
        if caller is None and not self._needs_no_key(request.path):
            raise RequestError(
                401, "invalid_api_key", "send one of the server's API keys as 'Authorization: Bearer KEY'"
            )
        facts_of(request).caller = caller or Caller()
        return await handler(request)

    def _caller(self, request: web.Request) -> Caller | None:
        """The caller by its key; None = a key is needed and missing. Compares keys in constant time."""
        given = request.headers.get("Authorization") or f"Bearer {request.headers.get('X-Api-Key', '')}"
        kind, _, key = given.partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        of_api = [hmac.compare_digest(digest, known) for known in self._api_digests]
        of_admin = [hmac.compare_digest(digest, known) for known in self._admin_digests]
        user = self._users.find(digest)
        is_bearer = kind.lower() == "bearer"
        if is_bearer and any(of_admin):
            return Caller(is_admin=True, user=self._users.of_admin_key)
        if is_bearer and user is not None:
            return Caller(user.is_admin, user.name, user)
        is_admin = not self._admin_digests
        if is_bearer and any(of_api):
            return Caller(is_admin, f"--api-key {of_api.index(True)}", self._users.of_api_key)
        if self._api_digests or self._users.has_file:
            return None
        return Caller(is_admin, None, self._users.nobody)

    async def _with_error_object(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Call the handler; an exception becomes an answer with the error object of the path's API."""
        headers: dict[str, str] = {}
        try:
            return await handler(request)
        except web.HTTPException as error:
            known = {
                404: ("not_found", f"there is no {request.path[:200]}"),
                405: ("method_not_allowed", f"{request.path[:200]} does not take {request.method}"),
            }
            fault = Fault(error.status, *known.get(error.status, (None, error.reason)))
            headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        except (
            web.RequestPayloadError,
            ConnectionError,
        ) as error:  # ConnectionError: the client disconnected
            words = " ".join(str(error).split())
            fault = Fault(400, "invalid_body", f"the body can't be read: {words}")
        except Exception as error:
            if not isinstance(error, MinisglError):
                log.exception("%s %s failed in the server", request.method, request.path)
            fault = fault_of(error)
            headers = _headers_of(error, fault.status)
        facts_of(request).error_code = fault.code or str(fault.status)
        if fault.status in RETRYABLE:
            self._on_refusal(fault.code or "")
        return json_answer(self._error_format(request.path).body(fault), fault.status, headers)

    def _error_format(self, path: str) -> ErrorFormat:
        for root, form in self._error_formats.items():
            if path == root or path.startswith(f"{root}/"):
                return form
        return OPENAI

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        facts = request.get(FACTS)
        if facts is None:  # aiohttp refused it before the middleware ran
            return
        response.headers["X-Request-Id"] = facts.request_id
        if facts.is_metered and facts.caller.user is not None:
            response.headers.update(facts.caller.user.headers())
        origin = request.headers.get("Origin")
        if not self._origins:
            return
        response.headers["Vary"] = "Origin"
        if origin is None or not is_allowed_origin(origin, self._origins):
            return
        response.headers["Access-Control-Allow-Origin"] = ANY if ANY in self._origins else origin
        response.headers["Access-Control-Expose-Headers"] = ", ".join(EXPOSED_HEADERS)
        if request.method == "OPTIONS":
            response.headers["Access-Control-Allow-Methods"] = "GET, POST"
            asked = request.headers.get("Access-Control-Request-Headers", "")
            response.headers["Access-Control-Allow-Headers"] = asked or "Authorization, Content-Type"
            response.headers["Access-Control-Max-Age"] = PREFLIGHT_S

    def _finish(self, request: web.Request, facts: CallFacts, status: int) -> None:
        """Count and log a call that has ended."""
        if self._on_end is not None:
            self._on_end(request, facts, status)
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
    """Send the access log to stderr, one line of pure JSON per call."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access_log.handlers[:] = [handler]
    access_log.setLevel(logging.INFO)
    access_log.propagate = False


def json_answer(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """An answer whose body is JSON. A large body is written in pieces, between which other tasks run."""
    content = BytesIO(body) if len(body) > MAX_BYTES_AT_ONCE else body
    return web.Response(body=content, status=status, headers=headers, content_type="application/json")


def _headers_of(error: Exception, status: int) -> dict[str, str]:
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if status == 409:  # otherwise OpenAI's clients would retry an aborted call
        return {"X-Should-Retry": "false"}
    if status not in RETRYABLE:
        return {}
    known = error.retry_after_s if isinstance(error, RequestError) else None
    return {"Retry-After": str(RETRY_AFTER_S if known is None else known)}
