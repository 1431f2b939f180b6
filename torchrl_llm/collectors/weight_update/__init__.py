"""collectors.weight_update."""
