"""The commands that measure: `minisgl bench ...` and `minisgl tune`."""
