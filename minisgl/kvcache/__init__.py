"""Pages, the prefix tree, and who may use which page. No torch."""
