"""Checks the Origin and Host headers, so that a foreign web page can't use a browser to call this server.

Promise: a page of another origin is refused unless --cors-origin names it. A server without API keys accepts
only its own names and IP addresses as Host. This stops DNS rebinding, in which a page points its own name at
this machine: its calls have that name as Host, never an address.
"""

import ipaddress
import re
import socket
from collections.abc import Collection, Sequence

from multidict import CIMultiDictProxy

from minisgl.config import ServerConfig
from minisgl.errors import RequestError

ANY = "*"
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
HOST = re.compile(r"(?:\[([^\]]+)\]|([^:\[]*))(?::\d*)?")
MAX_SHOWN = 100
"""Maximum characters of a header that an error message repeats."""

Headers = CIMultiDictProxy[str]


def allowed_hosts(server: ServerConfig) -> frozenset[str]:
    """The names that calls may have as Host, in lower case; ANY = every name.

    A server with API keys accepts every name, because a rebinding page has no key.
    """
    if server.api_key or server.api_keys_file:
        return frozenset({ANY})
    machine = socket.gethostname()
    short = machine.partition(".")[0]
    names = ("localhost", server.host, machine, short, f"{short}.local", *server.allowed_host)
    return frozenset(name.lower().removesuffix(".") for name in names if name)


def check_host(headers: Headers, names: Collection[str]) -> None:
    """Refuse a Host that is neither an IP address nor one of `names`. Calls without Host pass.

    Raises:
        RequestError: 403 if Host is refused.
    """
    if ANY in names:
        return
    for host in headers.getall("Host", ()):
        name = _name_of(host)
        if name and name not in names and not _is_address(name):
            raise RequestError(
                403,
                "host_not_allowed",
                f"this server has no API key and answers only to its own names, not to {name[:MAX_SHOWN]!r}; "
                "start it with this name as --allowed-host, or with --api-key",
            )


def check_origin(method: str, headers: Headers, origins: Collection[str]) -> None:
    """Refuse a browser's call for a page whose origin is neither the server's own nor one of `origins`.

    The check is needed because browsers send form-like requests without a preflight; CORS only hides the
    answer from the page.

    Raises:
        RequestError: 403 if the origin is refused.
    """
    origin = headers.get("Origin")
    if is_allowed_origin(origin, origins) or not _is_cross_origin(method, headers, origin):
        return
    raise RequestError(
        403,
        "origin_not_allowed",
        f"web pages from {'other origins' if origin is None else repr(origin[:MAX_SHOWN])} may not call; "
        "see --cors-origin",
    )


def is_allowed_origin(origin: str | None, origins: Collection[str]) -> bool:
    """Whether `origin` is one of `origins`."""
    return origin is not None and (ANY in origins or origin in origins)


def _is_cross_origin(method: str, headers: Headers, origin: str | None) -> bool:
    """Whether a page of another origin makes the call.

    Browsers send Sec-Fetch-Site to localhost and over HTTPS. It takes precedence over Origin, because a proxy
    may have changed Host. Without it, Origin is compared with Host. Following a link is "cross-site" too, but
    it is a GET without Origin and passes.
    """
    site = headers.get("Sec-Fetch-Site")
    if site is not None:
        is_other = site not in ("same-origin", "none")
        return is_other and (method == "POST" or origin is not None)
    return origin is not None and not _is_same_origin(origin, headers.getall("Host", ()))


def _is_same_origin(origin: str, hosts: Sequence[str]) -> bool:
    """Whether `origin` is the server's own, by the Host header."""
    scheme, _, authority = origin.lower().partition("://")
    port = DEFAULT_PORTS.get(scheme)
    if port is None or len(hosts) != 1:
        return False
    return authority.removesuffix(port) == hosts[0].strip().lower().removesuffix(port)


def _name_of(host: str) -> str:
    """The name in a Host header, without port, brackets and final dot; a malformed Host unchanged."""
    parts = HOST.fullmatch(host.strip().lower())
    return (parts[1] or parts[2]).removesuffix(".") if parts else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
