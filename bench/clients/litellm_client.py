# pyright: reportMissingImports=false
"""litellm: chat streamed and whole, text completion, an error as its own class."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices
import litellm

WHERE = {"model": "openai/" + os.environ["MODEL"], "api_base": os.environ["BASE_URL"], "api_key": "none"}
TEXT = {**WHERE, "model": "text-completion-openai/" + os.environ["MODEL"]}
ASK = {"messages": [{"role": "user", "content": "Name three colours."}], "temperature": 0, "max_tokens": 24}

whole = litellm.completion(**WHERE, **ASK)
text = whole.choices[0].message.content
assert text
assert whole.usage.completion_tokens > 0
print("ok: chat")

chunks = list(litellm.completion(**WHERE, **ASK, stream=True, stream_options={"include_usage": True}))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == whole.usage.completion_tokens
print("ok: streamed chat is the whole one")

assert litellm.text_completion(**TEXT, prompt="One, two,", max_tokens=8, temperature=0).choices[0].text
print("ok: completions")

try:
    litellm.completion(**WHERE, **{**ASK, "temperature": -1})
except litellm.BadRequestError:
    print("ok: errors")
else:
    sys.exit("a negative temperature was not refused")
