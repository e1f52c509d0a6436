"""Fair shares: users whose requests compete get about as much service as each other.

It is the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): a
counter of each user's service says whose turn it is, so no user gains by sending more requests.

Promise: with a single user nothing is counted, and every choice is as if there were no users.
"""

from collections.abc import Iterable, Sequence

from minisgl.request import Request
from minisgl.scheduler.queue.policy import by_seniority

OUTPUT_COST = 4
"""What an output token costs, as most services price it; the paper's own runs use 2. A computed prompt token
costs 1, one that was found in the cache nothing."""


SPARE_FROM_ROWS = 16
"""With at least as many rows, the last free one is not for a user that has half of them (`may_take_row`)."""


class Account:
    """How much service a user has had. Users without requests don't save it up (`lift`)."""

    __slots__ = ("num_rows", "service", "user")

    def __init__(self, user: str) -> None:
        self.user = user
        self.service = 0
        self.num_rows = 0  # that its requests hold; `Holdings` counts them

    def lift(self, service: int) -> None:
        """Count at least this much, because others had it while this user asked for nothing."""
        self.service = max(self.service, service)


class Shares:
    """The accounts of all users, and whose request has to make room."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self.compete = False
        """Whether there has been more than one user."""

    def account(self, user: str) -> Account:
        """The account of this user."""
        account = self._accounts.get(user)
        if account is None:
            account = self._accounts[user] = Account(user)
            self.compete = len(self._accounts) > 1
        return account

    def charge_prompt(self, request: Request) -> None:
        """Count the prompt tokens that a request computes, when it is admitted for the first time."""
        if self.compete:
            request.account.service += len(request.prompt) - request.num_cached_tokens

    def charge_outputs(self, requests: Iterable[Request]) -> None:
        """Count one output token for each request."""
        if self.compete:
            for request in requests:
                request.account.service += OUTPUT_COST

    def may_take_row(self, request: Request, num_free: int, max_rows: int) -> bool:
        """Whether a waiting request may get one of the free rows.

        A user that has half of the rows leaves the last one to others, so that these start at once. The row
        of a request that is preempted comes only with the end of a launched step.
        """
        has_half = 2 * request.account.num_rows >= max_rows
        return num_free > (1 if self.compete and has_half and max_rows >= SPARE_FROM_ROWS else 0)

    def shortest_first(self, requests: list[Request]) -> list[Request]:
        """The requests by how much of their prompts is left. All were admitted when it was their users' turn,
        and so none is held up by the rest of a long prompt.
        """
        return sorted(requests, key=_tokens_left) if self.compete else requests

    def victim(self, running: Sequence[Request], request: Request) -> Request:
        """Who is preempted so that `request` can grow: it, or one that is less senior.

        The least senior one tells the priority. Among those of this priority, the user with the most service
        loses its least senior one. The requests of the user with the least service keep their pages, so some
        request always goes on.

        Args:
            running: the most senior first; none of them is being preempted.
        """
        if not self.compete:
            return running[-1]
        priority = running[-1].priority
        lesser = [one for one in running[running.index(request) :] if one.priority == priority]
        return max(reversed(lesser), key=_service)

    def must_make_room(self, running: Sequence[Request], head: Request) -> Request | None:
        """The running request that `head`, which finds no room, may replace; None = head has to wait.

        It is the least senior one of a user that has at least two rows more than the user of `head`, so both
        move towards equal shares and the second never takes it back. Among several such users, the one with
        the most service. The request is of a lower priority than `head`, or of the same and of a user with at
        least as much service.
        """
        least = head.account.num_rows + 2
        if all(account.num_rows < least for account in self._accounts.values()):
            return None
        if any(request.num_planned_tokens >= request.max_fed_tokens for request in running):
            return None  # it ends with a launched step, which makes room
        victims = [
            request
            for request in running
            if request.account.num_rows >= least
            and (
                request.priority < head.priority
                or (request.priority == head.priority and request.account.service >= head.account.service)
            )
        ]
        return max(reversed(victims), key=_service, default=None)


def goes_first(heads: Sequence[Request]) -> Request:
    """Which of several users' first waiting requests is next.

    The most senior one tells the priority; among those of this priority, the user with the least service.
    """
    priority = min(heads, key=by_seniority).priority
    return min((head for head in heads if head.priority == priority), key=_turn)


def goes_before(head: Request, request: Request) -> bool:
    """Whether a waiting request's prompt is computed before what is left of another user's running one.

    Equal service is enough: a user that asked for nothing was lifted to what the other one has now.
    """
    return (
        head.account is not request.account
        and head.priority >= request.priority
        and head.account.service <= request.account.service
    )


def is_below_share(request: Request, others: Iterable[Account]) -> bool:
    """Whether a request's user has at least two rows less than each of `others`, and no more service.

    The row that a waiting request would get counts, and what the request's own prompt cost does not: so the
    answer stays the same when it is admitted.
    """
    num_rows = request.account.num_rows + (request.row < 0)
    own_tokens = len(request.prompt) - request.num_cached_tokens if request.was_admitted else 0
    service = request.account.service - own_tokens
    return all(other.num_rows >= num_rows + 2 and other.service >= service for other in others)


def _service(request: Request) -> int:
    return request.account.service


def _tokens_left(request: Request) -> int:
    return len(request.feed) - request.num_planned_tokens


def _turn(request: Request) -> tuple[int, tuple[int, int]]:
    return request.account.service, request.seniority
