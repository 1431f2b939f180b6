"""Columns that a second model writes: log-probs of a reference or a teacher, values of a critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from tensordict import NonTensorData, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Composite

from torchrl_llm._checked import Ge, checked
from torchrl_llm._log import tell_once
from torchrl_llm._registry import FullSignature
from torchrl_llm.data.encoded_rows import encode_rows, row_formatter
from torchrl_llm.data.logit_scores import as_scorer
from torchrl_llm.data.replay_buffers.trajectory_queues import Trajectory, as_path
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.data.row_transform import Path, RowTransform, RowView, pieces_under_budget
from torchrl_llm.data.scoring import ScoreExtras, Support, TokenScorer, check_same_vocabulary
from torchrl_llm.data.specs import RaggedSpec
from torchrl_llm.errors import ConfigError, DataError


def _in_pieces(
    sequences: Sequence[Tensor],
    masks: Sequence[Tensor],
    token_budget: int | None,
    score: Callable[[list[int], list[Tensor]], Tensor],
) -> list[Tensor]:
    """Scores of the tokens that masks select, 0.0 elsewhere; pieces stay within the budget."""
    found = [torch.zeros(ids.shape, device=ids.device) for ids in sequences]
    asked = [row for row, mask in enumerate(masks) if bool(mask.any())]
    for piece in pieces_under_budget(asked, [ids.shape[0] for ids in sequences], token_budget):
        chosen = [masks[row] for row in piece]
        values = score(piece, chosen).float().to(chosen[0].device)
        counts = [int(mask.sum()) for mask in chosen]
        for row, mask, own in zip(piece, chosen, values.split(counts), strict=True):
            found[row] = found[row].masked_scatter(mask, own)
    return found


def _unpadded(rows: RowView, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Bool ``[T_b]`` of each row, false at padding, which a model must not see as a prefix."""
    kept = rows.read(("masks", "all_attention_mask"))
    if kept is None:
        return [torch.ones_like(ids, dtype=torch.bool) for ids in sequences]
    return [mask.bool() for mask in kept]


def tell_padding_side(padding_side: str) -> None:
    """Log that TorchRL's argument has no effect, unless it has its default.

    Args:
        padding_side: ``"left"``, TorchRL's default, or ``"right"``.
    """
    if padding_side == "right":
        tell_once("padding_side has no effect: log-probs stand where the tokens stand")


def _own_name(model: Any) -> str:
    name = getattr(model, "log_probs_key", None)
    return "ref_log_probs" if name in (None, "log_probs") else name


