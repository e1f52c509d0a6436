"""What the APIs that generate text share: a call from its fields to its answer."""
