"""Log of a run: a file, and the console."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from numbers import Real
from typing import Any

from torchrl_llm._log import tell_once
from torchrl_llm._masking import masked
from torchrl_llm._run_log import printable, say
from torchrl_llm.errors import CheckpointError, ConfigError
from torchrl_llm.langmarl.store import BaseStore, run_folder

_SHOWN = 200
_FORMAT = logging.Formatter("%(asctime)s %(levelname)s %(message)s")


class RunLogger:
    """Writes the events of a run to ``logs/train.log`` and to the console.

    If the file cannot be written, the log is lost but the run continues.

    Args:
        store: store of the run.
        run_id: name of the run.
        level: level of both: ``DEBUG``, ``INFO``, ``WARNING`` or ``ERROR``.

    Raises:
        ConfigError: the level is unknown.
    """

    def __init__(self, store: BaseStore, run_id: str, *, level: str = "INFO") -> None:
        number = logging.getLevelNamesMapping().get(str(level).upper())
        if number is None:
            raise ConfigError(f"log_level must be DEBUG, INFO, WARNING or ERROR, got {level!r}")
        self._store, self._level = store, number
        self._path = f"{run_folder(run_id)}/logs/train.log"

    def _log(self, level: int, message: str) -> None:
        if level < self._level:
            return
        text = "\n".join(masked(printable(line)) for line in str(message).splitlines())
        record = logging.LogRecord("langmarl", level, "", 0, text, None, None)
        line = _FORMAT.format(record)
        try:
            self._store.append_line(self._path, line)
        except CheckpointError as error:
            tell_once(f"the log of the run is not complete: {error}")
        say(line)

    def info(self, message: str) -> None:
        """Log information."""
        self._log(logging.INFO, message)

    def debug(self, message: str) -> None:
        """Log details for debugging."""
        self._log(logging.DEBUG, message)

    def warning(self, message: str) -> None:
        """Log a possible problem."""
        self._log(logging.WARNING, message)

    def error(self, message: str) -> None:
        """Log an error."""
        self._log(logging.ERROR, message)

    def iteration_start(self, iteration: int, policies: Mapping[str, str]) -> None:
        """Log the lengths of the policies at the start of an iteration."""
        sizes = ", ".join(f"{name} {len(text)}" for name, text in policies.items())
        self.debug(f"iteration {iteration}: policies (characters): {sizes}")

    def iteration_end(self, iteration: int, stats: Mapping[str, Any]) -> None:
        """Log the statistics of an iteration.

        Raises:
            ConfigError: a value is missing or is not a number.
        """
        for name in ("avg_reward", "num_episodes", "total_tokens", "cost_usd"):
            if isinstance(stats.get(name), bool) or not isinstance(stats.get(name), Real):
                raise ConfigError(
                    f"the statistics of an iteration need {name}, a number, got {stats.get(name)!r}"
                )
        self.debug(
            f"iteration {iteration}: avg_reward {stats['avg_reward']:.3f}, "
            f"{stats['num_episodes']} episodes, {stats['total_tokens']} tokens, "
            f"{stats['cost_usd']:.4f} USD"
        )

    def episode_saved(self, iteration: int, episode_id: int, reward: float) -> None:
        """Log an episode."""
        self.debug(f"iteration {iteration}: episode {episode_id} saved, reward {reward}")

    def evaluation_done(
        self, iteration: int, episode_id: int, paradigm: str, response: str
    ) -> None:
        """Log the beginning of the critic's answer."""
        said = " ".join(str(response).split())[:_SHOWN]
        self.debug(f"iteration {iteration}: episode {episode_id} evaluated ({paradigm}): {said}")

    def gradient_saved(self, iteration: int, agent_name: str, num_gradients: int) -> None:
        """Log the number of gradients of an agent."""
        self.debug(f"iteration {iteration}: {num_gradients} gradients of {agent_name}")

    def close(self) -> None:
        """Do nothing: the file is opened and closed for each line."""
