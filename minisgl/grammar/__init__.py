"""Structured output: what a grammar is, which are taken, and which tokens each allows next."""
