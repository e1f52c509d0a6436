"""Replies to conversations, for the server and `LLM`: their tools, grammars, limits and reader."""
