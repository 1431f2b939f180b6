"""envs.transforms."""
