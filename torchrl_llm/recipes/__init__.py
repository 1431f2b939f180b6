"""Configuration of the GRPO recipes: groups, defaults, and what cannot go together.

A key exists only where it has an effect, and no two keys mean the same. ``load_config`` turns what
Hydra composed (or any nested mapping) into :class:`GRPOConfig`; TorchRL's old names are refused
with the new one.
"""

from torchrl_llm._imports import lazy

lazy(__name__)
