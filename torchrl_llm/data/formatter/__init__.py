"""data.formatter."""
