"""The server processes of --api-workers, and how they ask each other for figures."""
