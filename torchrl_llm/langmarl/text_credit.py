"""Text credit: a critic's texts for each agent, written into the rows of an episode.

:class:`TextCredit` corresponds to an advantage estimator for weights; a replay buffer can contain
both, so that the same rows train texts and weights. :func:`episode_of` turns rows into an episode
for a critic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey

from torchrl_llm.data.input_modes import message_text
from torchrl_llm.data.replay_buffers.grouping import GroupTransform
from torchrl_llm.data.replay_buffers.trajectory_queues import Trajectory as AgentRows
from torchrl_llm.langmarl.calls import CallLog, scope
from torchrl_llm.langmarl.environment import (
    BaseCritic,
    Trajectory,
    evaluation_of,
    in_threads,
    said_of,
)
from torchrl_llm.langmarl.language_policy import LanguagePolicy

EVALUATION_KEY = "evaluation"


def episode_of(rows: Sequence[TensorDictBase], number: int = 0) -> Trajectory:
    """Build an episode of one or several agents from the rows of its turns.

    Args:
        rows: rows with a history, ``"agent"`` if there are several agents, and ``"task"``, JSON, if
            the environment has such tasks; else the columns ``query`` and ``answer``.
        number: number of the episode.

    Returns:
        The steps turn by turn, with the agents of each turn in the order of their rows. The reward
        is the highest reward of the agents (agents of a team have equal rewards), or NaN if one of
        them is invalid.
    """
    ordered = sorted(rows, key=lambda row: (int(row["turn"]), int(row["traj_id"])))
    totals: dict[str, float] = {}
    errors = []
    for row in ordered:
        name, after = _text(row, "agent"), row["next"]
        valid = bool(after.get("reward_valid", True))
        totals[name] = totals.get(name, 0.0) + float(after["reward"].sum())
        if not valid or not math.isfinite(totals[name]):
            errors.append(_failure(after) or "the reward is invalid")
    metadata: dict[str, Any] = {"episode_id": number, "rewards": totals}
    if errors:
        metadata["error"] = errors[0]
    reward = math.nan if errors else max(totals.values())
    return Trajectory(_task(ordered[0]), [_step(row) for row in ordered], reward, metadata)


def _step(row: TensorDictBase) -> dict[str, Any]:
    *before, said = row["history"].full.chats[0]
    policy = message_text(before[0]) if before[0]["role"] == "system" else ""
    return {
        "agent_id": _text(row, "agent") or "agent_1",
        "observation": message_text(before[-1]),
        "action": message_text(said),
        "policy": policy,
    }


def _task(row: TensorDictBase) -> dict[str, Any]:
    if task := _text(row, "task"):
        return json.loads(task)
    return {name: text for name in ("query", "answer") if (text := _text(row, name))}


def _failure(row: TensorDictBase) -> str:
    """The error of a row, if it has one."""
    kind, message = _text(row, ("error", "type")), _text(row, ("error", "message"))
    return f"{kind}: {message}" if kind else ""


def _text(row: TensorDictBase, name: NestedKey) -> str:
    value = row.get(name, None)
    value = getattr(value, "data", value)
    return value if isinstance(value, str) else ""


class TextCredit(GroupTransform):
    """Evaluates each episode that enters a replay buffer, with one call of a critic per episode.

    It writes ``"evaluation"`` into every row: the critic's text for the row's agent, empty if the
    critic failed or did not name the agent. An episode without a valid reward is dropped, as in
    every :class:`~torchrl_llm.data.replay_buffers.GroupTransform`.

    Args:
        critic: the critic.
        policies: playing policies by agent name; the critic may read them.
        log: journal of the calls; an in-memory journal if not given.
        workers: number of episodes that are evaluated concurrently.

    Attributes:
        num_fallbacks: number of episodes with a failed evaluation.

    Example:
        >>> from torchrl_llm.langmarl.environment import BaseCritic
        >>> class Fair(BaseCritic):
        ...     def evaluate(self, trajectory, policies):
        ...         return {"raw_response": "", "per_agent": dict.fromkeys(policies, "Well done.")}
        >>> policies = {"X": LanguagePolicy("Win."), "O": LanguagePolicy("Win.")}
        >>> TextCredit(Fair(), policies).group_size  # the rows of an episode come together
        2
    """

    def __init__(
        self,
        critic: BaseCritic,
        policies: Mapping[str, LanguagePolicy],
        *,
        log: CallLog | None = None,
        workers: int = 1,
    ) -> None:
        super().__init__(len(policies), prompt_key="episode_id" if len(policies) > 1 else None)
        self.critic, self.policies, self.workers = critic, dict(policies), workers
        self.log = CallLog() if log is None else log
        self.num_fallbacks = self._num_episodes = 0

    def _key(self, row: TensorDict) -> Hashable:
        """All agents of an episode are one group."""
        return None if self.group_size == 1 else self._group_of(row)

    def complete(self, groups: Sequence[Sequence[AgentRows]]) -> list[list[TensorDict] | None]:
        """The rows with the critic's texts."""
        first = self._num_episodes
        self._num_episodes += len(groups)
        jobs = [
            episode_of([row for each in group for row in each.rows], first + place)
            for place, group in enumerate(groups)
        ]
        found = in_threads(self._evaluate, jobs, self.workers)
        return [
            [self._told(row, said) for each in group for row in each.rows]
            for group, said in zip(groups, found, strict=True)
        ]

    def _evaluate(self, episode: Trajectory) -> Mapping[str, Any]:
        texts = {name: policy.text for name, policy in self.policies.items()}
        with scope(self.log, "critic", f"critic/{episode.metadata['episode_id']}"):
            said = evaluation_of(self.critic, episode, texts)
        self.num_fallbacks += "error" in said
        return said["per_agent"]

    def _told(self, row: TensorDict, said: Mapping[str, Any]) -> TensorDict:
        name = _text(row, "agent") or next(iter(self.policies))
        return row.set(EVALUATION_KEY, said_of(said, name))

    def get_extra_state(self) -> dict[str, Any]:
        """Queues and counts."""
        counted = {"num_fallbacks": self.num_fallbacks, "num_episodes": self._num_episodes}
        return {**super().get_extra_state(), **counted}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the state of :meth:`get_extra_state`."""
        super().set_extra_state(state)
        self.num_fallbacks, self._num_episodes = state["num_fallbacks"], state["num_episodes"]
