"""The engines as the rest of the server sees them, and `launch.py`, which starts them and the server."""
