"""Losses over rows of tokens, and the advantage estimators that go with them.

A loss reads rows and asks a :class:`~torchrl_llm.data.scoring.TokenScorer` for log-probs; it does
not depend on a model class. Its mathematics is in :mod:`torchrl_llm.functional`.
"""

from torchrl_llm._imports import lazy

lazy(__name__)
