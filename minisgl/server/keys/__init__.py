"""Users with keys of their own: their limits, their shares, and what they have used."""