class RetrieveLogProb(RowTransform):
    """Scores ``("tokens", "full")`` of each row with a given model.

    Writes float32 rows aligned with the tokens, in nats, log p(x_t | x_<t), 0.0 where not scored.

    - In an environment, or called on rows, they go to ``("next", *log_probs_full_key)``, where
      losses look for a reference.
    - In a replay buffer they are written with the rows (as an inverse transform), to the same
      place. Append it *before* :class:`~torchrl_llm.data.replay_buffers.JoinTurns` and the credit
      assigner if only the loss reads the log-probs: it then runs last, on joined and filtered rows,
      and scores each token once.

    With ``root`` the log-probs are written into the row itself. This is for the log-probs of the
    trainer before its update, which :class:`~torchrl_llm.objectives.PolicyGradientLoss` compares
    with the sampler's when a correction is set::

        buffer.append_transform(
            RetrieveLogProb(policy, log_probs_full_key=("prox_log_probs", "full"), root=True)
        )

    The model is no submodule of the transform: ``eval()``, ``to()`` and the state of a buffer do
    not affect it, so that it may be the policy in training.

    Args:
        model: any object that scores tokens, such as a
            :class:`~torchrl_llm.modules.policies.TransformersWrapper` or a module that
            ``ModuleScorer`` accepts.
        log_probs_full_key: where the log-probs go, a nested key; by default ``"full"`` of the
            model's ``log_probs_key`` if that is not its default, otherwise ``("ref_log_probs",
            "full")``.
        assistant_only: score only the assistant's tokens, which ``("masks", "all_assistant_mask")``
            marks; otherwise every token except the first.
        tokenizer_kwargs: keyword arguments of :class:`~torchrl_llm.data.text.ChatFormatter`, such
            as ``chat_template_name``, for rows that have only conversations.
        detach: score without gradients.
        device: move the model there once, if it is a module.
        tokenizer: encodes rows that have only conversations (``("history", "full")``); the model's
            tokenizer by default. The ids of other rows are used unchanged.
        padding_side: no effect; log-probs are aligned with the tokens.
        temperature_key: temperature of each row, float32 ``[B]``; rows without one are scored at 1.
            If rows have a ``"support"`` (the ids that truncated sampling kept), they are scored on
            it.
        root: write into the row itself instead of its ``"next"``; in a replay buffer only.
        token_budget: tokens per call of the model, including the padding of a padded layout; the
            result does not depend on it. ``None`` for all rows at once.

    Raises:
        ConfigError: for a model that cannot score, a key that is not nested, or a budget below 1.
        DataError: for rows without ids, conversations and text (``("text", "full")``, which is
            encoded as the policy encodes it), or without a mask where one is needed.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.ragged import ragged_rows, read_rows
        >>> from torchrl_llm.data.scoring import TokenScores
        >>> class Coin(TokenScorer):
        ...     def token_scores(self, sequences, select, **_):
        ...         return TokenScores(torch.full((sum(int(s.sum()) for s in select),), -0.69))
        >>> td = TensorDict(tokens=ragged_rows({"full": [torch.tensor([1, 2])]}), batch_size=[1])
        >>> td = RetrieveLogProb(Coin(), assistant_only=False)(td)
        >>> [row.tolist() for row in read_rows(td, ("next", "ref_log_probs", "full"))]
        [[0.0, -0.6899999976158142]]
    """

    @checked
    def __init__(
        self,
        model: TokenScorer | torch.nn.Module,
        *,
        log_probs_full_key: NestedKey | None = None,
        assistant_only: bool = True,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        detach: bool = True,
        device: torch.device | str | None = None,
        tokenizer: Any = None,
        padding_side: Literal["left", "right"] = "left",
        temperature_key: NestedKey = ("tokens", "temperature"),
        root: bool = False,
        token_budget: Annotated[int, Ge(1)] | None = 65536,
    ) -> None:
        super().__init__()
        scorer = as_scorer(model)
        tell_padding_side(padding_side)
        if log_probs_full_key is None:
            log_probs_full_key = (_own_name(model), "full")
        if not isinstance(log_probs_full_key, tuple) or len(log_probs_full_key) != 2:
            raise ConfigError(f"log_probs_full_key must have two parts, got {log_probs_full_key!r}")
        if device is not None:
            if not isinstance(model, torch.nn.Module):
                raise ConfigError(
                    f"a {type(model).__name__} is no module that device={device} could move"
                )
            model.to(device)
        self._models = (model, scorer)  # a tuple hides it from nn.Module, see the class
        self.log_probs_full_key = log_probs_full_key
        self.formatter = row_formatter(model, tokenizer, tokenizer_kwargs)
        self.tokenizer = getattr(self.formatter or model, "tokenizer", None)
        self.tokenizer_kwargs = dict(tokenizer_kwargs or {})
        self.padding_side = padding_side
        self.in_keys = list(getattr(model, "in_keys", None) or [("tokens", "full")])
        self.out_keys = [log_probs_full_key]
        self.assistant_only = assistant_only
        self.detach = detach
        self.temperature_key = temperature_key
        self.root = root
        self.token_budget = token_budget

    @property
    def model(self) -> Any:
        """The model that scores, as given."""
        return self._models[0]

    @property
    def written(self) -> Path:
        """Where the log-probs are."""
        return self.log_probs_full_key if self.root else ("next", *self.log_probs_full_key)

    def is_written(self, row: TensorDictBase) -> bool:
        """Whether the log-probs are there; if called directly, it scores again, as in TorchRL."""
        return self.__dict__.get("_container") is not None and super().is_written(row)

    def columns(self, rows: RowView) -> dict[Path, list[Tensor]]:
        """The log-probs."""
        return {self.written: self.log_probs(rows)}

    def log_probs(self, rows: RowView) -> list[Tensor]:
        """Score rows.

        Args:
            rows: the ``B`` rows.

        Returns:
            ``B`` float32 tensors ``[T_b]``.
        """
        sequences, selected, kept = self._tokens(rows)
        unpadded = [ids[mask] for ids, mask in zip(sequences, kept, strict=True)]
        temperature = rows.read(as_path(self.temperature_key))

        def score(piece: list[int], masks: list[Tensor]) -> Tensor:
            temperatures: float | Tensor = 1.0
            if temperature is not None:
                temperatures = torch.stack([temperature[row].reshape(()) for row in piece]).float()
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
                scores = self._models[1].token_scores(
                    [unpadded[row] for row in piece],
                    [mask[kept[row]] for row, mask in zip(piece, masks, strict=True)],
                    temperature=temperatures,
                    extras=self._support(rows, piece, masks),
                )
            return scores.log_probs

        return _in_pieces(sequences, selected, self.token_budget, score)

    @staticmethod
    def _support(
        rows: RowView, asked: Sequence[int], masks: Sequence[Tensor]
    ) -> ScoreExtras | None:
        """Ids that truncated sampling kept: both models are compared on them."""
        ids, counts = (rows.read(("support", name)) for name in Support._fields)
        if ids is None or counts is None:
            return None
        columns = [[column[row] for row in asked] for column in (ids, counts)]
        return ScoreExtras(support=Support.of_rows(*columns, masks))

    def _tokens(self, rows: RowView) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The ids of each row, with masks of the scored ids and of the ids that are no padding."""
        sequences = rows.read(("tokens", "full"))
        assistant = rows.read(("masks", "all_assistant_mask"))
        if sequences is None:
            if (chats := rows.chats()) is not None:
                sequences, assistant = encode_rows(chats, self.formatter, type(self).__name__)
            else:
                sequences = self._encoded(rows.texts())
        if not self.assistant_only:
            assistant = [torch.ones_like(ids, dtype=torch.bool) for ids in sequences]
        elif assistant is None:
            raise DataError(
                "the rows have no ('masks', 'all_assistant_mask'), which the policy writes and "
                "conversations tell; pass assistant_only=False for ids or text alone"
            )
        kept = _unpadded(rows, sequences)
        masks = []
        for row, stepped in enumerate(rows.stepped()):
            mask = assistant[row] & stepped & kept[row]
            mask[kept[row].nonzero()[:1]] = False  # the first token has no prefix
            masks.append(mask)
        return sequences, masks, kept

    def _encoded(self, texts: list[str] | None) -> list[Tensor]:
        """The ids of texts, as the policy that scores them encodes text."""
        if texts is None:
            raise DataError("the rows have no ('tokens', 'full'); the policy writes them")
        codec = getattr(getattr(self.model, "reader", None), "codec", None)
        if codec is None:
            raise DataError("rows with text alone are scored by a policy that has a tokenizer")
        return codec.encode(texts)

    def empty_columns(self) -> dict[Path, Tensor]:
        """No token has a log-prob yet."""
        return {self.written: torch.zeros(0)}

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the log-probs."""
        node, field = self.log_probs_full_key
        observation_spec[node] = RaggedSpec({field: torch.float32}, shape=observation_spec.shape)
        return observation_spec


