"""An engine that is no child of its server: it connects to it from anywhere."""
