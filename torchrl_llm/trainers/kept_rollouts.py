"""Rollouts that a run keeps: chooses rows of a step, adds their outcomes, and writes the files.

A row is stored as it was collected, with the results of training: its fate, its advantage, other
keys that the buffer's transforms wrote, and the mask reason of each token. If a buffer joins the
turns of a trajectory, each turn gets its part of the joined row.

Next: :class:`torchrl_llm.data.rollout_store.RolloutStore` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from torchrl._utils import logger

from torchrl_llm.data.enums import MaskReason
from torchrl_llm.data.nodes import cell, leaf, new_node, plain_node, set_copied
from torchrl_llm.data.ragged import lazy_rows, row_values
from torchrl_llm.data.replay_buffers.trajectory_queues import trajectory_of
from torchrl_llm.data.rollout_store import CHANGED, FOLDER, RolloutWriter
from torchrl_llm.data.rollouts import mask_trained, row_list
from torchrl_llm.data.wire import pack_rows
from torchrl_llm.errors import DataError
from torchrl_llm.trainers.ranks import ALONE, Ranks

SAMPLE_ROWS = 16
"""Rows of a step that ``logging.rollouts=sample`` keeps."""
Kept = Literal["sample", "all", "none"]
_REASON, _VALID = CHANGED
_PARTS = ("prompt", "full")
_FATES = {name: cell(name) for name in ("trained", "filtered", "invalid", "pending")}
_FATES |= {name: cell(name) for name in ("stale", "truncated", "overlong")}
# A prime, so that the kept groups move through all positions of a batch.
_STRIDE = 7919


@dataclass(eq=False)
class RowOutcomes:
    """Outcomes of the rows of a step.

    Attributes:
        rows: rows as collected, one per turn; then the rows of earlier steps that were decided in
            this step, already cut and marked.
        judged: the same rows, cut to the training length and marked where tokens must not be
            trained; unchanged rows are the same objects.
        trained: rows of the buffer, joined or not.
        waiting: trajectories (see ``trajectory_of``) that still wait for their group.
        num_carried: number of rows of earlier steps.
        is_known: whether there was a buffer at all.
        added: keys that :meth:`row` has taken from rows of the buffer.
    """

    rows: Sequence[TensorDict]
    judged: Sequence[TensorDict] = ()
    trained: Sequence[TensorDict] = ()
    waiting: frozenset[Any] = frozenset()
    num_carried: int = 0
    is_known: bool = True
    added: set[tuple[str, ...]] = field(default_factory=set)

    def sample(self, step: int, number: int) -> list[int]:
        """Choose some rows: whole groups if they fit, and always whole trajectories.

        Args:
            step: the training step; each starts at a different group.
            number: number of rows, or the rows of one trajectory if it has more.

        Returns:
            Their indices, ascending.
        """
        groups = self._groups()
        chosen: list[int] = []
        for turn in range(len(groups)):
            for rows in groups[(step * _STRIDE + turn) % len(groups)]:
                if chosen and len(chosen) + len(rows) > number:
                    return sorted(chosen)
                chosen += rows
        return sorted(chosen)

    def _groups(self) -> list[list[list[int]]]:
        """Indices of rows by trajectory, in a dict by group."""
        found: dict[Any, dict[Any, list[int]]] = {}
        for index, row in enumerate(self.rows):
            group, trajectory = (leaf(row, (name,)) for name in ("group_id", "traj_id"))
            members = found.setdefault(index if group is None else int(group), {})
            members.setdefault(index if trajectory is None else int(trajectory), []).append(index)
        return [list(members.values()) for members in found.values()]

    def row(self, index: int) -> TensorDict:
        """A row with its outcome.

        Args:
            index: its index in ``rows``.
        """
        collected, judged = self.rows[index], (self.judged or self.rows)[index]
        # If a row was cut, the cut-off part is kept, too.
        cut = judged is not collected and _length(judged) < _length(collected)
        row = new_node(dict((collected if cut else judged)._tensordict))
        if cut:
            _mask_end(row, judged)
        if self.is_known:
            trained = self._trained_row(collected)
            fate = self._fate(collected, judged) if trained is None else "trained"
            row._tensordict["fate"] = _FATES[fate]
            if trained is not None:
                self._give(row, trained)
            elif fate in ("filtered", "invalid"):
                mask_trained(row, MaskReason[fate.upper()])
            for path in CHANGED:
                before, after = leaf(collected, path), leaf(row, path)
                if before is None and path == _VALID and after is not None:
                    before = torch.ones_like(after)  # rewards without a flag are valid
                if before is not None and before is not after and not torch.equal(before, after):
                    set_copied(row, ("collected", path[-1]), before)
        if index >= len(self.rows) - self.num_carried:
            row._tensordict["carried"] = torch.tensor(True)
        return row

    # -- outcome of a row ---------------------------------------------------------------------

    @cached_property
    def _by_trajectory(self) -> dict[Any, list[TensorDict]]:
        found: dict[Any, list[TensorDict]] = {}
        for row in self.trained:
            found.setdefault(trajectory_of(row), []).append(row)
        return found

    @cached_property
    def _invalid(self) -> set[Any]:
        """Trajectories with a reward that is not valid."""
        stack = lazy_rows(self.rows)
        rewards = row_values(stack, ("next", "reward"), torch.sum, None)
        flags = row_values(stack, _VALID, torch.all, None)
        wrong = torch.zeros(len(self.rows), dtype=torch.bool)
        wrong = wrong if rewards is None else ~rewards.isfinite()
        wrong = wrong if flags is None else wrong | ~flags
        return {trajectory_of(self.rows[at]) for at in wrong.nonzero()[:, 0].tolist()}

    def _trained_row(self, row: TensorDict) -> TensorDict | None:
        """The row of the buffer that a turn is in."""
        candidates = self._by_trajectory.get(trajectory_of(row), ())
        if not candidates or trajectory_of(row) is None:
            return None
        turn = leaf(row, ("turn",))
        if turn is None:
            return candidates[0]
        for other in candidates:
            last, held = leaf(other, ("turn",)), leaf(other, ("num_turns",))
            behind = int(last) - int(turn)
            if 0 <= behind < (1 if held is None else int(held)):
                return other
        return None

    def _fate(self, collected: TensorDict, judged: TensorDict) -> str:
        if trajectory_of(collected) in self.waiting:
            return "pending"
        if judged is not collected:
            reasons = leaf(judged, _REASON)
            for reason in (MaskReason.STALE, MaskReason.TRUNCATED, MaskReason.OVERLONG):
                if reasons is not None and bool((reasons == reason).any()):
                    return reason.name.lower()
        return "invalid" if trajectory_of(collected) in self._invalid else "filtered"

    def _give(self, row: TensorDict, trained: TensorDict) -> None:
        """Copy a turn's part of the buffer's keys and mask reasons from a joined row to its row.

        A joined row ends with its last turn, and each turn is a prefix of the next.
        """
        spans: dict[int, slice] = {}
        missing = 0  # tokens that were cut off before the row was trained
        ids = [leaf(each, ("tokens", part)) for each in (row, trained) for part in _PARTS]
        if all(each is not None for each in ids):
            prompt, end, first, whole = (each.shape[0] for each in ids)
            spans = {whole - first: slice(prompt - first, end - first), whole: slice(0, end)}
            missing = max(end - whole, 0)
        for path, value in _added(trained, row):
            if isinstance(value, Tensor) and value.ndim and value.shape[0] in spans:
                value = value[spans[value.shape[0]]]
                if missing:
                    value = torch.cat([value, value.new_zeros(missing, *value.shape[1:])])
            set_copied(row, path, value)
            self.added.add(path)
        reasons, own = leaf(trained, _REASON), leaf(row, _REASON)
        if reasons is not None and own is not None:
            size = own.shape[0]
            set_copied(row, _REASON, torch.cat([reasons[:size], own[reasons.shape[0] :]]))


def _length(row: TensorDict) -> int:
    return leaf(row, ("tokens", "full")).shape[0]


def _added(trained: Any, row: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Leaves of a trained row that its turn does not have."""
    known = row._tensordict
    for name, value in trained._tensordict.items():
        own = known.get(name)
        if own is value or (own is not None and isinstance(value, (Tensor, NonTensorData))):
            continue  # rows of the buffer share unchanged values
        inner, here = plain_node(value), (*path, name)
        if type(inner) is TensorDict:
            yield from _added(inner, new_node({}) if own is None else plain_node(own), here)
        elif own is None and here != ("num_turns",):
            yield here, value


