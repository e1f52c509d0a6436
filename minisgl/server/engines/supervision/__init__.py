"""Keeps engines running, as processes on this host or behind the door: their lives, restarts and ends."""
