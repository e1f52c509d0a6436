"""The share of a server's room that one user may take, so that no user locks the others out."""

from collections.abc import Callable

from minisgl.server.keys.limits import LimitReachedError
from minisgl.server.keys.users import User

RetryAfter = Callable[[int], int | None]
"""Seconds until so many requests or tokens have made room, if known."""


def check_requests(user: User, num_new: int, free: int, retry_after_s: RetryAfter) -> None:
    """Refuse `num_new` requests if the user would have more open than are left for others.

    Args:
        user: `num_open` has the new ones already.
        free: requests that the server may still open.

    Raises:
        LimitReachedError: 429. Never for a user's first requests.
    """
    own = user.num_open
    if own > free and own > num_new:
        message = (
            f"this key has {own - num_new} requests open, and the {free} more that this server takes are for "
            "other keys; try again in a moment"
        )
        raise LimitReachedError("share_of_requests", "requests", message, retry_after_s(own - free))


def check_queued_tokens(user: User, num_new: int, free: int, retry_after_s: RetryAfter) -> None:
    """The same for prompt tokens that wait for an answer; `num_queued_tokens` has only those before.

    Raises:
        LimitReachedError: 429. Never for a user without queued tokens.
    """
    own = user.num_queued_tokens
    if own and own + num_new > free:
        message = (
            f"{own} prompt tokens of this key wait for an answer, and the {free} more that this server "
            "queues are for other keys; try again in a moment"
        )
        raise LimitReachedError(
            "share_of_queued_tokens", "tokens", message, retry_after_s(own + num_new - free)
        )
