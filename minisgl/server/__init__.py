"""The HTTP server: routes, open streams, statistics. It never loads torch."""
