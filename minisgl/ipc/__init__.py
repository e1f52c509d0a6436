"""Between processes: messages, sockets, and how a child process is started."""
