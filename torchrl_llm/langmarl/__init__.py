"""Training in language space: policies are texts, credit and gradients are texts, too.

:func:`train` runs a configuration; the parts can be composed by hand. The names are those of
LangMARL, see the reference page.
"""

from torchrl_llm._imports import lazy

lazy(__name__)
