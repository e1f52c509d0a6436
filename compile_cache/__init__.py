"""Keeps the compiled code of torch.compile and Triton on disk, so that later starts find it.

key.py       the machine and versions that compiled code belongs to
store.py     opens a cache entry at start, publishes its files, closes it
manifest.py  the list of an entry's files with their checksums
entries.py   lists, deletes, exports and imports entries
bytecode.py  caches Python bytecode, if torch was installed without
"""
