"""Rules for stale rows: how old the sampling weights may be.

The trainer counts its updates: after ``v`` updates it is at version ``v`` and trains the next batch
with these weights. A token sampled by version ``u`` then has the age ``v - u``. A
:class:`StalenessRule` decides which ages are trained. A :class:`Pacer` limits how many rows are
collected ahead, so that with ``wait`` nothing becomes too old.

Everything here depends only on versions and counts, not on channels, processes or clocks.

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
    """The policy versions of a row's sampled tokens.

    Args:
        row: with a trace.

    Returns:
        int32, one per sampled token of the row.

    Raises:
        DataError: a sampled token has no policy version.
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
    """Number of trained sampled tokens by age.

    Args:
        rows: with traces.
        version: current version of the trainer.

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
    """Mean and largest age of the trained tokens, in updates.

    Args:
        histogram: result of :func:`age_histogram`.

    Returns:
        ``train/policy_age_mean`` and ``train/policy_age_max``; NaN if no token is trained.

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
    """Which ages are trained, and what happens to older rows.

    Attributes:
        max_policy_age: most updates between sampling and training of a token; 0 trains only on
            samples of the current weights.
        on_stale: ``wait`` keeps collectors from running so far ahead that rows become too old
            (:class:`Pacer`), and drops rows that still do (a very slow worker, a group that never
            filled). ``drop`` does not limit collectors, and removes rows with a token that is too
            old: they count as members of their group but are excluded from its statistics. ``mask``
            trains the rest of such rows and keeps their rewards in the group's baseline.

    A negative age means that the token was sampled by weights that this trainer never had: the run
    was killed and resumed from an earlier checkpoint. Such a token is stale, too.

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
        """Which tokens are too old, or were sampled by weights that this trainer never had.

        Args:
            row: with a trace.
            version: current version of the trainer.

        Returns:
            bool ``[T]``; false for tokens that were not sampled.
        """
        sampled_versions(row)  # raises if they are unknown
        age = version - leaf(row, ("trace", "policy_version"))
        too_old = (age < 0) | (age > self.max_policy_age)
        return too_old & (leaf(row, ("trace", "source")) == Source.SAMPLED)

    def verdict(self, row: TensorDict, version: int) -> Literal["keep", "drop", "mask"]:
        """The verdict on a row.

        Args:
            row: with a trace.
            version: current version of the trainer.
        """
        versions = sampled_versions(row)
        if not versions.numel():
            return "keep"
        ages = version - versions
        if self.allows(int(ages.min())) and self.allows(int(ages.max())):
            return "keep"
        return "mask" if self.on_stale == "mask" else "drop"

    def mark(self, row: TensorDict, version: int) -> Literal["keep", "drop", "mask"]:
        """Mask stale tokens, in place.

        The mask reason of the tokens becomes ``stale``. If the row is dropped, all its sampled
        tokens are masked and its reward becomes invalid. A token that was already masked keeps its
        reason.

        Args:
            row: with a trace; its nodes are replaced, not modified.
            version: current version of the trainer.

        Returns:
            The result of :meth:`verdict`.
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
    """Limits how far collectors run ahead of the trainer.

    With ``wait``, at most ``(max_policy_age + 1) * batch_rows`` rows are in flight at any time:
    granted, being collected, or waiting for training. Each step uses ``batch_rows`` of them. So a
    row started at version ``v`` is trained at ``v + max_policy_age`` at the latest, if the oldest
    rows are trained first and no worker is overtaken. :meth:`stragglers` names the overtaken
    workers that the trainer must wait for. (The bound is that of AReaL, arXiv:2505.24298, equation
    3.)

    With ``drop`` and ``mask``, collectors run ahead as far as the channel has room.

    Args:
        rule: the staleness rule.
        batch_rows: rows per step.
        outstanding: rows already granted by the run that this one resumes.

    Raises:
        ConfigError: for ``batch_rows`` below 1.

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
        # For each version, the number of deliveries of each busy worker at the end of that version.
        self._begun: dict[int, dict[str, int]] = {}

    @property
    def waits(self) -> bool:
        """Whether collectors wait for the trainer, and the trainer for the slowest collector."""
        return self.rule.on_stale == "wait"

    @property
    def limit(self) -> int:
        """Most rows in flight."""
        if not self.waits:
            return _FREE
        return (self.rule.max_policy_age + 1) * self.batch_rows

    def grant(self) -> int:
        """Number of additional rows that may start now; they count as in flight from now on."""
        more = max(0, self.limit - self.outstanding)
        self.outstanding += more
        return more

    def used(self, num_rows: int) -> None:
        """Report rows that were trained or discarded, after their update.

        Args:
            num_rows: number of rows, including discarded ones.
        """
        self.outstanding = max(0, self.outstanding - num_rows)

    def next_version(self, version: int, workers: Mapping[str, WorkerCounts]) -> None:
        """Record the busy workers when the trainer's version changes.

        Args:
            version: the new version; rows of busy workers are older.
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
            version: current version of the trainer.
            workers: the channel's counts; workers that are gone are not awaited.

        Returns:
            Names of workers that are still collecting rows started ``max_policy_age`` updates ago.
        """
        begun = self._begun.get(version - self.rule.max_policy_age + 1, {})
        return sorted(
            name
            for name, delivered in begun.items()
            if name in workers and workers[name].delivered <= delivered
        )
