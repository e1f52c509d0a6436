"""Reports as JSON, comparisons of them, and pictures."""
