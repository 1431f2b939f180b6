"""How old the weights may be that sampled what is trained on.

The trainer counts its updates: it is at version ``v`` after ``v`` of them, and trains the next
batch with those weights. A token that version ``u`` sampled has the age ``v - u`` then. A
:class:`StalenessRule` says which ages are trained; a :class:`Pacer` says how many rows may be
collected ahead, so that under ``wait`` nothing ever becomes too old.

Everything here is a function of versions and counts: no channel, no process, no clock.

Shape legend: ``T`` tokens of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from tensordict import TensorDict
from torch import Tensor

from torchrl_llm._checked import Ge, checked
from torchrl_llm.collectors.transport.channel import WorkerCounts
from torchrl_llm.data.enums import MaskReason, Source
from torchrl_llm.data.nodes import leaf
from torchrl_llm.data.rollouts import invalidate_reward, mask_trained
from torchrl_llm.errors import DataError

_FREE = 1 << 30


def sampled_versions(row: TensorDict) -> Tensor:
    """The versions that sampled a row's tokens.

    Args:
        row: with a trace.

    Returns:
        int32, one for each sampled token of the row.

    Raises:
        DataError: a sampled token does not say which version sampled it.
    """
    source, version = leaf(row, ("trace", "source")), leaf(row, ("trace", "policy_version"))
    if source is None or version is None:
        raise DataError(
            'a row has no ("trace", "policy_version"), so the age of its tokens is unknown: '
            "sample with a policy that writes a trace"
        )
    versions = version[source == Source.SAMPLED]
    if versions.numel() and int(versions.min()) < 0:
        raise DataError(
            "a sampled token has no policy version (-1), so its age is unknown: the policy must "
            "count its versions"
        )
    return versions


def age_histogram(rows: Iterable[TensorDict], version: int) -> dict[int, int]:
    """Sampled tokens by their age, those only that are trained.

    Args:
        rows: with traces.
        version: of the weights that are trained now.

    Returns:
        Age in updates to number of tokens, youngest first.
    """
    counts: Counter[int] = Counter()
    for row in rows:
        versions = sampled_versions(row)
        reason = leaf(row, ("trace", "mask_reason"))
        if reason is not None:
            source = leaf(row, ("trace", "source"))
            versions = versions[reason[source == Source.SAMPLED] == MaskReason.TRAINED]
        values, numbers = versions.unique(return_counts=True)
        for value, number in zip(values.tolist(), numbers.tolist(), strict=True):
            counts[version - value] += number
    return dict(sorted(counts.items()))


def age_metrics(histogram: Mapping[int, int]) -> dict[str, float]:
    """Mean and largest age of the tokens that are trained, in updates.

    Args:
        histogram: of :func:`age_histogram`.

    Returns:
        ``train/policy_age_mean`` and ``train/policy_age_max``; NaN where nothing is trained.

    Example:
        >>> age_metrics({0: 30, 2: 10})
        {'train/policy_age_mean': 0.5, 'train/policy_age_max': 2}
    """
    total = sum(histogram.values())
    if not total:
        return {"train/policy_age_mean": float("nan"), "train/policy_age_max": float("nan")}
    mean = sum(age * number for age, number in histogram.items()) / total
    return {"train/policy_age_mean": mean, "train/policy_age_max": max(histogram)}


@checked
@dataclass(frozen=True, kw_only=True)
class StalenessRule:
    """Which ages are trained, and what becomes of the others.

    Attributes:
        max_policy_age: updates that the weights may have moved since a token was sampled; 0 trains
            on what the present weights sampled only.
        on_stale: ``wait`` keeps collectors from running so far ahead that anything becomes too old
            (:class:`Pacer`), and drops what does all the same (its worker was slow beyond all
            limits, its group never filled). ``drop`` lets them run, and takes rows with a token
            that is too old out: they fill their place in their group and enter no statistic.
            ``mask`` trains the rest of such rows, and keeps their rewards in the group's baseline.

    A token of a version that is still to come (negative age) was sampled by weights that this
    trainer never had: those of a run that was killed and resumed from before. It is stale, too.

    Raises:
        ConfigError: for a negative age or an unknown rule.

    Example:
        >>> rule = StalenessRule(max_policy_age=1, on_stale="drop")
        >>> [rule.allows(age) for age in (-1, 0, 1, 2)]
        [False, True, True, False]
    """

    max_policy_age: Annotated[int, Ge(0)] = 1
    on_stale: Literal["wait", "drop", "mask"] = "wait"

    def allows(self, age: int) -> bool:
        """Whether tokens of an age are trained."""
        return 0 <= age <= self.max_policy_age

    def stale_tokens(self, row: TensorDict, version: int) -> Tensor:
        """Which tokens are too old, or of weights that this trainer never had.

        Args:
            row: with a trace.
            version: of the weights that are trained now.

        Returns:
            bool ``[T]``; false where a token was not sampled.
        """
        sampled_versions(row)  # raises where they are unknown
        age = version - leaf(row, ("trace", "policy_version"))
        too_old = (age < 0) | (age > self.max_policy_age)
        return too_old & (leaf(row, ("trace", "source")) == Source.SAMPLED)

    def verdict(self, row: TensorDict, version: int) -> Literal["keep", "drop", "mask"]:
        """What becomes of a row.

        Args:
            row: with a trace.
            version: of the weights that are trained now.
        """
        versions = sampled_versions(row)
        if not versions.numel():
            return "keep"
        ages = version - versions
        if self.allows(int(ages.min())) and self.allows(int(ages.max())):
            return "keep"
        return "mask" if self.on_stale == "mask" else "drop"

    def mark(self, row: TensorDict, version: int) -> Literal["keep", "drop", "mask"]:
        """Take what is too old out of the loss, in place.

        The tokens' mask reason becomes ``stale``; that of all sampled tokens, and the reward
        invalid, where the row is dropped. A token that was masked before keeps its reason.

        Args:
            row: with a trace; its nodes are replaced, not changed.
            version: of the weights that are trained now.

        Returns:
            What became of it, as :meth:`verdict` says.
        """
        verdict = self.verdict(row, version)
        if verdict == "keep":
            return verdict
        stale = self.stale_tokens(row, version) if verdict == "mask" else None
        mask_trained(row, MaskReason.STALE, where=stale)
        if verdict == "drop":
            invalidate_reward(row)
        return verdict


class Pacer:
    """How far collectors may run ahead of the trainer.

    Under ``wait`` at most ``(max_policy_age + 1) * batch_rows`` rows are under way at any time:
    granted, being collected, or waiting to be trained. Each step uses up ``batch_rows`` of them, so
    a row that was begun at version ``v`` is trained at ``v + max_policy_age`` at the latest, if
    the oldest are trained first and no worker is overtaken. For the workers that are,
    :meth:`stragglers` says whom the trainer must wait for before it trains. (The bound on rows is
    that of AReaL, arXiv:2505.24298, equation 3.)

    Under ``drop`` and ``mask`` collectors run as far ahead as the channel has room.

    Args:
        rule: the bound.
        batch_rows: rows that a step uses up.
        outstanding: rows that were granted before, by a trainer that this one continues.

    Raises:
        ConfigError: for a batch without rows.

    Example:
        >>> pacer = Pacer(StalenessRule(max_policy_age=1), batch_rows=8)
        >>> pacer.grant(), pacer.grant()
        (16, 0)
        >>> pacer.used(8)  # a step was made, and its update
        >>> pacer.grant()
        8
    """

    @checked
    def __init__(
        self, rule: StalenessRule, batch_rows: Annotated[int, Ge(1)], *, outstanding: int = 0
    ) -> None:
        self.rule, self.batch_rows = rule, batch_rows
        self.outstanding = outstanding
        # Version to the deliveries that each worker had made when it ended, of busy workers only.
        self._begun: dict[int, dict[str, int]] = {}

    @property
    def waits(self) -> bool:
        """Whether collectors wait for the trainer, and it for the slowest of them."""
        return self.rule.on_stale == "wait"

    @property
    def limit(self) -> int:
        """Rows that may be under way."""
        if not self.waits:
            return _FREE
        return (self.rule.max_policy_age + 1) * self.batch_rows

    def grant(self) -> int:
        """Rows that may be begun now in addition; they count as under way from here on."""
        more = max(0, self.limit - self.outstanding)
        self.outstanding += more
        return more

    def used(self, num_rows: int) -> None:
        """Say that rows were trained or thrown away, once the update that they led to is made.

        Args:
            num_rows: how many; rows that were thrown away are used, too.
        """
        self.outstanding = max(0, self.outstanding - num_rows)

    def next_version(self, version: int, workers: Mapping[str, WorkerCounts]) -> None:
        """Remember who is busy while the trainer's version changes.

        Args:
            version: the new one; what busy workers have begun is older.
            workers: the channel's counts.
        """
        if not self.waits:
            return
        self._begun[version] = {
            name: counts.delivered for name, counts in workers.items() if counts.claimed > 0
        }
        for old in [v for v in self._begun if v <= version - self.rule.max_policy_age]:
            del self._begun[old]

    def stragglers(self, version: int, workers: Mapping[str, WorkerCounts]) -> list[str]:
        """Workers whose rows would be too old if they came after this step.

        Args:
            version: of the weights that are trained now.
            workers: the channel's counts; who is not there any more is not waited for.

        Returns:
            Names; they are still at rows that they began ``max_policy_age`` updates ago.
        """
        begun = self._begun.get(version - self.rule.max_policy_age + 1, {})
        return sorted(
            name
            for name, delivered in begun.items()
            if name in workers and workers[name].delivered <= delivered
        )
