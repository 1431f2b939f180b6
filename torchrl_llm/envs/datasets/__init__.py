"""envs.datasets."""
