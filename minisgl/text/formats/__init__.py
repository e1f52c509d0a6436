"""How model families write thoughts and tool calls: a table, a streaming parser, grammars. No torch."""
