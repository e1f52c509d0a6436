"""The scheduler's counters."""

from dataclasses import dataclass


@dataclass
class SchedulerStats:
    """Counters since the start."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_without_logits: int = 0
    """Requests that ended because the model gave no finite logits."""
    num_without_token: int = 0
    """Requests that ended because their own rules left no token."""
