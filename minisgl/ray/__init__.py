"""Minisgl on Ray Serve: an ingress, which is a server, and engines that connect to it (docs/scaling.md)."""
