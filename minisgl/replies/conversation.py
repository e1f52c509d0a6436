"""A conversation: from its messages to the prompt, and to the plan for the replies.

Promise: the server and `LLM` make the same prompt and the same plan of the same fields.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from minisgl.replies.model import ReplyModel
from minisgl.replies.plan import ReplyPlan, check_callable, plan_reply
from minisgl.replies.tools import NO_TOOLS, AskedTools
from minisgl.request import SamplingParams
from minisgl.text.literals import hide_special_tokens, restored


class EncodedCall(NamedTuple):
    """The prompts of a call as token ids, and how their replies are made and read."""

    prompts: Sequence[Sequence[int]]
    plan: ReplyPlan


class Truncation(NamedTuple):
    """Shortens prompts that are too long."""

    max_tokens: int
    """Tokens that are kept; -1: as many as the context has beside the output."""
    side: Literal["left", "right"] = "left"
    """Where tokens are dropped."""

    def cut(self, token_ids: list[int], params: SamplingParams, max_context_tokens: int) -> list[int]:
        """What is left of a prompt."""
        room = self.max_tokens
        if room == -1:
            room = max(max_context_tokens - max(params.max_tokens or 1, 1), 1)
        return token_ids[-room:] if self.side == "left" else token_ids[:room]


class Conversation(NamedTuple):
    """Messages and all that makes a prompt and the plan for its replies of them."""

    messages: list[dict[str, Any]]  # from `normalize_messages`
    asked: AskedTools = NO_TOOLS
    template_variables: Mapping[str, Any] = {}  # never changed
    add_generation_prompt: bool = True
    field: str = "messages"  # names the prompt in errors
    limit_field: str = "thinking_token_budget"  # names the limit of the thought
    truncation: Truncation | None = None
    continue_final_message: bool = False  # the prompt ends inside of the last message

    def encode(self, model: ReplyModel, max_context_tokens: int, params: SamplingParams) -> EncodedCall:
        """The prompt, and how its replies are made and read. A template adds special tokens itself.

        Raises:
            RequestError: 400; the template refuses the messages, the prompt is far too long, the model can't
                be given tools, or no grammar can be made.
        """
        limit = max_context_tokens if self.truncation is None else None
        text, ids = self.render(model, limit)
        plan = plan_reply(model, text, params, self.asked, self.limit_field)
        if self.truncation is not None:
            ids = self.truncation.cut(ids, params, max_context_tokens)
        return EncodedCall([ids], plan)

    def render(
        self, model: ReplyModel, max_tokens: int | None, add_special_tokens: bool = False
    ) -> tuple[str, list[int]]:
        """The prompt and its token ids.

        Args:
            max_tokens: a text with far more tokens is refused before all of it is tokenized; None: never.

        Raises:
            RequestError: 400; the template refuses the messages, the prompt is far too long, or the model
                can't be given tools.
        """
        check_callable(model, self.asked)
        messages, literals = self.messages, {}
        if model.special_tokens is not None:
            messages, literals = hide_special_tokens(messages, model.special_tokens)
        text = model.template.render(
            messages,
            self.add_generation_prompt,
            self.template_variables,
            self.asked.for_template,
            self.continue_final_message,
        )
        ids = model.tokenizer.encode(
            text, add_special_tokens, max_tokens=max_tokens, param=self.field, literals=literals
        )
        return restored(text, literals), ids
