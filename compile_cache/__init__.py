"""Compiled code between starts: what torch.compile and Triton made, kept where the next start finds it.

key.py     which machine and which versions compiled code belongs to
store.py   the entries on disk: opened, checked, sealed, quarantined, packed
"""
