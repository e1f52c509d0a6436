"""Where a model's files come from, and how they are loaded."""
