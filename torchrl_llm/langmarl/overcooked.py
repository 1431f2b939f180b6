"""The ``overcooked`` environment: its configuration is checked here, but it cannot be played.

Its players are ProAgents, which no package on PyPI has, and ``overcooked-ai`` 1.1.0 does not run
beside the base packages: it reads ``numpy.Inf``, which NumPy 2 removed.
"""

from __future__ import annotations

from typing import Any, Self

from torchrl_llm._registry import register
from torchrl_llm.errors import ConfigError
from torchrl_llm.langmarl.config import OvercookedConfig
from torchrl_llm.langmarl.environment import BaseEnvironment


@register("environments", "overcooked")
class OvercookedEnvironment(BaseEnvironment):
    """Two cooks in a kitchen; making it says what is missing, and what can be done.

    Args:
        config: of the training.

    Raises:
        ConfigError: always.
    """

    ENV_NAME, CONFIG_CLASS = "overcooked", OvercookedConfig

    def __new__(cls, config: Any) -> Self:
        """Refuse, before the abstract methods that are missing are looked for."""
        raise ConfigError(
            "the environment 'overcooked' needs overcooked-ai with its ProAgent players; they do "
            "not run beside the base packages (NumPy 2) and are no part of torchrl_llm. Register "
            'one of your own: @register_env("my_overcooked") on a subclass of BaseEnvironment '
            "with reset, step, collect_trajectory and CONFIG_CLASS = OvercookedConfig; then set "
            'env="my_overcooked" in the configuration'
        )
