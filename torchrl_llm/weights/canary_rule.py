"""The rule that distinguishes wrong weights of an engine from rounding.

The rule needs only tokens and log-probs, so it can run next to the engine: in the trainer's
process, or in a worker that received the expected log-probs with the weights.
:mod:`torchrl_llm.weights.canary` computes the expected log-probs.

Shape legend: ``N`` scored tokens of all rows, ``n`` tokens of the rows that were scored, ``A`` past
versions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.errors import WeightUpdateError

# The figures come from test/benchmarks/bench_canary.py. In correct updates, the median difference
# was at most 3.1 times the measured rounding, and the 90th percentile at most 10 times. The part of
# a move that an engine seemed to miss was at most 12 times the rounding.
FAR = 5.0
"""The median difference of engine and trainer is at most this many times the rounding."""
_TAIL = 5.0
# The 90th percentile is at most this many times the limit of the median.
_KERNELS = 2.0
# The engine's kernels may round this much more than the trainer's, according to its first check.
_CLEAR = 20.0
# A move of the trainer, and its missed part, are significant from this length on, in units of the
# rounding (Euclidean, over all tokens).
_FOLLOWED = 0.8
# An engine that made at least this part of a move has followed it.
_MOVED, _SHARE, _UNMOVED = 0.1, 0.25, 1.5
# Three thresholds: a token counts as moved from this many units on; a version counts as moved if
# this share of its tokens moved; an engine without any change counts as stuck once the shares add
# up to this.
_SMOOTH, _KEPT = 8, 256


class CanaryReport(NamedTuple):
    """Difference of engine and trainer on the canary rows.

    Attributes:
        difference: median difference of two log-probs, in nats.
        rounding: the differences as a multiple of the rounding; about 1 for a correct engine.
        followed: the part of the trainer's move that the engine made: 1.0 with the new weights, 0.0
            with the old ones. The move starts at the latest version that is distinguishable from
            the current one. ``None`` if there is no such version; then only the digest is a proof.
    """

    difference: float
    rounding: float
    followed: float | None


class CanaryTarget(NamedTuple):
    """Expected log-probs of an engine with the trainer's weights, and the effect of rounding.

    Attributes:
        rows: token ids.
        start: position of the first scored token of each row.
        num_first: number of rows that are scored first; the others are scored in a case of doubt.
        exact: float32 ``[N]``, log-probs in the trainer's own precision.
        rounded: float32 ``[N]``, in the engine's precision.
        spread: float32 ``[N]``, effect of rounding in nats, above 0.
    """

    rows: tuple[tuple[int, ...], ...]
    start: int
    num_first: int
    exact: Tensor
    rounded: Tensor
    spread: Tensor

    def score(self, scorer: TokenScorer, *, first: bool) -> Tensor:
        """Return the log-probs of the first rows, or of the others.

        Args:
            scorer: an engine.
            first: whether to score the first rows.

        Returns:
            Float32 ``[n]`` on the CPU, row after row.
        """
        rows = self.rows[: self.num_first] if first else self.rows[self.num_first :]
        return score_rows(scorer, rows, self.start)

    def to_json(self) -> dict[str, Any]:
        """Convert to the format of :meth:`from_json`."""
        return {
            name: value.tolist() if isinstance(value, Tensor) else value
            for name, value in self._asdict().items()
        }

    @classmethod
    def from_json(cls, value: Any) -> CanaryTarget:
        """Read a target from a message.

        Args:
            value: result of :meth:`to_json`.

        Raises:
            WeightUpdateError: it is malformed.
        """
        try:
            rows = tuple(tuple(int(token) for token in row) for row in value["rows"])
            start, num_first = int(value["start"]), int(value["num_first"])
            scores = [torch.tensor(value[n], dtype=torch.float32) for n in cls._fields[3:]]
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise WeightUpdateError(f"what came as a canary is malformed: {error}") from None
        tokens = sum(len(row) - start for row in rows)
        whole = start >= 1 and all(len(row) > start for row in rows)
        sized = all(part.shape == (tokens,) for part in scores) and bool((scores[2] > 0).all())
        if not (whole and sized and 1 <= num_first <= len(rows)):
            raise WeightUpdateError(
                f"what came as a canary is malformed: {len(rows)} rows, {num_first} of them first, "
                f"{tokens} tokens, scores {[tuple(part.shape) for part in scores]}"
            )
        return cls(rows, start, num_first, *scores)


@torch.no_grad()
def score_rows(scorer: TokenScorer, rows: Sequence[Sequence[int]], start: int) -> Tensor:
    """Return log-probs of the rows' tokens from a position on: float32 ``[n]`` on the CPU."""
    ids = [torch.tensor(row) for row in rows]
    select = [torch.arange(len(row)) >= start for row in rows]
    return scorer.token_scores(ids, select).log_probs.float().cpu()


