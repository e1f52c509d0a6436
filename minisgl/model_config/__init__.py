"""Describes a model, and reads the description from a Hugging Face folder. Imports no torch."""
