"""Attention backends behind one function; `choice` decides which ones run."""
