"""Log-probs of sampled tokens under a teacher, or under that of several which a row names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.data.replay_buffers.trajectory_queues import as_path
from torchrl_llm.data.row_transform import Path, RowTransform, RowView
from torchrl_llm.data.scoring import TokenScorer, check_same_vocabulary
from torchrl_llm.envs.transforms.retrieve_log_prob import RetrieveLogProb
from torchrl_llm.errors import ConfigError, DataError


class RetrieveTeacherLogProb(RowTransform):
    """Scores each row with its teacher, for distillation.

    Writes what :class:`~torchrl_llm.envs.transforms.RetrieveLogProb` writes, under ``("next",
    "teacher_log_probs", "full")``: float32 along ``("tokens", "full")``, nats, 0.0 where not
    scored. With several teachers (multi-teacher on-policy distillation) each row names its own, by
    the domain of its problem for example: a string in the row, such as a column of the data set.

    - In a replay buffer append it after what reads it, which is
      :class:`~torchrl_llm.objectives.credit.TeacherKL`; before
      :class:`~torchrl_llm.data.replay_buffers.JoinTurns` and credit where only the loss does
      (:class:`~torchrl_llm.objectives.OnPolicyDistillationLoss`).
    - In an environment it works as well, at every step.

    Args:
        teachers: one scorer for all rows, or a scorer for each name.
        student: the policy whose rows these are. A teacher with another vocabulary is refused.
        key: where a row names its teacher; read where there are several.
        log_probs_full_key: where the log-probs go, below ``"next"``.
        assistant_only: score the assistant's tokens only; otherwise every token but the first.
        temperature_key: temperature of each row; rows without one are scored at 1.
        token_budget: tokens that a teacher is given at once, with the padding of a padded layout;
            ``None`` for all of its rows at once.

    Raises:
        ConfigError: without teachers, or for teachers that score nothing or have different
            vocabularies.
        DataError: for a row that names no teacher, or one that is not there.

    Example:
        >>> from tensordict import NonTensorData, TensorDict
        >>> from torchrl_llm.data.replay_buffers import ReplayBuffer
        >>> from torchrl_llm.data.scoring import TokenScores
        >>> class Coin(TokenScorer):
        ...     def __init__(self, log_prob):
        ...         self.log_prob = log_prob
        ...     def token_scores(self, sequences, select, **_):
        ...         count = sum(int(mask.sum()) for mask in select)
        ...         return TokenScores(torch.full((count,), self.log_prob))
        >>> teachers = {"heads": Coin(-0.5), "tails": Coin(-2.0)}
        >>> transform = RetrieveTeacherLogProb(teachers, assistant_only=False)
        >>> buffer = ReplayBuffer(transform=transform)
        >>> ids = torch.arange(2)
        >>> rows = [TensorDict(tokens={"full": ids}, domain=NonTensorData(x)) for x in teachers]
        >>> index = buffer.extend(rows)
        >>> [buffer[i]["next", "teacher_log_probs", "full"].tolist() for i in range(2)]
        [[0.0, -0.5], [0.0, -2.0]]
    """

    def __init__(
        self,
        teachers: TokenScorer | Mapping[str, TokenScorer],
        *,
        student: TokenScorer | None = None,
        key: NestedKey = "domain",
        log_probs_full_key: NestedKey = ("teacher_log_probs", "full"),
        assistant_only: bool = True,
        temperature_key: NestedKey = ("tokens", "temperature"),
        token_budget: int | None = 65536,
    ) -> None:
        super().__init__()
        self.key = key
        self._one = isinstance(teachers, TokenScorer)
        if not self._one and not isinstance(teachers, Mapping):
            raise ConfigError(
                "teachers must be a TokenScorer (TransformersBackend(model) makes one of a model) "
                f"or some by name, got {type(teachers).__name__}"
            )
        named = {"the teacher": teachers} if self._one else dict(teachers)
        if not named:
            raise ConfigError("there must be at least one teacher")
        self._scoring = {
            name: RetrieveLogProb(
                teacher,
                log_probs_full_key=log_probs_full_key,
                assistant_only=assistant_only,
                temperature_key=temperature_key,
                token_budget=token_budget,
            )
            for name, teacher in named.items()
        }
        known = [*named.items()] if student is None else [("the student", student), *named.items()]
        first, one = known[0]
        for name, other in known[1:]:
            check_same_vocabulary(one, other, names=(first, name))

    @property
    def teachers(self) -> dict[str, TokenScorer]:
        """The teachers by name."""
        return {name: scoring.model for name, scoring in self._scoring.items()}

    @property
    def written(self) -> Path:
        """Where the log-probs are."""
        return next(iter(self._scoring.values())).written

    def columns(self, rows: RowView) -> dict[Path, list[Tensor]]:
        """The log-probs, of each row from its teacher."""
        if self._one:
            (scoring,) = self._scoring.values()
            return {self.written: scoring.log_probs(rows)}
        found: list[Tensor] = [torch.zeros(0)] * len(rows)
        for name, index in self._classes(rows).items():
            scored = self._scoring[name].log_probs(_Part(rows, index))
            for row, values in zip(index, scored, strict=True):
                found[row] = values
        return {self.written: found}

    def _classes(self, rows: RowView) -> dict[str, list[int]]:
        """The rows of each teacher."""
        advice = "with several teachers each row names its own"
        classes: dict[str, list[int]] = {}
        for row, value in enumerate(rows.read(as_path(self.key), advice)):
            name = _name(value)
            if name not in self._scoring:
                raise DataError(
                    f"row {row} names the teacher {name!r} at {self.key!r}, and there are "
                    f"{', '.join(self._scoring)}"
                )
            classes.setdefault(name, []).append(row)
        return classes


class _Part(RowView):
    """Some of the rows of a view."""

    def __init__(self, rows: RowView, index: Sequence[int]) -> None:
        super().__init__(rows.root, rows.next_rows)
        self._rows, self._index = rows, index

    def __len__(self) -> int:
        return len(self._index)

    def read(self, path: Path, advice: str | None = None) -> list[Tensor] | None:
        values = self._rows.read(path, advice)
        return None if values is None else [values[row] for row in self._index]

    def stepped(self) -> list[bool]:
        flags = self._rows.stepped()
        return [flags[row] for row in self._index]


def _name(value: Any) -> Any:
    """A string that a row holds; tensordict hands it out bare or in a cell."""
    return value.data if isinstance(value, NonTensorData) else value
