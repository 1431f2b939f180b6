"""The rule by which weights that an engine does not have are told from rounding.

It knows tokens and their log-probs only, so that whoever has an engine can apply it: an updater in
the trainer's process, or a worker that was told with the weights what they compute. Next:
:mod:`torchrl_llm.weights.canary`, which asks the trainer.

Shape legend: ``N`` scored tokens of all rows, ``n`` those of the rows that were scored, ``A`` past
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

# The figures come from test/benchmarks/bench_canary.py. In right updates the differences were at
# most 3.1 times the measured rounding (median; the 9th tenth: 10 times), and what an engine seemed
# to have missed of a move was 12 times.
FAR = 5.0
"""The median difference of engine and trainer is at most so many times the rounding."""
_TAIL = 5.0
# Nine of ten differences are at most so many times as large as half of them may be.
_KERNELS = 2.0
# The engine's kernels may round so much more than the trainer's; its first check says.
_CLEAR = 20.0
# A move of the trainer, and the part of it that was missed, are clear from this length on, in
# units of the rounding (euclidean, over all tokens).
_FOLLOWED = 0.8
# An engine that made this part of a move has followed it.
_MOVED, _SHARE, _UNMOVED = 0.1, 0.25, 1.5
# A token has moved by so many units; a version has where so many of its tokens have; an engine
# that stands still while such shares add up to this is stuck.
_SMOOTH, _KEPT = 8, 256


class CanaryReport(NamedTuple):
    """How far engine and trainer are apart on the canary rows.

    Attributes:
        difference: median difference of two log-probs, in nats.
        rounding: how far the differences are as a multiple of what rounding explains; about 1 for a
            right engine.
        followed: which part of the trainer's move the engine made: 1.0 when it has the new weights,
            0.0 when it has the old ones. The move is that since the latest version which can be
            told from the present one; ``None`` when none can, the digest is the only proof then.
    """

    difference: float
    rounding: float
    followed: float | None


class CanaryTarget(NamedTuple):
    """What an engine with the trainer's weights computes, and how far rounding may take it away.

    Attributes:
        rows: token ids.
        start: position of the first token of each row that is scored.
        num_first: rows that are scored first; the others where those leave doubt.
        exact: float32 ``[N]``, log-probs in the trainer's own precision.
        rounded: float32 ``[N]``, in the engine's.
        spread: float32 ``[N]``, nats above 0 that rounding explains.
    """

    rows: tuple[tuple[int, ...], ...]
    start: int
    num_first: int
    exact: Tensor
    rounded: Tensor
    spread: Tensor

    def score(self, scorer: TokenScorer, *, first: bool) -> Tensor:
        """Log-probs of the rows that are scored first, or else of the others.

        Args:
            scorer: an engine.
            first: which ones.

        Returns:
            Float32 ``[n]`` on the CPU, row after row.
        """
        rows = self.rows[: self.num_first] if first else self.rows[self.num_first :]
        return score_rows(scorer, rows, self.start)

    def to_json(self) -> dict[str, Any]:
        """What :meth:`from_json` reads."""
        return {
            name: value.tolist() if isinstance(value, Tensor) else value
            for name, value in self._asdict().items()
        }

    @classmethod
    def from_json(cls, value: Any) -> CanaryTarget:
        """A target out of a message.

        Args:
            value: of :meth:`to_json`.

        Raises:
            WeightUpdateError: it is none.
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
    """Log-probs of the tokens of rows from a position on: float32 ``[n]`` on the CPU."""
    ids = [torch.tensor(row) for row in rows]
    select = [torch.arange(len(row)) >= start for row in rows]
    return scorer.token_scores(ids, select).log_probs.float().cpu()


class _Seen(NamedTuple):
    """What was found when an engine was checked last."""

    found: Tensor
    rounded: Tensor


class _Evidence(NamedTuple):
    report: CanaryReport
    far: bool
    behind: int | str | None


class CanaryJudge:
    """Judges one engine, version after version.

    Three questions are asked, all in units of the rounding that was measured for each token:

    - Are the differences of engine and trainer explained by rounding, half of them and nine of ten?
      They are not where weights were permuted, or a part of them has stayed behind for long.
    - Of the trainer's move since any version it remembers, did the engine make its part? With
      ``d`` the move, and ``e`` what the engine made of it, that is ``<e, d> / <d, d>``: 1 with the
      new weights, 0 with the old ones. Where ``|d|`` is too short for rounding, nothing is said:
      an engine that stays behind is found when the moves have added up.
    - Has any bit of the engine's log-probs changed, while the trainer's have at the same precision?

    A wrong answer to the first two is asked again over all rows before it is an error.

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
        """Compare an engine with what it should compute, and refuse weights that it does not have.

        Args:
            engine: what was given the weights.
            target: what it should compute; with other rows than before nothing is remembered.
            version: of the weights, for the message.

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
        """One sample of a token's rounding may happen to be 0; the mean of several is not."""
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
            # A move that is too short says nothing, whatever was made of it.
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
        """Shares of tokens that moved in the trainer since a bit last changed in the engine."""
        if self._last is None or not torch.equal(first, self._last.found):
            return 0.0
        size = len(first)
        moved = (target.rounded - self._last.rounded).abs()[:size]
        share = float((moved >= _MOVED * self._unit(target)[:size]).float().mean())
        # A few flipped bits may come to nothing in the engine, and be seen in the trainer.
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
        # A NaN is the worst there is.
        at = int((difference / self._unit(target)[: len(found)]).nan_to_num(nan=torch.inf).argmax())
        places = [(row, i) for row, ids in enumerate(target.rows) for i in range(len(ids))]
        row, position = [place for place in places if place[1] >= target.start][at]
        return (
            f"token {target.rows[row][position]} at position {position} of canary row {row} has "
            f"log-prob {float(found[at]):.6g} there and {float(target.exact[at]):.6g} in the "
            f"trainer (apart by {float(difference[at]):.3g} nats)"
        )
