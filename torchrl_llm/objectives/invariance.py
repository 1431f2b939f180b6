"""Checks that irrelevant changes to a batch do not change the value or the gradient of a loss.

Most mistakes in a loss over ragged rows raise no error. Examples are a mean over padding, an
average per micro-batch, or a value read at a token that was not sampled. Each mistake breaks one of
the following laws. :func:`check_invariance` tests them on a batch:

- ``layouts``: every layout of the actor gives the same result (padded, bucketed, packed, shared
  prompts);
- ``naive``: the chunked head agrees with the model's own logits;
- ``micro-batches``: any split of the rows, with the normalizer of the whole batch;
- ``order``: any order of the rows;
- ``junk``: any values of a column (log-probs, per-token advantages, values) at tokens that do not
  count, even NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.row_transform import unparted_rows
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.functional import Normalizer
from torchrl_llm.objectives.token_loss import TokenLoss

# Gradients below this number are compared absolutely: such gradients are sums that cancel, so only
# rounding errors remain.
_SMALL = 1e-3
_ADVICE = {
    "layouts": "the model looks beyond its row: see CausalScorer.why_not_packed",
    "naive": "the chunked head does not know something of this model's head",
    "micro-batches": "divide by the normalizer that is passed in, and keep metrics additive",
    "order": "a row's loss must not depend on the rows around it",
    "junk": "read columns through rows.column, which gives the tokens that count",
}


@dataclass(kw_only=True)
class InvarianceReport:
    """Result of :func:`check_invariance` for a loss that satisfies all laws.

    Attributes:
        deviations: the largest deviation for each tested law. It is relative to the value of the
            whole batch if the value is above 1, and relative to its gradient if the gradient is
            above 0.001.
        skipped: laws that could not be tested, with the reason.
    """

    deviations: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{law:<16}{value:.1e}" for law, value in self.deviations.items()]
        lines += [f"{law:<16}not tried: {why}" for law, why in self.skipped.items()]
        return "\n".join(lines)


def check_invariance(
    loss: TokenLoss, batch: TensorDictBase, *, tolerance: float = 1e-5, seed: int = 0
) -> InvarianceReport:
    """Test that irrelevant changes to a batch do not change a loss, its metrics or gradients.

    The actor runs in evaluation mode, about twenty forwards and backwards in total; a few short
    rows of different lengths are enough. The function has no side effects: it does not accumulate
    gradients or write to the rows, and it restores modes and layout.

    Args:
        loss: any loss over rows of tokens.
        batch: rows, a one-dimensional lazy stack or padded tensors, at least two.
        tolerance: the largest deviation allowed, see :class:`InvarianceReport`; about 1e-5 for
            float32 weights, 1e-2 for bfloat16.
        seed: seed of the random orders, splits and junk values.

    Returns:
        The largest deviation for each law that could be tested.

    Raises:
        DataError: when a law does not hold; the message names the law, the difference, and where to
            look.
        ConfigError: for a loss that is not averaged, or a batch of fewer than two rows or without
            a gradient.

    Example:
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.data.ragged import ragged_rows
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> from torchrl_llm.objectives import GRPOLoss
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> ids = [torch.tensor([3, 4, 5]), torch.tensor([6, 7])]
        >>> rows = lazy_rows([TensorDict(
        ...     tokens={"full": x, "prompt": x[:1]}, log_probs={"full": torch.full(x.shape, -3.4)},
        ...     advantage=torch.ones(1, 1)) for x in ids])
        >>> report = check_invariance(GRPOLoss(CausalScorer(Qwen2ForCausalLM(config))), rows)
        >>> sorted(report.deviations), sorted(report.skipped)
        (['junk', 'layouts', 'micro-batches', 'naive', 'order'], [])
    """
    if len(batch) < 2:
        raise ConfigError("an order or a split needs at least two rows")
    generator = torch.Generator().manual_seed(seed)
    with _evaluating(loss):
        check = _Check(loss, batch, tolerance)
        check.layouts()
        check.naive()
        check.micro_batches(generator)
        check.order(generator)
        check.junk(generator)
    return check.report


class _Check:
    """A loss, a batch, the result of the loss, and the deviations found so far."""

    def __init__(self, loss: TokenLoss, batch: TensorDictBase, tolerance: float) -> None:
        self.loss, self.batch, self.tolerance = loss, batch, tolerance
        self.rows = [*batch.unbind(0)]
        self.parameters = [p for p in loss.parameters() if p.requires_grad]
        self.normalizer = loss.normalizer(batch)
        self.report = InvarianceReport()
        actor = loss.scorer
        layout = "padded" if "padded" in actor.layouts else actor.layout
        with _holding(actor, "layout", layout):
            self.expected = self.outcome([batch])
        if not bool(self.expected[1].any()):
            raise ConfigError(
                "this batch gives the loss no gradient, so hardly anything that is wrong would "
                "show: take rows whose advantages are not all zero"
            )

    def outcome(
        self, pieces: Sequence[TensorDictBase], normalizer: Normalizer | None = None
    ) -> tuple[dict[str, float], Tensor]:
        """Compute the metrics and the gradient of a batch that is given in parts."""
        whole, gradient = None, None
        for piece in pieces:
            output = self.loss(piece, normalizer=normalizer)
            total = output.total_loss()
            if total.ndim:
                raise ConfigError("a loss that is not averaged into one number cannot be checked")
            parts = torch.autograd.grad(
                total, self.parameters, allow_unused=True, materialize_grads=True
            )
            flat = torch.cat([part.flatten().double() for part in parts])
            whole = output.detach() if whole is None else whole + output.detach()
            gradient = flat if gradient is None else gradient + flat
        metrics = {"total_loss": whole.total_loss(), **whole.metrics()}
        return {name: float(value) for name, value in metrics.items()}, gradient

    def compare(self, law: str, found: tuple[dict[str, float], Tensor], change: str) -> None:
        """Record the deviation of a result from the expected one; raise if it is too large."""
        (metrics, gradient), (values, expected) = found, self.expected
        deviations = {
            name: abs(metrics[name] - value) / max(abs(value), 1.0)
            for name, value in values.items()
        }
        scale = max(float(expected.abs().max()), _SMALL)
        deviations["the gradient"] = float((gradient - expected).abs().max()) / scale
        # Comparisons with NaN are false, so a maximum would not find a NaN.
        deviations = {name: math.inf if math.isnan(d) else d for name, d in deviations.items()}
        worst = max(deviations, key=deviations.__getitem__)
        if deviations[worst] > self.tolerance:
            who, advice = type(self.loss).__name__, _ADVICE[law]
            if law in ("layouts", "naive") or (law != "junk" and self.actor_mixes_rows()):
                who = f"not {who} but its actor, {type(self.loss.scorer).__name__},"
                advice = _ADVICE["layouts"] if law != "naive" else advice
            raise DataError(
                f"{who} breaks the law {law!r}: {worst} deviates by {deviations[worst]:.1e} "
                f"(allowed {self.tolerance:.0e}) {change}; {advice}"
            )
        before = self.report.deviations.get(law, 0.0)
        self.report.deviations[law] = max(before, deviations[worst])

    def actor_mixes_rows(self) -> bool:
        """Whether the scores of a row depend on the other rows, independently of the loss."""
        batches = [self.batch, *(self.taken([row]) for row in range(len(self.rows)))]
        with torch.no_grad():
            scores = [self.loss.score(b, self.loss.read(b)).log_probs.double() for b in batches]
        together, alone = scores[0], torch.cat(scores[1:])
        return not torch.allclose(together, alone, rtol=self.tolerance, atol=self.tolerance)

    def layouts(self) -> None:
        actor = self.loss.scorer
        others = [name for name in actor.layouts if name != "padded"]
        if not others:
            self.report.skipped["layouts"] = "the actor lays rows out in one way only"
        for name in others:
            with _holding(actor, "layout", name):
                found = self.outcome([self.batch])
            self.compare("layouts", found, f"when its layout is {name!r}")

    def naive(self) -> None:
        twin = self.loss.scorer.naive_scorer()
        if twin is None:
            self.report.skipped["naive"] = "the actor has no naive_scorer"
            return
        try:
            with _holding(self.loss, "actor_network", twin):
                found = self.outcome([self.batch])
        except ConfigError as error:
            self.report.skipped["naive"] = str(error)
            return
        self.compare("naive", found, "when the model makes its own logits")

    def micro_batches(self, generator: torch.Generator) -> None:
        units = unparted_rows(self.batch)
        order = [units[unit] for unit in torch.randperm(len(units), generator=generator).tolist()]
        cut = int(torch.randint(1, len(units), (), generator=generator)) if len(units) > 1 else 1
        parts = [[row for unit in part for row in unit] for part in (order[:cut], order[cut:])]
        for split in (units, [part for part in parts if part]):
            found = self.outcome([self.taken(piece) for piece in split], self.normalizer)
            self.compare("micro-batches", found, f"when the rows come as {split}")

    def order(self, generator: torch.Generator) -> None:
        count = len(self.rows)
        for order in (
            [*reversed(range(count))],
            torch.randperm(count, generator=generator).tolist(),
        ):
            found = self.outcome([self.taken(order)])
            self.compare("order", found, f"when the rows come in the order {order}")

    def taken(self, indices: Sequence[int]) -> TensorDictBase:
        return lazy_rows([self.rows[index] for index in indices])

    def junk(self, generator: torch.Generator) -> None:
        counted = self.loss.select(self.batch).stored_select()
        columns = _token_columns(self.rows, [mask.shape[0] for mask in counted])
        if not columns or all(bool(mask.all()) for mask in counted):
            self.report.skipped["junk"] = "no column has values where nothing counts"
            return
        # NaN reveals sums that include junk; large numbers reveal sums that only skip NaN.
        for scale in (float("nan"), 100.0):
            junk = {
                key: [scale * torch.randn(mask.shape, generator=generator) for mask in counted]
                for key in columns
            }
            error = self._junk_error(junk, counted)
            # All columns at once first; the single column is searched only after a failure.
            for key in columns if error else ():
                error = self._junk_error({key: junk[key]}, counted) or error
            if error:
                raise error

    def _junk_error(
        self, junk: dict[NestedKey, list[Tensor]], counted: list[Tensor]
    ) -> DataError | None:
        """The error when columns hold junk at tokens that do not count, or ``None``."""
        rows = [
            _spoilt(row, {key: of_rows[b] for key, of_rows in junk.items()}, counted[b])
            for b, row in enumerate(self.rows)
        ]
        numbers = bool(torch.cat(next(iter(junk.values()))).isfinite().all())
        kind, columns = "numbers" if numbers else "NaN", ", ".join(map(repr, junk))
        where = f"{kind} in {columns} where no token counts"
        try:
            found = self.outcome([lazy_rows(rows)])
        except DataError as error:
            name = type(self.loss).__name__
            return DataError(f"{name} breaks the law 'junk': {where} is refused ({error})")
        try:
            self.compare("junk", found, f"with {where}")
        except DataError as error:
            return error
        return None


def _token_columns(rows: list[TensorDictBase], lengths: list[int]) -> list[NestedKey]:
    """Columns of numbers with one value per token."""
    if max(lengths) < 2:
        return []

    def of_tokens(key: NestedKey) -> bool:
        values = [row.get(key, None) for row in rows]
        return all(
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.shape in ((length,), (length, 1))
            for value, length in zip(values, lengths, strict=True)
        )

    return [key for key in rows[0].keys(include_nested=True, leaves_only=True) if of_tokens(key)]


def _spoilt(row: TensorDictBase, junk: dict[NestedKey, Tensor], counted: Tensor) -> TensorDictBase:
    """Copy a row, with junk in its columns at tokens that do not count."""
    for key, column in junk.items():
        value = row.get(key)
        keep = counted.view(-1, *[1] * (value.ndim - 1)).to(value.device)
        spoilt = value.where(keep, column.to(value).view_as(value))
        row = _replaced(row, (key,) if isinstance(key, str) else key, spoilt)
    return row


def _replaced(node: Any, path: tuple[str, ...], value: Tensor) -> Any:
    """Replace the value at a path; the result shares everything else with the given node."""
    copy = node.copy()
    name, *rest = path
    copy.set(name, _replaced(node.get(name), tuple(rest), value) if rest else value)
    return copy


@contextmanager
def _evaluating(loss: TokenLoss) -> Iterator[None]:
    """Switch to evaluation mode, because dropout would draw new masks in every forward."""
    modes = [(module, module.training) for module in loss.modules()]
    loss.eval()
    try:
        with torch.enable_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _holding(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Temporarily set an attribute to a different value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
