"""`minisgl verify`: compares the engine on this machine with transformers on the same checkpoint.

Each file has one part: the prompts, what the engine computes, what transformers computes, their distance,
and what a difference means.
"""
