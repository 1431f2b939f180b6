"""envs.reward."""
