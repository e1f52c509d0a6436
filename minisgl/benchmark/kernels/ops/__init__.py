"""What is measured of each op: its problems, candidates and baselines."""
