"""Losses over rows of tokens, and advantage estimators.

A loss reads rows and gets log-probs from a :class:`~torchrl_llm.data.scoring.TokenScorer`. It does
not depend on a model class. Its mathematics is in :mod:`torchrl_llm.functional`.
"""

from torchrl_llm._imports import lazy

lazy(__name__)
