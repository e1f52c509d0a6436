"""The limit of thoughts as a plain rule on whole outputs."""

from collections.abc import Sequence

from minisgl.request import ThoughtLimit


def tokens_after(limit: ThoughtLimit, output: Sequence[int], vocab_size: int) -> frozenset[int]:
    """What may follow an output that kept to the limit, found from its beginning."""
    full = frozenset(range(vocab_size))
    thinks, num, at = limit.is_open, 0, 0
    since = 0  # where the text behind the last thought begins
    while at < len(output):
        if thinks and output[at] == limit.close[0]:
            is_forced = num == limit.max_tokens
            at += len(limit.close) if is_forced else 1
            if at > len(output):
                return frozenset({limit.close[len(limit.close) - (at - len(output))]})
            thinks, since = False, at
            if not limit.may_reopen:
                return full
        elif thinks:
            num, at = num + 1, at + 1
        else:
            at += 1
            thinks = tuple(output[max(since, at - len(limit.open)) : at]) == limit.open
    if num < limit.max_tokens:
        return full
    if thinks:
        return frozenset({limit.close[0]})
    if not limit.may_reopen:
        return full
    if not limit.instead:
        return full - {limit.open[0]}
    return frozenset(limit.instead) if list(output[since:])[-1:] == [limit.open[0]] else full
