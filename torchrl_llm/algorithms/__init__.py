"""Algorithms: a loss and an advantage estimator under one name, and presets from papers.

Any loss can be combined with any advantage estimator. A preset is a pair with the defaults of its
paper; ``style="ludic"`` uses the defaults of Ludic's code if they differ. In
``sota-implementations/grpo`` the same pairs are configured as ``loss=... advantage=...``.
"""

from torchrl_llm._imports import lazy

lazy(__name__)
