"""Parts of a training loop: configuration, batches, optimizer, ledger, metrics, checkpoints.

There is no trainer class: a recipe writes its training loop on one page and imports the parts that
are the same for every algorithm (see ``sota-implementations/grpo/grpo-sync.py``).
"""

from torchrl_llm._imports import lazy

lazy(__name__)