class RetrieveTeacherLogProb(RowTransform):
    """Scores each row with its teacher, for distillation.

    Writes the same column as :class:`~torchrl_llm.envs.transforms.RetrieveLogProb`, under
    ``("next", "teacher_log_probs", "full")``: float32 along ``("tokens", "full")``, nats, 0.0 where
    not scored. With several teachers (multi-teacher on-policy distillation) each row names its
    teacher, for example by the domain of its problem: a string in the row, such as a column of the
    dataset.

    - In a replay buffer append it after its reader
      :class:`~torchrl_llm.objectives.credit.TeacherKL`, or before
      :class:`~torchrl_llm.data.replay_buffers.JoinTurns` and credit if only the loss reads it
      (:class:`~torchrl_llm.objectives.OnPolicyDistillationLoss`).
    - In an environment it works as well, at every step.

    Args:
        teachers: one scorer for all rows, or a scorer for each name.
        student: the policy whose rows these are. A teacher with a different vocabulary is an error.
        key: key under which a row names its teacher; used only with several teachers.
        log_probs_full_key: where the log-probs go, below ``"next"``.
        kwargs: further arguments of :class:`RetrieveLogProb`.

    Raises:
        ConfigError: there is no teacher, a teacher cannot score, or teachers have different
            vocabularies.
        DataError: for a row that names no teacher, or an unknown one.

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

    __signature__ = FullSignature(RetrieveLogProb)

    def __init__(
        self,
        teachers: TokenScorer | Mapping[str, TokenScorer],
        *,
        student: TokenScorer | None = None,
        key: NestedKey = "domain",
        log_probs_full_key: NestedKey = ("teacher_log_probs", "full"),
        **kwargs: Any,
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
            name: RetrieveLogProb(teacher, log_probs_full_key=log_probs_full_key, **kwargs)
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
            scored = self._scoring[name].log_probs(rows.part(index))
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
                    f"row {row} names the teacher {name!r} at {self.key!r}, but there are "
                    f"{', '.join(self._scoring)}"
                )
            classes.setdefault(name, []).append(row)
        return classes


def _name(value: Any) -> Any:
    """A string that a row holds; tensordict returns it bare or in a cell."""
    return value.data if isinstance(value, NonTensorData) else value


class RetrieveValues(RowTransform):
    """Writes a critic's value for each sampled token into the rows of a replay buffer.

    ``("values", "full")`` is float32 along ``("tokens", "full")``: the value of the state before
    each token that the policy sampled in the row's turn, 0.0 elsewhere. For a row that ends a cut
    episode, ``("next", "state_value")``, float32 ``[1, 1]``, is the value of the state after its
    last token; it is 0.0 for all others.

    Append it to the buffer after :class:`~torchrl_llm.objectives.credit.GAEAdvantage`, which reads
    both: the transform that is appended last runs first. The head over the vocabulary is not run.

    The critic is no submodule of the transform: ``eval()``, ``to()`` and the state of a buffer do
    not affect it, so that it may be the policy in training.

    Args:
        critic: a policy or scorer with a value head, see
            :class:`~torchrl_llm.modules.ValueHead`.
        values_key: where the values go, a nested key.
        final_value_key: where the value after a cut goes.
        token_budget: tokens per call of the critic, including the padding of a padded layout;
            ``None`` for all rows at once.

    Raises:
        ConfigError: for a critic that cannot score, a key that is not nested, or a budget below 1.
        DataError: for rows without tokens.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.replay_buffers import ReplayBuffer
        >>> from torchrl_llm.data.scoring import TokenScores
        >>> class Position(TokenScorer):
        ...     def token_scores(self, sequences, select, **_):
        ...         places = torch.cat([mask.nonzero()[:, 0] for mask in select])
        ...         return TokenScores(torch.zeros(0), values=places.float())
        >>> buffer = ReplayBuffer(transform=RetrieveValues(Position()))
        >>> ids = torch.arange(4)
        >>> done = {"truncated": torch.tensor([True])}
        >>> tokens = {"full": ids, "response": ids[2:]}
        >>> index = buffer.extend([TensorDict(tokens=tokens, next=done)])
        >>> buffer[0]["values", "full"].tolist(), buffer[0]["next", "state_value"].item()
        ([0.0, 0.0, 2.0, 3.0], 4.0)
    """

    @checked
    def __init__(
        self,
        critic: TokenScorer,
        *,
        values_key: NestedKey = ("values", "full"),
        final_value_key: NestedKey = ("next", "state_value"),
        token_budget: Annotated[int, Ge(1)] | None = 65536,
    ) -> None:
        super().__init__()
        if not isinstance(critic, TokenScorer):
            raise ConfigError(f"critic must be a TokenScorer, got {type(critic).__name__}")
        self.token_budget = token_budget
        if not isinstance(values_key, tuple) or len(values_key) < 2:
            raise ConfigError(f"values_key must be a nested key, got {values_key!r}")
        self._critics = (critic,)  # a tuple hides it from nn.Module, see the class
        self.values_key, self.final_value_key = values_key, final_value_key

    @property
    def critic(self) -> TokenScorer:
        """The critic that values the tokens."""
        return self._critics[0]

    @property
    def written(self) -> Path:
        """Where the values are."""
        return as_path(self.values_key)

    def columns(self, rows: RowView) -> dict[Path, list[Tensor]]:
        """The two columns."""
        full = rows.read(("tokens", "full"), "the policy writes them")
        kept = _unpadded(rows, full)
        sequences = [ids[mask] for ids, mask in zip(full, kept, strict=True)]
        sampled = [own[mask] for own, mask in zip(rows.sampled(), kept, strict=True)]
        cut = [Trajectory([row]).goes_on for row in row_list(rows.root)]
        # A cut row gets one more token, which is only predicted and never an input.
        padded = [
            torch.cat([ids, ids[-1:]]) if behind else ids
            for ids, behind in zip(sequences, cut, strict=True)
        ]
        masks = [
            torch.cat([mask, mask.new_ones(1)]) if behind else mask.clone()
            for mask, behind in zip(sampled, cut, strict=True)
        ]
        for mask in masks:
            mask[:1] = False  # the first token has no prefix
        found = self._values(padded, masks)
        values = [
            own.new_zeros(mask.shape).masked_scatter(mask, own[: ids.shape[0]])
            for own, ids, mask in zip(found, sequences, kept, strict=True)
        ]
        behind = [
            own[-1] if at_end else own.new_zeros(()) for own, at_end in zip(found, cut, strict=True)
        ]
        return {
            self.written: values,
            as_path(self.final_value_key): [value.reshape(1, 1).clone() for value in behind],
        }

    def _values(self, sequences: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
        extras = ScoreExtras(values=True, log_probs=False)

        def score(piece: list[int], chosen: list[Tensor]) -> Tensor:
            with torch.no_grad():
                scores = self.critic.token_scores(
                    [sequences[row] for row in piece], chosen, extras=extras
                )
            if scores.values is None:
                raise ConfigError(
                    f"{type(self.critic).__name__} gives no values: it has no value head"
                )
            return scores.values

        return _in_pieces(sequences, masks, self.token_budget, score)
