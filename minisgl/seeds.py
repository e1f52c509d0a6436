"""Seeds for requests that bring none. The maker of the requests draws them: a server process, or `LLM`.

Promise: the seeds of one maker differ, and with the same `--seed` they are the same after every start.
"""

import secrets

MASK = 2**64 - 1


def base_seed(given: int | None) -> int:
    """The number from which all seeds of a maker are derived: `--seed`, or random bits from the system."""
    return secrets.randbits(64) if given is None else given


def request_seed(source: int, request_id: int) -> int:
    """A request's signed 64-bit seed (splitmix64, Steele et al. 2014); `source` is the `base_seed`."""
    z = (source * 0x9E3779B97F4A7C15 + (request_id + 1) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z
