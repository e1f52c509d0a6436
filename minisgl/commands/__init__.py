"""The work of the `minisgl` commands. `minisgl/cli.py` reads their arguments and calls this."""
