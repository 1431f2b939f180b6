"""Configuration of the GRPO recipes: groups, defaults, and invalid combinations.

A key exists only where it has an effect, and no two keys mean the same. ``load_config`` turns
Hydra's composed configuration (or any nested mapping) into :class:`GRPOConfig`; for TorchRL's old
names it raises an error with the new name.
"""

from torchrl_llm._imports import lazy

lazy(__name__)
