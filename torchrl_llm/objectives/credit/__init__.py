"""objectives.credit."""
