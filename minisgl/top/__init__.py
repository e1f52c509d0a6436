"""`minisgl top`: a running server in the terminal."""
