"""A sum of several losses on the same rows, with one forward of the actor.

Each loss selects its own tokens. The actor scores their union once, and each loss gets the scores
of its tokens. A composite loss therefore costs one forward and one backward for any number of
terms. Its gradient is the weighted sum of the terms' gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchrl_llm.data.scoring import ScoreExtras, TokenScores
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.functional import Normalizer
from torchrl_llm.objectives.flat_columns import sent
from torchrl_llm.objectives.loss_rows import TokenRows
from torchrl_llm.objectives.token_loss import LLMLossOutput, TokenLoss


class CompositeNormalizer(NamedTuple):
    """The normalizers of the terms of a composite loss.

    Attributes:
        terms: the normalizer of each term, by its name.

    Example:
        >>> parts = CompositeNormalizer({"a": Normalizer(4, 2)})
        >>> parts.plus(CompositeNormalizer({"a": Normalizer(1, 1)})).terms["a"].num_tokens
        5
    """

    terms: dict[str, Normalizer]

    def plus(self, other: CompositeNormalizer) -> CompositeNormalizer:
        """Add the counts of a disjoint set of rows."""
        return CompositeNormalizer(
            {name: part.plus(other.terms[name]) for name, part in self.terms.items()}
        )


@dataclass(frozen=True)
class CompositeLossOutput(LLMLossOutput):
    """Output of :class:`CompositeLoss`.

    The items are ``loss_<name>``, the weighted total of a term, and ``<name>/<field>`` for each
    field of the term's own output, without gradient and unweighted.

    Attributes:
        terms: the output of each loss, by its name.
        weights: the weight of each loss, by its name.
    """

    terms: dict[str, LLMLossOutput]
    weights: dict[str, float]

    def __add__(self, other: CompositeLossOutput) -> CompositeLossOutput:
        """Combine the outputs of two disjoint parts of a batch."""
        return self._each(lambda name, output: output + other.terms[name])

    def detach(self) -> CompositeLossOutput:
        """Return the output without gradients."""
        return self._each(lambda _, output: output.detach())

    def clone(self) -> CompositeLossOutput:
        """Return the output with copies of its tensors."""
        return self._each(lambda _, output: output.clone())

    def cpu(self) -> CompositeLossOutput:
        """Return the output with its tensors on the CPU."""
        return self._each(lambda _, output: output.cpu())

    def _each(self, change: Callable[[str, LLMLossOutput], LLMLossOutput]) -> CompositeLossOutput:
        terms = {name: change(name, output) for name, output in self.terms.items()}
        return replace(self, terms=terms)

    def leaves(self) -> list[Tensor]:
        """Return every tensor of the terms' outputs."""
        return [value for output in self.terms.values() for value in output.leaves()]

    def total_loss(self) -> Tensor:
        """The weighted sum of the terms; call ``backward`` on it."""
        return torch.stack([*self._weighted().values()]).sum(0)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Return the weighted terms, followed by the fields of each term."""
        yield from self._weighted().items()
        for name, output in self.terms.items():
            for key, value in output.items():
                yield f"{name}/{key}", value.detach()

    def metrics(self) -> dict[str, Tensor]:
        """Return the weighted terms and the named metrics of each loss, without gradient."""
        metrics = {name: value.detach() for name, value in self._weighted().items()}
        for name, output in self.terms.items():
            metrics |= {f"{name}/{key}": value for key, value in output.metrics().items()}
        return metrics

    def _weighted(self) -> dict[str, Tensor]:
        return {
            f"loss_{name}": self.weights[name] * output.total_loss()
            for name, output in self.terms.items()
        }


class _SharedRows:
    """The union of the tokens that the terms select, and each term's positions in it."""

    def __init__(self, terms: dict[str, TokenRows]) -> None:
        self.terms = terms
        first, *others = terms.values()
        for rows in others:
            if not _same(first.sequences, rows.sequences):
                raise DataError(
                    "the losses of a composite must read the same token ids: set their action keys "
                    "alike, and encode conversations before the loss"
                )
        self.sequences = first.sequences
        selections = {name: torch.cat(rows.select) for name, rows in terms.items()}
        union = torch.stack([*selections.values()]).any(0)
        self.select = list(union.split([ids.shape[0] for ids in self.sequences]))
        # Which tokens of the union belong to a term; bool [N of the union].
        self.member = {name: selected[union] for name, selected in selections.items()}

    def stored_select(self) -> list[Tensor]:
        """See :meth:`TokenRows.stored_select`; selects the tokens that count for any term."""
        masks = zip(*(rows.stored_select() for rows in self.terms.values()), strict=True)
        return [torch.stack(of_row).any(0) for of_row in masks]


