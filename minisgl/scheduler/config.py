"""The scheduler's limits."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's limits, all in tokens or rows."""

    max_rows: int
    max_step_tokens: int
    chunk_tokens: int
    mixed_step_tokens: int
    """New tokens in a step that also decodes a streamed request. Prompts get at least half of them."""
    max_context_tokens: int
    """Longest prompt + output of one request; at most the tokens that the pool holds."""
    vocab_size: int
    output_reserve_tokens: int = 64
    """Tokens that an admission reserves for the output of each running request. An estimate: reserving the
    whole max_tokens would leave most of the pool idle. Preemption handles longer outputs."""
    chunk_multiple: int = 1
    """A prompt is cut behind a multiple of this many tokens, where the step has room for one (linear
    attention computes chunks of its own)."""
    least_saved_tokens: int = 512
    """With linear attention, a prompt waits for another one's snapshot only if all that wait for it save so
    many tokens: a wait may cost a step, which takes the time of some hundred (docs/linear-attention.md)."""
    eos_token_ids: tuple[int, ...] = ()
