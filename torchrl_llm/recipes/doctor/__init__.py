"""Check a configuration before a long run: find problems and waste, and name the keys.

A check is a function of a :class:`~torchrl_llm.recipes.doctor.subject.Subject` that yields
findings. All checks are in one table, :data:`~torchrl_llm.recipes.doctor.examine.CHECKS`. The
checks do not train and do not write files.

Next: :mod:`torchrl_llm.recipes.doctor.examine` runs them; ``torchrl-llm doctor`` prints the
findings.
"""
