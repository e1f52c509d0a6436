"""Engines of several ranks: the processes of the other ranks, on this host and on other nodes."""
