"""The openai package: chat and completions, streamed and whole, logprobs, n, stop, errors."""

import os
import sys
from typing import Any

import openai

MODEL = os.environ["MODEL"]
client: Any = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
ASK = [{"role": "user", "content": "Name three colours."}]

assert [card.id for card in client.models.list()] == [MODEL]
whole = client.chat.completions.create(
    model=MODEL, messages=ASK, temperature=0, max_tokens=24, logprobs=True, top_logprobs=2
)
choice, usage = whole.choices[0], whole.usage
assert choice.message.content
assert choice.finish_reason in ("stop", "length")
entries = choice.logprobs.content
assert len(entries) == usage.completion_tokens
assert all(len(entry.top_logprobs) == 2 for entry in entries)
text = b"".join(bytes(entry.bytes) for entry in entries).decode()
assert text.removesuffix("<|im_end|>") == choice.message.content, text
print("ok: chat with logprobs")

pieces: list[str] = []
last: Any = None
for chunk in client.chat.completions.create(
    model=MODEL,
    messages=ASK,
    temperature=0,
    max_tokens=24,
    stream=True,
    stream_options={"include_usage": True},
):
    pieces += [one.delta.content or "" for one in chunk.choices]
    last = chunk
assert "".join(pieces) == choice.message.content
assert last.usage.completion_tokens == usage.completion_tokens
assert len(pieces) > 3
print("ok: streamed chat is the whole one")

several = client.chat.completions.create(
    model=MODEL, messages=ASK, temperature=1.0, seed=1, n=3, max_completion_tokens=16
)
again = client.chat.completions.create(
    model=MODEL, messages=ASK, temperature=1.0, seed=1, n=3, max_completion_tokens=16
)
texts = [one.message.content for one in several.choices]
assert len(set(texts)) > 1
assert texts == [one.message.content for one in again.choices]
print("ok: n = 3, seeded")

call = {"model": MODEL, "prompt": "One, two, three, four,", "temperature": 0, "max_tokens": 16}
free = client.completions.create(**call).choices[0]
stopped = client.completions.create(**call, stop=[free.text[5:8]]).choices[0]
assert stopped.finish_reason == "stop"
assert stopped.text == free.text[: free.text.index(free.text[5:8])]
echoed = client.completions.create(**call, echo=True, logprobs=1).choices[0]
assert echoed.text == call["prompt"] + free.text
assert "".join(echoed.logprobs.tokens) == echoed.text
assert echoed.logprobs.token_logprobs[0] is None
print("ok: completions with stop, echo and logprobs")


def refusal(wrong: dict[str, Any]) -> Any:
    try:
        client.completions.create(**{**call, **wrong})
    except openai.APIStatusError as error:
        return error
    sys.exit(f"{list(wrong)} was not refused")


assert isinstance(refusal({"model": "other"}), openai.NotFoundError)
for wrong in ({"temperature": -1}, {"prompt": "word " * 100_000}):
    error: Any = refusal(wrong)
    assert error.status_code == 400
    assert error.body["param"] == next(iter(wrong))
print("ok: errors")
