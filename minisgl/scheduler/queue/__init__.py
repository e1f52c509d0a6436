"""Who is next: the waiting requests, the rules between them, and fair shares between users."""
