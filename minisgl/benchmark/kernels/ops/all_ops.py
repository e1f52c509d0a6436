"""Every op that is measured, in the order of reports, and those that are tuned: of quantized layers, too."""

from minisgl.benchmark.kernels.ops import (
    activation_ops,
    attention_ops,
    delta_ops,
    linear_ops,
    moe_ops,
    norm_ops,
    rope_ops,
    row_ops,
)
from minisgl.benchmark.kernels.ops.quantized_moe_ops import QUANTIZED_MOE
from minisgl.benchmark.kernels.ops.quantized_tunings import QUANTIZED

OPS = {
    op.name: op
    for op in (
        norm_ops.RMS_NORM,
        norm_ops.ADD_RMS_NORM,
        activation_ops.SILU_MUL,
        activation_ops.GELU_TANH_MUL,
        rope_ops.ROPE_STORE,
        row_ops.ADVANCE_ROWS,
        row_ops.TOKEN_MASK,
        row_ops.LOGIT_RULES,
        row_ops.COUNT_TOKENS,
        linear_ops.LINEAR,
        linear_ops.GATED_LINEAR,
        linear_ops.LINEAR_MANY,
        linear_ops.GATED_LINEAR_MANY,
        norm_ops.ADD_RMS_NORM_ROUTER,
        moe_ops.MOE_ROUTE,
        moe_ops.FUSED_MOE,
        row_ops.SAMPLE,
        attention_ops.PAGED_DECODE,
        attention_ops.ROPE_PAGED_DECODE,
        attention_ops.PAGED_PREFILL,
        attention_ops.PAGED_PREFILL_HOPPER,
        attention_ops.PAGED_DECODE_FP8,
        attention_ops.ROPE_PAGED_DECODE_FP8,
        attention_ops.PAGED_PREFILL_FP8,
        delta_ops.GATED_DELTA_DECODE,
        delta_ops.GATED_DELTA_PREFILL,
    )
}
TUNABLE = {name: op.tuning for name, op in OPS.items() if op.tuning is not None}
TUNABLE |= QUANTIZED | QUANTIZED_MOE
