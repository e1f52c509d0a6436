"""Records the lives of requests, the pace of steps and slow moments, for those who ask why."""
