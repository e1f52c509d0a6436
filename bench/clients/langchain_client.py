# pyright: reportMissingImports=false
"""langchain-openai: invoke, stream, batch, logprobs."""

import os

from langchain_openai import ChatOpenAI, OpenAI

WHERE = {"model": os.environ["MODEL"], "base_url": os.environ["BASE_URL"], "api_key": "none"}
chat = ChatOpenAI(**WHERE, temperature=0, max_tokens=24, stream_usage=True)
ASK = [("system", "You are brief."), ("human", "Name three colours.")]

whole = chat.invoke(ASK)
assert whole.content
assert whole.usage_metadata["output_tokens"] > 0
print("ok: invoke")

chunks = list(chat.stream(ASK))
assert "".join(chunk.content for chunk in chunks) == whole.content
assert any(chunk.usage_metadata for chunk in chunks)
print("ok: stream is the whole one")

assert [one.content for one in chat.batch([ASK, ASK])] == [whole.content] * 2
print("ok: batch")

entries = chat.bind(logprobs=True).invoke(ASK).response_metadata["logprobs"]["content"]
assert len(entries) == whole.usage_metadata["output_tokens"]
print("ok: logprobs")

assert OpenAI(**WHERE, temperature=0, max_tokens=8).invoke("One, two,")
print("ok: completions")
