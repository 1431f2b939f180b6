"""Formats episodes as texts for a critic: for a team, for each agent, or as a summary.

Missing parts are shown as ``N/A``.
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
# Fields of the task that a critic does not need or must not see.
_HIDDEN = {*_QUESTION, *_TRUTH, *_CONTEXT, "task_type", "tests", "test", "canonical_solution"}
_VERIFIED = ("verified_score", "verified_reward")

Episode = Mapping[str, Any] | Trajectory
"""An episode or its stored form (with ``task``, ``transitions``, ``reward``, ``metadata``)."""


class TrajectoryFormatter:
    """Formats episodes as texts of three lengths.

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
        """Format an episode to evaluate the whole team; long parts are cut.

        Args:
            episode: the episode.

        Returns:
            The task (context up to 500 characters), the policy (200) and the actions (500) of each
            agent, the final answer (500), the ground truth (200) and the score.
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
        """Format an episode to evaluate each agent, with a section per agent and nothing cut.

        Args:
            episode: the episode.

        Returns:
            The task, the policy and turns of each agent (numbered in the order of all turns), the
            final answer, the ground truth and the score.
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
        """Format an episode in four lines: task, agents, final answer, score.

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
    """The parts that the three formats show; any of them may be missing in the episode."""

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
        """Policy of an agent: from the policies of the episode, or from its first step."""
        told = (step.get("policy") for step in self.steps if _agent(step) == agent)
        return _text(self.policies.get(agent) or next(told, None))

    def opening(self, context_chars: int | None = None) -> list[str]:
        """The lines of the task."""
        context = _text(_first(self.task, _CONTEXT))
        return [f"Task: {self.question}", f"Context: {_cut(context, context_chars)}"]

    def ending(self, answer_chars: int | None = None, truth_chars: int | None = None) -> list[str]:
        """The lines of the outcome."""
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
