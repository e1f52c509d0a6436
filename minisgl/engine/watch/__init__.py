"""Records the lives of requests, the pace and timeline of steps, slow moments, and profiles of steps."""