class _Seen(NamedTuple):
    """Findings of the last check of an engine."""

    found: Tensor
    rounded: Tensor


class _Evidence(NamedTuple):
    report: CanaryReport
    far: bool
    behind: int | str | None


class CanaryJudge:
    """Checks one engine over successive versions.

    It checks three things, in units of the measured rounding of each token:

    - Does rounding explain the differences of engine and trainer (median and 90th percentile)?
      Rounding does not explain permuted weights, or a part of the weights that has been outdated
      for long.
    - Did the engine follow the trainer's move since a remembered version? With ``d`` the trainer's
      move and ``e`` the engine's move, the ratio is ``<e, d> / <d, d>``: 1 with the new weights, 0
      with the old ones. If ``|d|`` is too short compared with rounding, there is no verdict yet. An
      engine that stays behind is detected when the moves have added up.
    - Has any bit of the engine's log-probs changed, if the trainer's log-probs have changed at the
      same precision?

    If one of the first two checks fails, it is repeated over all rows. Only a second failure is an
    error.

    Example:
        >>> from torchrl_llm.modules.backends import FakeBackend
        >>> from torchrl_llm.weights import CanaryCheck
        >>> trained = FakeBackend(vocab_size=16, eos_token_ids=(2,))
        >>> CanaryJudge().check(trained, CanaryCheck(trained).target()).followed is None
        True
    """

    def __init__(self) -> None:
        self._rows: tuple[tuple[int, ...], ...] = ()
        self._forget()

    def _forget(self) -> None:
        self._past: deque[tuple[int | str, Tensor]] = deque(maxlen=_KEPT)
        self._spread: Tensor | None = None
        self._kernels: float | None = None
        self._last: _Seen | None = None
        self._unmoved = 0.0

    def check(
        self, engine: TokenScorer, target: CanaryTarget, *, version: int | None = None
    ) -> CanaryReport:
        """Compare an engine with the expected log-probs; raise if it has different weights.

        Args:
            engine: the engine that received the weights.
            target: expected log-probs. Rows that differ from the last check reset the history.
            version: version of the weights, for the message.

        Raises:
            WeightUpdateError: the engine does not compute with these weights.
        """
        if target.rows != self._rows:
            self._rows = target.rows
            self._forget()
        found = first = target.score(engine, first=True)
        evidence = self._weigh(target, first)
        doubtful = evidence.far or evidence.behind is not None
        if doubtful and target.num_first < len(target.rows):
            found = torch.cat([first, target.score(engine, first=False)])
            evidence = self._weigh(target, found)
        unmoved = self._count_unmoved(target, first)
        what = "the weights" if version is None else f"version {version} of the weights"
        why = self._why(evidence, unmoved, len(found))
        if why:
            raise WeightUpdateError(
                f"the engine does not compute with {what}: {why}; {self._worst(target, found)}"
            )
        if self._kernels is None:
            self._kernels = min(max(evidence.report.rounding, 1.0), _KERNELS)
        self._spread = self._smoothed(target)
        self._past.append((len(self._past) if version is None else version, target.exact))
        self._last, self._unmoved = _Seen(first, target.rounded), unmoved
        return evidence.report

    # -- evidence ---------------------------------------------------------------------------------

    def _smoothed(self, target: CanaryTarget) -> Tensor:
        """A single sample of a token's rounding may be 0; the mean of several is not."""
        if self._spread is None:
            return target.spread
        return self._spread + (target.spread - self._spread) / min(len(self._past) + 1, _SMOOTH)

    def _unit(self, target: CanaryTarget) -> Tensor:
        spread = self._smoothed(target)
        return spread.clamp(min=float(spread.median())) * (self._kernels or 1.0)

    def _weigh(self, target: CanaryTarget, found: Tensor) -> _Evidence:
        size = len(found)
        unit, reference = self._unit(target)[:size], target.exact[:size]
        difference = (found - reference).abs()
        half, most = (difference / unit).quantile(torch.tensor([0.5, 0.9]))
        rounding = float(torch.maximum(half, most / _TAIL))
        # Also true for NaN.
        far = not rounding <= FAR * (_KERNELS if self._kernels is None else 1.0)
        followed, behind = None, None
        if self._past:
            past_An = torch.stack([exact[:size] for _, exact in self._past])
            moves_An, made_An = (reference - past_An) / unit, (found - past_An) / unit
            sizes_A = moves_An.norm(dim=1)
            parts_A = (made_An * moves_An).sum(dim=1) / sizes_A.square()
            # A move that is too short gives no verdict.
            missed_A = torch.where(parts_A < _FOLLOWED, (1 - parts_A) * sizes_A, 0.0)
            missed_A = missed_A.where(sizes_A >= _CLEAR, 0.0)
            clear = (sizes_A >= _CLEAR).nonzero().flatten()
            if len(clear):
                at = int(missed_A.argmax()) if missed_A.max() > _CLEAR else int(clear[-1])
                followed = float(parts_A[at])
                behind = self._past[at][0] if missed_A[at] > _CLEAR else None
        report = CanaryReport(float(difference.median()), rounding, followed)
        return _Evidence(report, far, behind)

    def _count_unmoved(self, target: CanaryTarget, first: Tensor) -> float:
        """Add the shares of tokens that moved since the engine last changed by a bit."""
        if self._last is None or not torch.equal(first, self._last.found):
            return 0.0
        size = len(first)
        moved = (target.rounded - self._last.rounded).abs()[:size]
        share = float((moved >= _MOVED * self._unit(target)[:size]).float().mean())
        # A few flipped bits may be invisible in the engine and visible in the trainer.
        return self._unmoved + (share if share >= _SHARE else 0.0)

    def _why(self, evidence: _Evidence, unmoved: float, tokens: int) -> str:
        report = evidence.report
        if evidence.behind is not None:
            return (
                f"of the trainer's move since version {evidence.behind} it made "
                f"{report.followed:.0%} (100% with the new weights, 0% with the old ones)"
            )
        if evidence.far:
            return (
                f"over {tokens} tokens it is {report.rounding:.3g} times as far from the trainer "
                f"as rounding explains ({FAR:g} is the limit; the median is "
                f"{report.difference:.3g} nats)"
            )
        if unmoved >= _UNMOVED:
            return "no bit of its log-probs has changed with the trainer's over the last versions"
        return ""

    def _worst(self, target: CanaryTarget, found: Tensor) -> str:
        difference = (found - target.exact[: len(found)]).abs()
        # NaN counts as the largest difference.
        at = int((difference / self._unit(target)[: len(found)]).nan_to_num(nan=torch.inf).argmax())
        places = [(row, i) for row, ids in enumerate(target.rows) for i in range(len(ids))]
        row, position = [place for place in places if place[1] >= target.start][at]
        return (
            f"token {target.rows[row][position]} at position {position} of canary row {row} has "
            f"log-prob {float(found[at]):.6g} there and {float(target.exact[at]):.6g} in the "
            f"trainer (apart by {float(difference[at]):.3g} nats)"
        )
