"""modules.policies."""
