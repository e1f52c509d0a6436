"""Changes the engines' settings or the model while the server serves."""
