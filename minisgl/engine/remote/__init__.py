"""An engine that its server has not started: it connects to the server over TCP, from any host."""
