"""Rules for stale rows: how old the sampling weights may be.

The trainer counts its updates: after ``v`` updates it is at version ``v`` and trains the next batch
with these weights. A token sampled by version ``u`` then has the age ``v - u``. A
:class:`StalenessRule` decides which ages are trained. A :class:`Pacer` limits how many rows are
collected ahead, so that with ``wait`` nothing becomes too old.

The rules depend only on versions and counts, not on channels, processes or clocks.

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
    """Return the policy versions of a row's sampled tokens.

    Args:
        row: a row a row a row with a trace.

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
    """Return the number of trained sampled tokens by age.

    Args:
        rows: rows with traces.
        version: current version of the trainer.

    Returns:
        Number of tokens for each age in updates, youngest first.
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
    """Return the mean and the largest age of the trained tokens, in updates.

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
    """Defines which ages are trained, and what happens to older rows.

    Attributes:
        max_policy_age: most updates between sampling and training of a token; 0 trains only samples
            of the current weights.
        on_stale: ``wait`` limits how far collectors run ahead (:class:`Pacer`), so that rows do not
            become too old. It drops rows that are still too old (from a very slow worker, or in a
            group that never filled). ``drop`` does not limit collectors, and removes rows with a
            token that is too old. These rows count for the size of their group, but not in its
            statistics. ``mask`` masks only the tokens that are too old, trains the rest of the row,
            and keeps its reward in the group's baseline.

    A negative age means that the token was sampled by weights that this trainer never had, because
    the run was killed and resumed from an earlier checkpoint. Such a token is also stale.

    Raises:
        ConfigError: the age is negative or the rule is unknown.

    Example:
        >>> rule = StalenessRule(max_policy_age=1, on_stale="drop")
        >>> [rule.allows(age) for age in (-1, 0, 1, 2)]
        [False, True, True, False]
    """

    max_policy_age: Annotated[int, Ge(0)] = 1
    on_stale: Literal["wait", "drop", "mask"] = "wait"

    def allows(self, age: int) -> bool:
        """Return whether tokens of an age are trained."""
        return 0 <= age <= self.max_policy_age

    def stale_tokens(self, row: TensorDict, version: int) -> Tensor:
        """Return which tokens are too old, or come from weights that this trainer never had.

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
        """Return the verdict on a row.

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
            row: a row with a trace; its nodes are replaced, not modified.
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
    row that starts at version ``v`` is trained at version ``v + max_policy_age`` at the latest, if
    the oldest rows are trained first and no worker is overtaken. :meth:`stragglers` returns the
    overtaken workers that the trainer must wait for. (AReaL uses the same bound, arXiv:2505.24298,
    equation 3.)

    With ``drop`` and ``mask``, collectors run ahead until the channel is full.

    Args:
        rule: the staleness rule.
        batch_rows: rows per step.
        outstanding: rows that the resumed run had already granted.

    Raises:
        ConfigError: ``batch_rows`` is below 1.

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
        """Return how many additional rows may start now, and count them as in flight."""
        more = max(0, self.limit - self.outstanding)
        self.outstanding += more
        return more

    def used(self, num_rows: int) -> None:
        """Count rows that were trained or discarded, after their update.

        Args:
            num_rows: number of rows, including discarded ones.
        """
        self.outstanding = max(0, self.outstanding - num_rows)

    def next_version(self, version: int, workers: Mapping[str, WorkerCounts]) -> None:
        """Record the busy workers when the trainer's version changes.

        Args:
            version: the new version, which is newer than the rows of busy workers.
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
        """Return the workers whose rows would be too old if they arrived after this step.

        Args:
            version: current version of the trainer.
            workers: the channel's counts, without dropped workers.

        Returns:
            Names of workers that are still collecting rows started ``max_policy_age`` updates ago.
        """
        begun = self._begun.get(version - self.rule.max_policy_age + 1, {})
        return sorted(
            name
            for name, delivered in begun.items()
            if name in workers and workers[name].delivered <= delivered
        )
