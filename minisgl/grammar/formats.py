"""What each value of JSON Schema's `format` demands: a pattern, bounds of a number, or nothing.

Promise: what a format allows is valid by its standard. Dates have the days of their month, also in leap
years; times have no leap seconds.
"""

from typing import NamedTuple

from minisgl.grammar.limits import MAX_NUMBER

_DATE = (
    "(?:(?!0000)[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|"
    "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|"
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
).replace("(?!0000)[0-9]{4}", "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})")
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)


class Format(NamedTuple):
    """What one format demands; a field that is None demands nothing."""

    pattern: str | None = None
    """A regular expression (llguidance's dialect) that strings match as a whole."""
    library: str | None = None
    """The format's name for llguidance, which has its own expression."""
    minimum: int | None = None
    maximum: int | None = None


FORMATS: dict[str, Format] = {
    "date": Format(pattern=_DATE),
    "time": Format(pattern=_TIME),
    "date-time": Format(pattern=f"{_DATE}[tT]{_TIME}"),
    **{
        name: Format(library=name)
        for name in ("duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
    },
    "byte": Format(
        pattern="(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?".replace("/", r"\/")
    ),
    "json-pointer": Format(pattern=r"(?:\/(?:[^\/~]|~[01])*)*"),
    # OpenAPI's names for numbers. 64-bit integers end where JSON numbers stop being exact everywhere.
    **{f"int{bits}": Format(minimum=-(2 ** (bits - 1)), maximum=2 ** (bits - 1) - 1) for bits in (8, 16, 32)},
    **{f"uint{bits}": Format(minimum=0, maximum=2**bits - 1) for bits in (8, 16, 32)},
    "int64": Format(minimum=-MAX_NUMBER, maximum=MAX_NUMBER),
    "uint64": Format(minimum=0, maximum=MAX_NUMBER),
    # These say how a value is shown or stored, and allow every string or number.
    **{name: Format() for name in ("float", "double", "password", "binary")},
}
"""Format -> what it demands. Others are refused."""
