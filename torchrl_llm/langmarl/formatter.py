"""Writer of episodes as texts that a critic reads: for a team, for each agent, or in short.

What an episode does not have is shown as ``N/A``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_llm.langmarl.environment import Trajectory

_MISSING = "N/A"
_QUESTION = ("question", "query", "problem", "prompt", "instruction", "description")
_TRUTH = ("ground_truth", "answer")
_CONTEXT = ("context",)
# What a critic needs not, or must not, see as part of the task.
_HIDDEN = {*_QUESTION, *_TRUTH, *_CONTEXT, "task_type", "tests", "test", "canonical_solution"}
_VERIFIED = ("verified_score", "verified_reward")

Episode = Mapping[str, Any] | Trajectory
"""An episode as a store keeps it (``task``, ``transitions``, ``reward``, ``metadata``; there may be
``policies``, too), or the episode itself."""


class TrajectoryFormatter:
    """Writes episodes as texts, in three lengths.

    Example:
        >>> step = {"agent_id": "agent_1", "action": "It is 4."}
        >>> one = Trajectory({"question": "2 + 2?", "answer": 4}, [step], 1.0)
        >>> print(TrajectoryFormatter.format_trajectory_minimal(one))
        Task: 2 + 2?
        Agents: agent_1
        Final answer: It is 4.
        Score: 1.00
    """

    @staticmethod
    def format_trajectory(episode: Episode) -> str:
        """An episode for a judgement of the whole team, with long parts cut.

        Args:
            episode: the episode.

        Returns:
            The task (context up to 500 characters), what each agent was told (200) and did (500),
            the final answer (500), the ground truth (200) and the score.
        """
        parts = _Parts(episode)
        lines = [*parts.opening(context_chars=500), "", "Agents:"]
        lines += [f"- {a}: {_cut(parts.policy(a), 200)}" for a in parts.agents] or [_MISSING]
        lines += ["", "What they did:"]
        lines += [
            f"{number}. {_agent(step)}: {_cut(_text(step.get('action')), 500)}"
            for number, step in enumerate(parts.steps, 1)
        ] or [_MISSING]
        return "\n".join([*lines, "", *parts.ending(answer_chars=500, truth_chars=200)])

    @staticmethod
    def format_for_credit_assignment(episode: Episode) -> str:
        """An episode for a judgement of each agent, with a section for each and nothing cut.

        Args:
            episode: the episode.

        Returns:
            The task, for each agent its policy and its turns (numbered in the order of all turns),
            the final answer, the ground truth and the score.
        """
        parts = _Parts(episode)
        lines = parts.opening()
        turns: dict[str, list[str]] = {agent: [] for agent in parts.agents}
        for number, step in enumerate(parts.steps, 1):
            turns[_agent(step)] += [f"Turn {number}, it saw:", _text(step.get("observation"))]
            turns[_agent(step)] += [f"Turn {number}, it did:", _text(step.get("action"))]
        for place, agent in enumerate(parts.agents, 1):
            title = f"=== {agent} ({place} of {len(parts.agents)}) ==="
            lines += ["", title, "Policy:", parts.policy(agent), *turns[agent]]
        return "\n".join([*lines, "", "=== Outcome ===", *parts.ending()])

    @staticmethod
    def format_trajectory_minimal(episode: Episode) -> str:
        """An episode in four lines: task, agents, final answer, score.

        Args:
            episode: the episode.
        """
        parts = _Parts(episode)
        return "\n".join(
            (
                f"Task: {_cut(parts.question, 200)}",
                f"Agents: {', '.join(parts.agents) or _MISSING}",
                f"Final answer: {_cut(parts.answer, 200)}",
                f"Score: {_score(parts.reward)}",
            )
        )


class _Parts:
    """What the three formats show, found in an episode of which anything may be missing."""

    def __init__(self, episode: Episode) -> None:
        data = episode.to_dict() if isinstance(episode, Trajectory) else episode
        self.task: Mapping[str, Any] = data.get("task") or {}
        self.steps: Sequence[Mapping[str, Any]] = data.get("transitions") or []
        self.metadata: Mapping[str, Any] = data.get("metadata") or {}
        self.reward = data.get("reward")
        self.policies: Mapping[str, str] = data.get("policies") or {}
        self.agents = list(dict.fromkeys([*self.policies, *map(_agent, self.steps)]))
        last = self.steps[-1].get("action") if self.steps else None
        self.answer = _text(self.metadata.get("final_answer", last))
        rest = [f"{key}: {value}" for key, value in self.task.items() if key not in _HIDDEN]
        self.question = _text(_first(self.task, _QUESTION) or "\n".join(rest))

    def policy(self, agent: str) -> str:
        """What an agent was told: by the policies of the episode, or in its first step."""
        told = (step.get("policy") for step in self.steps if _agent(step) == agent)
        return _text(self.policies.get(agent) or next(told, None))

    def opening(self, context_chars: int | None = None) -> list[str]:
        """The lines of the task."""
        context = _text(_first(self.task, _CONTEXT))
        return [f"Task: {self.question}", f"Context: {_cut(context, context_chars)}"]

    def ending(self, answer_chars: int | None = None, truth_chars: int | None = None) -> list[str]:
        """The lines of what came out."""
        truth = _text(_first(self.task, _TRUTH))
        lines = [
            f"Final answer: {_cut(self.answer, answer_chars)}",
            f"Ground truth: {_cut(truth, truth_chars)}",
            f"Score: {_score(self.reward)}",
        ]
        if (verified := _first(self.metadata, _VERIFIED)) is not None:
            lines.append(f"Verified score: {_score(verified)}")
        if self.metadata.get("error"):
            lines.append(f"Error: {self.metadata['error']}")
        return lines


def _first(data: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((data[key] for key in keys if data.get(key) is not None), None)


def _agent(step: Mapping[str, Any]) -> str:
    return _text(step.get("agent_id"))


def _text(value: Any) -> str:
    return _MISSING if value is None or value == "" else str(value)


def _cut(text: str, limit: int | None) -> str:
    return text if limit is None or len(text) <= limit else f"{text[:limit]}..."


def _score(value: Any) -> str:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return _MISSING
    return _MISSING if math.isnan(number) else f"{number:.2f}"
