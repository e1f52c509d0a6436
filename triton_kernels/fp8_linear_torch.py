"""A linear layer of FP8 numbers by torch's own product, for shapes where measuring says that it is faster.

fp8_linear_torch: as fp8_linear.fp8_linear; N and K are multiples of 16, with scales of blocks of 128 and 512:
of other numbers of scales torch 2.11 reads wrong ones.

M rows, N outputs, K inputs. Rows are padded to a multiple of 16, as the product needs them.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS = 16
"""The product takes multiples of so many rows."""


def fp8_linear_torch(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x e4m3 [M, K] with scales [G, M], weight e4m3 [N, K] with scales, bias [N] -> [M, N] of `dtype`."""
    num_rows = x.shape[0]
    missing = -num_rows % ROWS
    if missing:
        x = F.pad(x.view(torch.uint8), (0, 0, 0, missing)).view(x.dtype)
        x_scale = F.pad(x_scale, (0, missing))
    blocks = weight_scale.dim() == 2
    if blocks:
        scales, other = x_scale.t(), weight_scale.t()
    else:
        scales, other = x_scale[0].unsqueeze(1), weight_scale.unsqueeze(0)
    y = torch.ops.aten._scaled_mm(x, weight.t(), scales, other, out_dtype=dtype, use_fast_accum=not blocks)[
        :num_rows
    ]
    return y if bias is None else (y + bias).to(dtype)
