"""Check a configuration before a long run: finds problems and waste, and names the keys.

A check is a function of a :class:`~torchrl_llm.recipes.doctor.subject.Subject` that yields
findings; all of them are in one table, :data:`~torchrl_llm.recipes.doctor.examine.CHECKS`. The
checks do not train and do not write files.

Next: :mod:`torchrl_llm.recipes.doctor.examine` runs them; ``torchrl-llm doctor`` prints.
"""
