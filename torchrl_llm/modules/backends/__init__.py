"""modules.backends."""
