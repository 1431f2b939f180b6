"""Training in language space: policies, credit and gradients are texts.

:func:`train` runs a configuration; the parts can be composed by hand. The names are the names of
LangMARL, see the reference page.
"""

from torchrl_llm._imports import lazy

lazy(__name__)
