"""Engines of several ranks: the processes of the other ranks, on this host or of a torchrun job."""
