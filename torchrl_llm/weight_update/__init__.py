"""weight_update."""
