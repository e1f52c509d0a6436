"""One model over several ranks: sizes, placements and sums."""
