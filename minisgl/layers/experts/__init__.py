"""The experts of a mixture, by the kind of their weights."""
