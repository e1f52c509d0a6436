"""The end of a step with extras: rules on logits, masks, log probabilities.

R rows of the batch, M masks of W words, k top tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.engine.step.logits import LogitTables, pack_logprobs
from minisgl.engine.step.rows import Rows
from minisgl.engine.step.steps import RowLogits, sample_plain
from minisgl.scheduler.plan import NONE_ALLOWED, LogitExtras
from triton_kernels.token_mask import token_mask


class RowMasks(NamedTuple):
    """The masks of a batch; see `token_mask`."""

    mask_of: Tensor  # int32 [R], -1 = the row has none
    masks: Tensor  # int32 [M, W]


def sample_with_extras(
    rows: Rows,
    found: RowLogits,
    counted: Tensor,
    extras: LogitExtras,
    tables: LogitTables | None,
    masks: RowMasks | None = None,
) -> Tensor:
    """Sample a token for each row after rules and masks, in place of the one that its plain step sampled.

    Args:
        counted: bool [R], the rows whose token belongs to their output.
        tables: needed if `extras` has rules.

    Returns:
        int32 [R, 1] (the tokens), or with log probabilities int32 [R, 1 + 2 + 2 * k] (the token, then
        `pack_logprobs` of the model's own logits).
    """
    row_ids, context_len, logits = found
    changed = logits
    if extras.rules:
        assert tables is not None
        changed = tables.apply_rules(changed, row_ids, context_len)
    if masks is not None:
        changed = token_mask(changed, masks.mask_of, masks.masks)
    token_ids = sample_plain(rows, rows.read(row_ids), found._replace(logits=changed))
    if extras.rules:
        assert tables is not None
        tables.add_tokens(row_ids, token_ids, counted)
    if extras.rules or masks is not None:
        # If a logit is NaN, the model is at fault, not the request: the maximum is NaN, which compares False.
        by_request = (token_ids < 0) & (logits.amax(1) > float("-inf"))
        token_ids = token_ids.masked_fill(by_request, NONE_ALLOWED)
    result = token_ids[:, None]
    if not extras.logprobs:
        return result
    asked = tables.asked_logprobs(row_ids) if extras.rules and tables is not None else None
    return torch.cat([result, pack_logprobs(logits, token_ids, asked)], 1)
