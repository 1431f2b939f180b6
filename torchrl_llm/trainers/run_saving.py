"""Saving and resuming of a run: the content of a checkpoint, and which object gets which part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from torchrl_llm._masking import masked
from torchrl_llm.errors import DamagedCheckpointError, TorchRLLLMError
from torchrl_llm.trainers.checkpoint import CheckpointStore, load_rng_state, rng_state
from torchrl_llm.trainers.kept_rollouts import KeptRollouts
from torchrl_llm.trainers.metrics import MetricsTable, number
from torchrl_llm.trainers.rank_state import rank_state
from torchrl_llm.trainers.ranks import Ranks
from torchrl_llm.trainers.reward_watch import RewardWatch
from torchrl_llm.trainers.run_config import check_resumed
from torchrl_llm.trainers.run_folder import METRICS_FILE
from torchrl_llm.trainers.run_models import RunModels, load_part_states, part_states, split_parts


class Stateful(Protocol):
    """A part of a run: optimizer, schedule, collector, buffer, ledger."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Load a result of :meth:`state_dict`."""


class RunPosition(NamedTuple):
    """Position of a run.

    Attributes:
        step: the last started step.
        before: conversations of the first evaluation.
        after: conversations of the last evaluation.
        owed: metrics of a step whose row is written after its evaluation.
    """

    step: int
    before: list[str]
    after: list[str]
    owed: dict[str, Any] | None


@dataclass(kw_only=True)
class RunSaving:
    """Writes and reads the checkpoints of a run.

    Attributes:
        store: store of the checkpoints.
        models: models of the run.
        parts: other objects that the next step depends on, by name, in the order of restoring.
        names: names of the models' parameters, see :func:`names_of_parameters`.
        rollouts: kept rows.
        watch: watch of the rewards.
        table: the metrics of the run.
        ranks: the processes that train together.
        config: dotted key to value.
        max_shard_size: maximum size of a file of weights.
        retired: states of removed ranks.
    """

    store: CheckpointStore
    models: RunModels
    parts: Mapping[str, Stateful]
    names: Any
    rollouts: KeptRollouts
    watch: RewardWatch
    table: MetricsTable
    ranks: Ranks
    config: Mapping[str, Any]
    max_shard_size: str
    retired: list[Any] = field(default_factory=list)

    def save(self, position: RunPosition) -> Path:
        """Write a checkpoint.

        Args:
            position: where the run is.

        Returns:
            Its folder.
        """
        self.rollouts.flush()
        shared, own = split_parts(self.parts)
        state = {
            "step": position.step,
            "config": self.config,
            "before": position.before,
            "after": position.after,
            "owed": position.owed and {k: number(v) for k, v in position.owed.items()},
            "models": self.models.state(),
            "parts": part_states(shared, self.names),
            "watch": self.watch.state_dict(),
            "retired": self.retired,
            "rollouts": self.rollouts.sizes(),
        }
        of_rank = {"parts": part_states(own, self.names), "rng": rng_state()}
        return self.store.save(position.step, state, own=of_rank, write_model=self._write_models)

    def _write_models(self, path: Path) -> dict[str, int]:
        if self.ranks.is_main:
            self.table.save(path / "metrics.csv")
        is_main = self.ranks.is_main
        return self.models.write(path, max_shard_size=self.max_shard_size, is_main=is_main)

    def resume(self) -> tuple[RunPosition, list[str]]:
        """Continue from the newest whole checkpoint.

        Returns:
            The position of the run, and one line per repair.

        Raises:
            ConfigError: the configuration belongs to a different run.
            CheckpointError: the newest checkpoint is of different models, or none is whole.
        """
        step, state, repairs = 0, {}, []
        if self.ranks.is_main:
            step, state, repairs = self.store.load_newest_whole(self._look_at)
        step = self.ranks.from_main(step)
        if not self.ranks.is_main:
            state = self.store.load(step, check=False)  # rank 0 has checked it
        path = self.store.path(step)
        with _naming_state(path):
            check_resumed(masked(state["config"]), self.config)
            mine, notice = self._load_parts(path, step, state)
        repairs += [notice] if notice else []
        repairs += self.rollouts.resume(step, state.get("rollouts"))
        position = RunPosition(step, state["before"], state["after"], state.get("owed"))
        if self.ranks.is_main:
            repairs += self._resume_metrics(position, path / METRICS_FILE)
        load_rng_state(mine["rng"])
        return position, repairs

    def _look_at(self, step: int, state: Mapping[str, Any]) -> None:
        match state:
            case {
                "step": number,
                "config": dict(),
                "before": list(),
                "after": list(),
                "models": dict(),
                "parts": dict(),
                "watch": {"equal": list(), "failures": dict()},
                "retired": list(),
                "ranks": [{"parts": dict(), "rng": {"python": _, "numpy": _, "torch": _}}, *_],
            } if number == step:
                return
        raise DamagedCheckpointError(f"{self.store.path(step)} holds no state of a run's step")

    def _resume_metrics(self, position: RunPosition, copy: Path) -> Iterator[str]:
        is_whole = self.store.is_whole(position.step, copy.name)
        if is_whole is False:
            yield f"{copy} is damaged or gone, and is not used"
        given = None if is_whole is False or not copy.exists() else copy
        written = position.step - (position.owed is not None)
        wrong = self.table.resume(written, given, is_checked=bool(is_whole))
        if wrong is not None and written:
            mended = "mended from the checkpoint" if given else "its rows are lost"
            yield f"{wrong}; {mended}, to step {written}"

    def _load_parts(
        self, path: Path, step: int, state: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], str | None]:
        """Load the states of models and parts; returns the state of this rank and a notice."""
        self.models.load(path, state["models"])
        shared, own = split_parts(self.parts)

        def read(wanted: dict[str, Any]) -> None:
            self.store.read_spread(step, wanted)

        load_part_states(shared, state["parts"], self.names, read=read)
        fresh = {"parts": part_states(own, self.names), "rng": rng_state()}
        mine, self.retired, notice = rank_state(
            state["ranks"],
            state["retired"],
            fresh,
            rank=self.ranks.rank,
            world=self.ranks.world,
            is_shared=sum(self.ranks.gather(bool(own))) > 1,
        )
        load_part_states(own, mine["parts"], self.names, read=read)
        self.watch.load_state_dict(state["watch"])
        return mine, notice


@contextmanager
def _naming_state(path: Path) -> Iterator[None]:
    """Name the part in an error: a state with the correct checksum may not fit it."""
    try:
        yield
    except (TorchRLLLMError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # wrong values can raise any error
        raise DamagedCheckpointError(
            f"a part of this run cannot load its state from {path} ({type(error).__name__}:"
            f" {error}): it is damaged, or of something else. Rename that folder, and the same"
            " command resumes from the checkpoint before it, or starts a new run"
        ) from error
