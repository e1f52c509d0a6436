"""The page at `/`: chat, engine and requests in a browser. Plain files of `web/`, without a build step.

Promise: the page loads nothing from elsewhere and runs nothing but these files, which its
Content-Security-Policy says, too. It needs no API key; the calls that it makes do.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

ROOT = "/web/"
"""Path below which the page's files are."""
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # The files change with the server's version only, and 304 answers cost nothing.
    "Cache-Control": "no-cache",
}


class PageFile(NamedTuple):
    """A file of the page."""

    body: bytes
    media_type: str
    tag: str
    """Its ETag, without quotes."""


def is_page(path: str) -> bool:
    """Whether a path belongs to the page, which anyone may load."""
    return path == "/" or path.startswith(ROOT)


def add_page(app: web.Application) -> None:
    """Add the page's routes to `app`. All files are read now."""
    contents = _read()

    async def send(request: web.Request) -> web.Response:
        file = contents.get(request.match_info.get("name", "index.html"))
        if file is None:
            raise web.HTTPNotFound
        if any(tag.value == file.tag for tag in request.if_none_match or ()):
            return web.Response(status=304, headers={**HEADERS, "ETag": f'"{file.tag}"'})
        response = web.Response(body=file.body, content_type=file.media_type, headers=HEADERS)
        response.etag = file.tag
        if file.media_type.startswith("text/"):
            response.charset = "utf-8"
        return response

    app.router.add_get("/", send)
    app.router.add_get(ROOT + "{name:.+}", send)


def _read() -> dict[str, PageFile]:
    """All files of the page, by their path below its folder."""
    folder = Path(__file__).with_name("web")
    # Python reads the system's list of types, where .js may be anything.
    known = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
    found: dict[str, PageFile] = {}
    for path in sorted(folder.rglob("*.*")):
        body = path.read_bytes()
        media_type = known.get(path.suffix, "text/plain")
        found[path.relative_to(folder).as_posix()] = PageFile(
            body, media_type, hashlib.sha256(body).hexdigest()[:16]
        )
    return found
