"""The ``overcooked`` environment: its configuration is checked, but it cannot be played.

Its players are ProAgents, which are not on PyPI, and ``overcooked-ai`` 1.1.0 is incompatible with
the base packages: it uses ``numpy.Inf``, which NumPy 2 removed.
"""

from __future__ import annotations

from typing import Any, Self

from torchrl_llm._registry import register
from torchrl_llm.errors import ConfigError
from torchrl_llm.langmarl.config import OvercookedConfig
from torchrl_llm.langmarl.environment import BaseEnvironment


@register("environments", "overcooked")
class OvercookedEnvironment(BaseEnvironment):
    """Two cooks in a kitchen; the constructor raises an error that explains what is missing.

    Args:
        config: the training configuration.

    Raises:
        ConfigError: always.
    """

    ENV_NAME, CONFIG_CLASS = "overcooked", OvercookedConfig

    def __new__(cls, config: Any) -> Self:
        """Raise before the check for missing abstract methods."""
        raise ConfigError(
            "the environment 'overcooked' needs overcooked-ai with its ProAgent players; they do "
            "not run next to the base packages (NumPy 2) and are not part of torchrl_llm. Register "
            'one of your own: @register_env("my_overcooked") on a subclass of BaseEnvironment '
            "with reset, step, collect_trajectory and CONFIG_CLASS = OvercookedConfig; then set "
            'env="my_overcooked" in the configuration'
        )
