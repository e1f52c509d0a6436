"""Load on a server, and the figures that its users would see."""
