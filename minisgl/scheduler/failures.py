"""Makes the final outputs of requests that end with an error: refusals, and steps that gave no token.

Promise: the error says whether the model or the request is at fault, and what to do.
"""

import logging

from minisgl.errors import RequestError
from minisgl.request import FinishReason, Request, RequestOutput
from minisgl.scheduler.plan import NO_LOGITS
from minisgl.scheduler.stats import SchedulerStats

logger = logging.getLogger(__name__)


def error_output(request_id: int, error: RequestError, num_cached_tokens: int = 0) -> RequestOutput:
    """The final output of a request that ends with `error`."""
    return RequestOutput(
        request_id,
        [],
        FinishReason.ERROR,
        num_cached_tokens,
        error_status=error.status,
        error_code=error.code,
        error_message=error.message,
        error_param=error.param,
    )


def why_no_token(request: Request, no_token: int, stats: SchedulerStats) -> RequestError:
    """The error of a request whose step gave NO_LOGITS or NONE_ALLOWED, not a token. It is counted."""
    if no_token != NO_LOGITS:
        stats.num_without_token += 1
        return no_token_left(request)
    error = no_finite_logits()
    if not stats.num_without_logits:
        logger.warning("a request ends (later ones are counted in /metrics): %s", error)
    stats.num_without_logits += 1
    return error


def no_finite_logits() -> RequestError:
    """The model is at fault: it gave no logit above minus infinity (`plan.NO_LOGITS`)."""
    return RequestError(
        500,
        "no_finite_logits",
        "the model's logits for the next token are all NaN or -inf, so no token can be chosen; check the "
        "checkpoint, and try another --dtype (float16 overflows in models made for bfloat16)",
    )


def no_token_left(request: Request) -> RequestError:
    """The request is at fault: its rules ban every token (`plan.NONE_ALLOWED`)."""
    is_list_given = bool(request.params.allowed_token_ids)
    if request.params.grammar is not None:
        where = request.params.grammar.where
        return RequestError(
            400,
            "no_token_left",
            f"{where} and the request's own rules leave no token behind {len(request.output)} generated "
            "tokens; allow more, ban less, or lower min_tokens",
            where,
        )
    return RequestError(
        400,
        "no_token_left",
        f"the request's own rules ban every token behind {len(request.output)} generated tokens; allow more "
        "in allowed_token_ids, or ban less in bad_words, bad_words_ids or by min_tokens",
        "allowed_token_ids" if is_list_given else None,
    )
