"""How checkpoints pack 4-bit numbers, and back: 8 numbers in an int32, the first in its lowest bits.

Promise: what these functions return is in the order of the layer's own features, whatever the format's is.
"""

import torch
from torch import Tensor

from minisgl.model_config.quantization import Int4Layout
from triton_kernels.launch import ceil_div

IN_WORD = 8
"""Numbers of an int32."""
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in an int32 AWQ has each of 8 outputs: it packs them as 0, 2, 4, 6, 1, 3, 5, 7."""
MIDDLE = 8
"""The zero point of weights without one."""
SYMMETRIC_WORDS = (0x77777777, 0x88888888 - (1 << 32))
"""Zero points of symmetric GPTQ weights, as both versions write them: some tools write the second kind
and say the first."""
NUMBERS = {
    Int4Layout.COMPRESSED: "weight_packed",
    Int4Layout.COMPUTED: "weight_packed",
    Int4Layout.AWQ: "qweight",
    Int4Layout.GPTQ: "qweight",
    Int4Layout.GPTQ_V2: "qweight",
}
"""Names of a layer's numbers; likewise below."""
SCALES = dict.fromkeys(Int4Layout, "scales") | dict.fromkeys(
    (Int4Layout.COMPRESSED, Int4Layout.COMPUTED), "weight_scale"
)
ZEROS = dict.fromkeys(Int4Layout, "qzeros") | {Int4Layout.COMPRESSED: "weight_zero_point"}
GROUP_OF_INPUTS = dict.fromkeys(Int4Layout, "g_idx") | {Int4Layout.COMPRESSED: "weight_g_idx"}
GPTQ = (Int4Layout.GPTQ, Int4Layout.GPTQ_V2)


def numbers_view(memory: Tensor, layout: Int4Layout, outputs: int, width: int) -> Tensor:
    """The packed numbers of a layer as the checkpoint has them, in `memory`, uint8 [outputs * width / 2]."""
    if layout is Int4Layout.COMPUTED:
        return memory.view(outputs, width // 2)
    words = memory.view(torch.int32)
    if layout is Int4Layout.AWQ:
        return words.view(width, outputs // IN_WORD)
    if layout in GPTQ:
        return words.view(width // IN_WORD, outputs)
    return words.view(outputs, width // IN_WORD)


def unpacked_numbers(stored: Tensor, layout: Int4Layout) -> Tensor:
    """The numbers uint8 [outputs, width] of a `numbers_view`."""
    if layout is Int4Layout.COMPUTED:
        return _split_bytes(stored)
    if layout is Int4Layout.AWQ:
        return _columns(stored, AWQ_PLACES).t()
    if layout in GPTQ:
        return _rows(stored).t()
    return _columns(stored)


def zeros_shape(layout: Int4Layout, outputs: int, groups: int) -> tuple[int, int]:
    """The shape of a layer's packed zero points, int32."""
    words = ceil_div(outputs, IN_WORD)
    return (words, groups) if layout is Int4Layout.COMPRESSED else (groups, words)


def unpacked_zeros(stored: Tensor, layout: Int4Layout, outputs: int) -> Tensor:
    """The zero points uint8 [groups, outputs], 0 to 16."""
    if layout is Int4Layout.COMPRESSED:
        return _rows(stored)[:outputs].t()
    if layout is Int4Layout.AWQ:
        return _columns(stored, AWQ_PLACES)
    return _columns(stored) + (1 if layout is Int4Layout.GPTQ else 0)


def _split_bytes(stored: Tensor) -> Tensor:
    """uint8 [..., n] -> [..., 2n]: the low half of each byte, then its high half."""
    return torch.stack([stored & 15, stored >> 4], -1).flatten(-2)


def _columns(words: Tensor, places: tuple[int, ...] | None = None) -> Tensor:
    """int32 [a, b] -> uint8 [a, 8b]."""
    numbers = _split_bytes(words.contiguous().view(torch.uint8))
    if places is None:
        return numbers
    return numbers.unflatten(1, (-1, IN_WORD))[:, :, list(places)].flatten(1)


def _rows(words: Tensor) -> Tensor:
    """int32 [a, b] -> uint8 [8a, b]."""
    numbers = _split_bytes(words.contiguous().unsqueeze(-1).view(torch.uint8))
    return numbers.transpose(1, 2).flatten(0, 1)
