"""Starts, watches and stops the engine process and the sibling server processes."""
