"""Describes a model; `hf_folder/` reads the description from a Hugging Face folder. Imports no torch."""