class CompositeLoss(TokenLoss):
    """A weighted sum of losses that share one forward of their actor.

    The terms may be any losses over rows that share one actor. An example is a policy-gradient loss
    with a distillation loss or a supervised loss on the same rows. The terms may select different
    tokens. A term that needs more from the forward (values, the support of truncated sampling, a
    teacher's divergence) gets it from the shared forward. Two terms with different teachers, or
    with different supports for the same token, cannot share a forward.

    Args:
        terms: maps a name to ``(weight, loss)``. The names become parts of the metrics' names.

    Attributes:
        weights: the weights by name; may be changed between steps.
        losses: the losses by name.
        modules_of_terms: modules of the terms other than the actor, such as a critic.

    Raises:
        ConfigError: without terms; for an invalid name or weight; for a term that is not a
            :class:`TokenLoss`, has a different actor, or is not averaged.

    Example:
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.data.ragged import write_rows
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> from torchrl_llm.objectives import GRPOLoss, SFTLoss
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> rows = TensorDict(advantage=torch.tensor([[1.0], [-1.0]]), batch_size=[2])
        >>> ids = [torch.tensor([3, 4, 5]), torch.tensor([6, 7])]
        >>> write_rows(rows, ("tokens", "full"), ids)
        >>> write_rows(rows, ("masks", "all_assistant_mask"), [torch.arange(len(x)) > 0
        ...     for x in ids])
        >>> write_rows(rows, ("log_probs", "full"), [torch.full(x.shape, -3.4) for x in ids])
        >>> actor = CausalScorer(Qwen2ForCausalLM(config))
        >>> loss = CompositeLoss({"policy": (1.0, GRPOLoss(actor, masking_strategy="rlhf")),
        ...     "imitate": (0.1, SFTLoss(actor))})
        >>> output = loss(rows)
        >>> output.total_loss().backward()
        >>> [key for key, _ in output.items()][:3]
        ['loss_policy', 'loss_imitate', 'policy/loss_objective']
    """

    def __init__(self, terms: Mapping[str, tuple[float, TokenLoss]]) -> None:
        if not terms:
            raise ConfigError("a CompositeLoss needs terms: {name: (weight, loss)}")
        for name, term in terms.items():
            _check_term(name, term)
        losses = {name: loss for name, (_, loss) in terms.items()}
        actor = next(iter(losses.values())).actor_network
        _check_actor(losses, actor)
        super().__init__(actor)
        self.weights = {name: float(weight) for name, (weight, _) in terms.items()}
        # The losses are in a plain dictionary, so that the actor is in the state only once. Other
        # modules of a term (a critic) are registered separately.
        self.losses = losses
        self.modules_of_terms = nn.ModuleDict(_own_modules(losses, actor))
        self.needs_entropy = any(loss.needs_entropy for loss in losses.values())
        self._forward_value_estimator_keys()

    def set_keys(self, **_: Any) -> None:
        """Not supported: set the keys of the terms instead.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("set the keys of the terms: loss.losses[name].set_keys(...)")

    def select(self, tensordict: Any) -> _SharedRows:
        """Return the union of the tokens that the terms select.

        Raises:
            DataError: when a term rejects the rows, or when the terms read different token ids.
        """
        return _SharedRows({name: loss.select(tensordict) for name, loss in self.losses.items()})

    def check(self, tensordict: Any, rows: _SharedRows) -> None:
        """See :meth:`TokenLoss.check`."""
        for name, loss in self.losses.items():
            loss.check(tensordict, rows.terms[name])

    def count(self, tensordict: Any, rows: _SharedRows) -> CompositeNormalizer:
        """Return the counts of each term, where the rows are a whole batch."""
        return CompositeNormalizer(
            {name: loss.count(tensordict, rows.terms[name]) for name, loss in self.losses.items()}
        )

    def extras(self, tensordict: Any, rows: _SharedRows) -> ScoreExtras | None:
        """Return the extras that the terms request, for the union of their tokens."""
        asked = {
            name: loss.extras(tensordict, rows.terms[name]) for name, loss in self.losses.items()
        }
        if all(extras is None for extras in asked.values()):
            return None
        merged = ScoreExtras(values=any(e is not None and e.values for e in asked.values()))
        return _with_teachers(_with_support(merged, asked, rows), asked, rows)

    def score(self, tensordict: Any, rows: _SharedRows) -> TokenScores:
        """Score the union of the tokens with one forward of the actor."""
        temperatures = [
            rows.terms[name].temperature(tensordict, loss.tensor_keys.temperature)
            for name, loss in self.losses.items()
        ]
        if any(not _equal(temperatures[0], other) for other in temperatures[1:]):
            raise DataError("the losses of a composite must read the same temperatures")
        return self.scorer.token_scores(
            rows.sequences,
            rows.select,
            temperature=temperatures[0],
            entropy=self.needs_entropy,
            extras=self.extras(tensordict, rows),
        )

    def from_scores(
        self,
        tensordict: Any,
        rows: _SharedRows,
        scores: TokenScores,
        *,
        normalizer: CompositeNormalizer | None = None,
    ) -> CompositeLossOutput:
        """See :meth:`TokenLoss.from_scores`."""
        normalizer = normalizer or self.count(tensordict, rows)
        if getattr(normalizer, "terms", {}).keys() != self.losses.keys():
            raise DataError(
                f"the normalizer must be loss.normalizer(...) of the whole batch, which counts for "
                f"each of the terms {', '.join(self.losses)}; got {normalizer}"
            )
        if scores.log_probs.shape != rows.member[next(iter(rows.member))].shape:
            raise DataError(
                f"the actor must score the {sum(int(s.sum()) for s in rows.select)} selected "
                f"tokens, got {tuple(scores.log_probs.shape)}"
            )
        outputs = {
            name: loss.from_scores(
                tensordict,
                rows.terms[name],
                _part(scores, rows.member[name]),
                normalizer=normalizer.terms[name],
            )
            for name, loss in self.losses.items()
        }
        return CompositeLossOutput(outputs, dict(self.weights))

    def _forward_value_estimator_keys(self, **_: Any) -> None:
        """Keys that any term reads."""
        keys = [key for loss in self.losses.values() for key in loss.in_keys]
        self.in_keys = list(dict.fromkeys(keys))
        self.out_keys = [f"loss_{name}" for name in self.losses]


def _check_term(name: str, term: Any) -> None:
    # "loss_x/kl" would be read as a term of the objective.
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("loss"):
        raise ConfigError(
            f"the name of a term must be an identifier that does not begin with 'loss', "
            f"got {name!r}"
        )
    if not isinstance(term, tuple | list) or len(term) != 2:
        raise ConfigError(f"term {name!r} must be (weight, loss), got {term!r}")
    weight, loss = term
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigError(f"the weight of term {name!r} must be a finite number, got {weight!r}")
    if not isinstance(loss, TokenLoss) or isinstance(loss, CompositeLoss):
        raise ConfigError(
            f"term {name!r} must be a loss over rows of tokens and no composite, got "
            f"{type(loss).__name__}"
        )
    if "none" in (getattr(loss, "aggregation", None), getattr(loss, "reduction", None)):
        raise ConfigError(f"term {name!r} is not averaged, so it cannot be a term of a sum")


def _check_actor(losses: dict[str, TokenLoss], actor: Any) -> None:
    for name, loss in losses.items():
        if loss.actor_network is not actor:
            raise ConfigError(
                f"the losses of a composite share one forward, and so one actor: that of term "
                f"{name!r} is another object"
            )
        if any(True for _ in loss.parameters(recurse=False)):
            raise ConfigError(f"term {name!r} has parameters that are in no module of its own")


def _own_modules(losses: dict[str, TokenLoss], actor: Any) -> dict[str, nn.Module]:
    """The modules of the terms except their actor, such as a critic."""
    return {
        f"{name}_{child}": module
        for name, loss in losses.items()
        for child, module in loss.named_children()
        if module is not actor
    }


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def _equal(first: float | Tensor, second: float | Tensor) -> bool:
    return bool(torch.equal(torch.as_tensor(first), torch.as_tensor(second)))


def _part(scores: TokenScores, member: Tensor) -> TokenScores:
    if bool(member.all()):
        return scores
    index = sent(member.nonzero()[:, 0], scores.log_probs.device)
    # Only requests to teachers contain values that are not tensors.
    return TokenScores(*(v[index] if isinstance(v, Tensor) else None for v in scores))


def _with_support(
    merged: ScoreExtras, asked: dict[str, ScoreExtras | None], rows: _SharedRows
) -> ScoreExtras:
    """The supports of the term with the most tokens, if all terms have the same supports."""
    counts = {}
    for name, extras in asked.items():
        mine = torch.zeros(rows.member[name].shape, dtype=torch.int64)
        if extras is not None and extras.support is not None:
            mine[rows.member[name]] = extras.support.counts.to(mine)
        counts[name] = mine
    if not any(bool(mine.any()) for mine in counts.values()):
        return merged
    owner = max(counts, key=lambda name: int((counts[name] > 0).sum()))
    for name, mine in counts.items():
        if not torch.equal(mine, counts[owner].where(rows.member[name], 0)):
            raise DataError(
                f"terms {owner!r} and {name!r} score tokens under different supports of truncated "
                "sampling, so they cannot share a forward: compute them one after the other"
            )
    return replace(merged, support=asked[owner].support._replace(counts=counts[owner]))


def _with_teachers(
    merged: ScoreExtras, asked: dict[str, ScoreExtras | None], rows: _SharedRows
) -> ScoreExtras:
    taught = {name: e for name, e in asked.items() if e is not None and e.teachers}
    if not taught:
        return merged
    if len(taught) > 1:
        raise ConfigError(
            f"terms {', '.join(taught)} each ask for a divergence from teachers, and one forward "
            "gives one; choose between teachers by row within one term"
        )
    ((name, extras),) = taught.items()
    index = torch.full(rows.member[name].shape, -1)
    index[rows.member[name]] = 0 if extras.teacher_index is None else extras.teacher_index.to(index)
    return replace(
        merged, teachers=extras.teachers, teacher_index=index, divergence=extras.divergence
    )
