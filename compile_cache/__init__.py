"""Compiled code between starts: what torch.compile and Triton made, kept where the next start finds it.

key.py      which machine and which versions compiled code belongs to
store.py    a start opens the entry for its machine, seals it, and lets it go
seal.py     what makes an entry trustworthy: the list of its files
entries.py  looking after the entries: list, delete, pack, unpack
bytecode.py Python's bytecode, where torch was installed without
"""