def _mask_end(row: TensorDict, judged: TensorDict) -> None:
    """Write the mask reasons of a whole row: of the kept part, and then of the cut-off part."""
    mask_trained(row, MaskReason.OVERLONG)
    left, own = leaf(judged, _REASON), leaf(row, _REASON)
    if left is not None and own is not None:
        set_copied(row, _REASON, torch.cat([left, own[left.shape[0] :]]))


class KeptRollouts:
    """The rollouts of a run, written step by step.

    Rows that cannot be written (a full disk, a value without a safe form) do not end the run: a
    warning appears once, the next step tries again, and :attr:`failures` counts the failures.

    Args:
        folder: folder of the run.
        kept: which rows of a step to keep.
        ranks: the processes that train together; rank 0 writes the rows of all.
        tools: schemas of the tools that prompts describe.

    Attributes:
        failures: steps whose rows could not be written.
    """

    def __init__(
        self, folder: Path, kept: Kept, ranks: Ranks = ALONE, tools: Sequence[Any] | None = None
    ) -> None:
        self.folder = folder / FOLDER
        self._ranks = ranks
        self.failures = 0
        self._kept, self._writer = kept, RolloutWriter(self.folder)
        self._tools = None if tools is None else list(tools)

    def record(self, step: int, outcomes: RowOutcomes) -> None:
        """Write rows of a step. All ranks have to call it.

        Args:
            step: its number.
            outcomes: outcomes of its rows; each rank passes its own.
        """
        if self._kept == "none":
            return
        sharing = sum(self._ranks.gather(bool(outcomes.rows)))  # 1 if one rank collects for all
        number = max(SAMPLE_ROWS // max(sharing, 1), 1)
        every = range(len(outcomes.rows))
        takes_all = self._kept == "all" or not outcomes.rows
        chosen = every if takes_all else outcomes.sample(step, number)
        rows = [outcomes.row(index) for index in chosen]
        collected, added = len(every) - outcomes.num_carried, outcomes.added
        if self._ranks.world > 1:
            parts = self._ranks.to_main((rows and pack_rows(rows), collected, added))
            if parts is None:
                return
            rows = [row for part, *_ in parts if part for row in row_list(part.unpack())]
            collected = sum(number for _, number, _ in parts)
            added = set().union(*(paths for *_, paths in parts))
        if not rows:
            return
        about = {"kept": self._kept, "collected": collected, "added": sorted(map(list, added))}
        about |= {"tools": self._tools}
        try:
            self._writer.append(step, rows, about)
        except (OSError, DataError) as error:
            self.failures += 1
            if self.failures == 1:
                logger.warning(
                    f"the rollouts of step {step} could not be written to {self.folder} "
                    f"({type(error).__name__}: {error}); the run continues (reported once). "
                    "logging.rollouts=none keeps none"
                )

    def flush(self) -> None:
        """Flush the rollouts to the disk before a checkpoint refers to them."""
        try:
            self._writer.flush()
        except OSError as error:
            logger.warning(f"the rollouts in {self.folder} may not be on the disk: {error}")

    def sizes(self) -> dict[str, int]:
        """Bytes of each file so far, for :meth:`resume`; rank 0 has them."""
        return self._writer.sizes() if self._ranks.is_main else {}

    def resume(self, step: int, sizes: Mapping[str, int] | None = None) -> list[str]:
        """Continue after a step; later rows are dropped.

        Args:
            step: the last step to keep; 0 for a new run.
            sizes: result of :meth:`sizes` after that step.

        Returns:
            Problems of the files, one line each.
        """
        if not self._ranks.is_main or not (sizes or self.folder.is_dir()):
            return []
        last = self._writer.cut(step, sizes)
        told = list(self._writer.damaged)
        if last is not None and last != step and self._kept != "none":
            told.append(
                f"{self.folder} ended at step {last}: the rows of the steps up to {step} are lost"
            )
        return told
