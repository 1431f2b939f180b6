"""Look at a configuration before a long run: what would fail, mislead or waste it, and which key.

A check is a function of a :class:`~torchrl_llm.recipes.doctor.subject.Subject` that yields
findings; all of them are in one table, :data:`~torchrl_llm.recipes.doctor.examine.CHECKS`. Nothing
is trained and nothing is written.

Next: :mod:`torchrl_llm.recipes.doctor.examine` runs them; ``torchrl-llm doctor`` prints.
"""
