"""A proof that an engine computes with the weights that were trained.

A digest proves that bytes arrived. Engines fuse, pad, cast and repack weights after that, and some
loads return without an error and are wrong. What is left to compare is what both compute: the
log-probs of fixed rows of tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.errors import ConfigError, WeightUpdateError

__all__ = ["CanaryCheck", "CanaryReport"]

# This many times the difference between engine and trainer at the last check is no rounding: a move
# of the trainer that is larger is a clear one, and a difference that is larger a clear one.
_CLEAR = 4.0
# Part of a clear move that an engine may be away from the trainer after it.
_MISSED = 0.1


class CanaryReport(NamedTuple):
    """How far engine and trainer are apart on the canary rows.

    Attributes:
        max_difference: largest difference of two log-probs, in nats.
        followed: which part of the trainer's move since the last check the engine made: 1.0 when it
            has the new weights, 0.0 when it has the old ones; ``None`` when the trainer did not
            move enough to tell.
    """

    max_difference: float
    followed: float | None


class _Last(NamedTuple):
    reference: Tensor
    difference: float


class CanaryCheck:
    """Compares the log-probs of an engine with the trainer's on fixed rows.

    Two questions are asked. Are the log-probs equal, within ``tolerance``? And did the engine
    follow where the trainer went since the last check? The second finds an update that did nothing,
    or half of it, even when one small step moves the log-probs by less than the tolerance, as it
    does in bfloat16.

    Args:
        reference: the trainer's scorer, e.g. a
            :class:`~torchrl_llm.modules.backends.TransformersBackend` over the trained model.
        prompts: rows of token ids, int64 ``[T]`` with at least 2 tokens; by default
            ``num_prompts`` rows of ids drawn over the whole vocabulary. A log-prob depends on every
            weight but the embeddings of tokens that are not there.
        tolerance: most nats that a log-prob may differ. Float32 on both sides is far below the
            default; a bfloat16 engine needs about 0.1.
        num_prompts: rows to draw, where none are given.
        num_tokens: of each.
        seed: of the draw.

    Attributes:
        prompts: the rows.

    Raises:
        ConfigError: for a tolerance that is not positive, a row that has nothing to score, or no
            prompts and a reference that does not know its vocabulary.

    Example:
        >>> from torchrl_llm.modules.backends import FakeBackend
        >>> trained = FakeBackend(vocab_size=16, eos_token_ids=(2,))
        >>> other = FakeBackend(vocab_size=16, eos_token_ids=(2,), seed=1)
        >>> canary = CanaryCheck(trained)
        >>> canary.check(trained).max_difference
        0.0
        >>> canary.check(other)
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.WeightUpdateError: ...
    """

    def __init__(
        self,
        reference: TokenScorer,
        prompts: Sequence[Tensor] | None = None,
        *,
        tolerance: float = 1e-3,
        num_prompts: int = 2,
        num_tokens: int = 16,
        seed: int = 0,
    ) -> None:
        if tolerance <= 0:
            raise ConfigError(f"tolerance must be above 0 nats, got {tolerance}")
        if prompts is None:
            if reference.vocab_size is None:
                raise ConfigError("pass prompts=: the reference does not know its vocabulary")
            generator = torch.Generator().manual_seed(seed)
            shape = (num_prompts, num_tokens)
            prompts = torch.randint(reference.vocab_size, shape, generator=generator).unbind()
        short = [row for row, ids in enumerate(prompts) if len(ids) < 2]
        if short or not prompts:
            raise ConfigError(f"canary rows need 2 tokens or more each; these have less: {short}")
        self._reference, self._tolerance = reference, tolerance
        self.prompts = [ids.to("cpu", torch.int64) for ids in prompts]
        self._select = [torch.arange(len(ids)) > 0 for ids in self.prompts]
        self._last: WeakKeyDictionary[Hashable, _Last] = WeakKeyDictionary()

    @torch.no_grad()
    def scores(self, scorer: TokenScorer) -> Tensor:
        """Log-probs of the canary tokens.

        Args:
            scorer: an engine, or the reference.

        Returns:
            Float32 ``[N]`` on the CPU, row after row, without the first token of each.
        """
        return scorer.token_scores(self.prompts, self._select).log_probs.float().cpu()

    def observe(self, engine: TokenScorer) -> CanaryReport:
        """Compare without judging, and without counting as a check.

        Args:
            engine: what was given the weights.
        """
        return self._compare(engine, self.scores(self._reference), self.scores(engine))

    def _compare(self, engine: TokenScorer, reference: Tensor, found: Tensor) -> CanaryReport:
        largest = float((found - reference).abs().max())
        last = self._last.get(engine)
        if last is None:
            return CanaryReport(largest, None)
        move = reference - last.reference
        size = float(move.square().mean().sqrt())
        if size == 0 or size < _CLEAR * last.difference:
            return CanaryReport(largest, None)
        followed = float((found - last.reference) @ move / (move @ move))
        return CanaryReport(largest, followed)

    def check(self, engine: TokenScorer, *, version: int | None = None) -> CanaryReport:
        """Compare an engine with the trainer, and refuse weights that it does not have.

        Args:
            engine: what was given the weights.
            version: their number, for the message.

        Raises:
            WeightUpdateError: the log-probs differ, or the engine did not follow the trainer.
        """
        reference, found = self.scores(self._reference), self.scores(engine)
        report = self._compare(engine, reference, found)
        what = "the weights" if version is None else f"version {version} of the weights"
        if not report.max_difference <= self._tolerance:
            raise WeightUpdateError(
                f"the engine does not compute with {what}: {self._worst(reference, found)}, and "
                f"{self._tolerance:g} is tolerated. "
                + ("" if report.followed is None else self._moved(report.followed))
            )
        difference = float((found - reference).square().mean().sqrt())
        if report.followed is not None and self._missed(engine, reference, difference):
            raise WeightUpdateError(
                f"the engine does not compute with {what}, though no log-prob differs by more than "
                f"{report.max_difference:.3g}. {self._moved(report.followed)}"
            )
        self._last[engine] = _Last(reference, difference)
        return report

    def _missed(self, engine: TokenScorer, reference: Tensor, difference: float) -> bool:
        last = self._last[engine]
        move = float((reference - last.reference).square().mean().sqrt())
        return difference > _CLEAR * last.difference and difference > _MISSED * move

    @staticmethod
    def _moved(followed: float) -> str:
        return (
            f"It made {followed:.0%} of the trainer's last move (100% with the new weights, 0% "
            "with the old ones)"
        )

    def _worst(self, reference: Tensor, found: Tensor) -> str:
        difference = (found - reference).abs()
        # A NaN is the worst there is.
        at = int(difference.nan_to_num(nan=torch.inf).argmax())
        rows = torch.cat([torch.full((len(ids) - 1,), row) for row, ids in enumerate(self.prompts)])
        ids = torch.cat([ids[1:] for ids in self.prompts])
        row = int(rows[at])
        position = at - int((rows < row).sum()) + 1
        return (
            f"token {int(ids[at])} at position {position} of canary row {row} has log-prob "
            f"{float(found[at]):.6g} there and {float(reference[at]):.6g} in the trainer (apart by "
            f"{float(difference[at]):.3g} nats)"
        )
