"""From logits to the next token of each row, with the sampling parameters of the row tables."""

from torch import Tensor

from minisgl.engine.rows import Rows


def sample_rows(logits: Tensor, rows: Rows, row_index: Tensor, context_len: Tensor) -> Tensor:
    """int32 [R]: one token per row of logits [R, V].

    Args:
        row_index: int64 [R], the rows' lines in the tables.
        context_len: int32 [R], tokens in the pool: the new token's position, which keys its random number.
    """
    return rows.sample(
        logits,
        rows.temperature[row_index],
        rows.top_k[row_index],
        rows.top_p[row_index],
        rows.min_p[row_index],
        rows.seed[row_index],
        context_len,
    )
