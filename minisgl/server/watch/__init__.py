"""Answers what the server does and why: requests and their waits, slow moments, ten minutes of figures."""
