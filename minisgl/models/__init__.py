"""The models, as torch modules."""
