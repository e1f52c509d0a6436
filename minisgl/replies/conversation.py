"""A conversation: from its messages to the prompt, and to the plan for the replies.

Promise: the server and `LLM` make the same prompt and the same plan of the same fields.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from minisgl.replies.model import ReplyModel
from minisgl.replies.plan import ReplyPlan, check_callable, plan_reply
from minisgl.replies.tools import NO_TOOLS, AskedTools
from minisgl.request import SamplingParams


class EncodedCall(NamedTuple):
    """The prompts of a call as token ids, and how their replies are made and read."""

    prompts: Sequence[Sequence[int]]
    plan: ReplyPlan


class Conversation(NamedTuple):
    """Messages and all that makes a prompt and the plan for its replies of them."""

    messages: list[dict[str, Any]]  # from `normalize_messages`
    asked: AskedTools = NO_TOOLS
    template_variables: Mapping[str, Any] = {}  # never changed
    add_generation_prompt: bool = True
    field: str = "messages"  # names the prompt in errors
    limit_field: str = "thinking_token_budget"  # names the limit of the thought

    def encode(self, model: ReplyModel, max_context_tokens: int, params: SamplingParams) -> EncodedCall:
        """The prompt, and how its replies are made and read. A template adds special tokens itself.

        Raises:
            RequestError: 400; the template refuses the messages, the prompt is far too long, the model can't
                be given tools, or no grammar can be made.
        """
        check_callable(model, self.asked)
        text = model.template.render(
            self.messages, self.add_generation_prompt, self.template_variables, self.asked.for_template
        )
        plan = plan_reply(model, text, params, self.asked, self.limit_field)
        ids = model.tokenizer.encode(text, False, max_tokens=max_context_tokens, param=self.field)
        return EncodedCall([ids], plan)
