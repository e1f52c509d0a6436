"""Reads the description of a model from its Hugging Face folder; `hf_config.py` is the entry."""
