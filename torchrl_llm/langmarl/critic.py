"""Critic that reads an episode and describes what each agent, or the team, did well and badly.

It makes one call per episode. :mod:`~torchrl_llm.langmarl.credit_reader` splits the answer; a
failed call gives an evaluation without texts and with an ``error``.

Next: :mod:`torchrl_llm.langmarl.optimizer` turns evaluations into changed policies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from torchrl_llm.errors import ConfigError
from torchrl_llm.langmarl.config import BaseConfig
from torchrl_llm.langmarl.credit_reader import CREDIT_FORMATS, parse_credit_response, thirds_of
from torchrl_llm.langmarl.environment import BaseCritic, BaseEnvironment, Trajectory, checked_names
from torchrl_llm.langmarl.formatter import TrajectoryFormatter
from torchrl_llm.langmarl.llm_client import LLMClient
from torchrl_llm.langmarl.prompts import PROMPTS, Template
from torchrl_llm.langmarl.safe_chat import SafeChat

CRITIC_FIELDS = {"trajectory", "num_agents", "task_type", "role_context", "agent_names"}
CRITIC_FIELDS |= {"agent_evaluation_sections", "agent_specific_criteria", "answer_format"}
"""Fields available in every critic's template; an environment may fill further ones."""

_FORMATTERS = {
    "central_credit": TrajectoryFormatter.format_for_credit_assignment,
    "central_global": TrajectoryFormatter.format_trajectory,
}
_MAX_TOKENS = 1500
_WORDS = json.loads((PROMPTS / "critic.json").read_text(encoding="utf-8"))


class CentralizedCritic(SafeChat, BaseCritic):
    """Evaluates an episode with one model call.

    Args:
        config: its ``paradigm`` is ``central_credit`` (a text for each agent) or
            ``central_global`` (one for all).
        prompts_dir: folder of templates, named like the paradigms, that replace the built-in ones.

    Attributes:
        client: client of the model.
        environment: defines the agents and the format of the critic's answers.
        num_fallbacks: number of failed evaluations.

    Raises:
        ConfigError: there is no model, or the folder does not exist.
    """

    def __init__(self, config: BaseConfig, prompts_dir: Path | str | None = None) -> None:
        super().__init__(LLMClient(config.get_critic_llm()))
        self.config, self.environment = config, None
        self._folders = [] if prompts_dir is None else [prompts_dir]
        self._template = Template.load(config.paradigm, self._folders, None)

    def for_environment(self, env: BaseEnvironment) -> Self:
        """Prepare for the episodes of an environment, with its templates and format.

        Args:
            env: the environment.

        Returns:
            The critic itself.

        Raises:
            ConfigError: neither the critic nor the environment fills a field of a template, the
                format is unknown, or even the prompt of an episode without answers is too long for
                a model in this process.
        """
        if env.CREDIT_FORMAT not in (None, *CREDIT_FORMATS):
            raise ConfigError(
                f"{type(env).__name__}.CREDIT_FORMAT must be None or one of {CREDIT_FORMATS}, got "
                f"{env.CREDIT_FORMAT!r}"
            )
        folders = self._folders + ([] if env.prompts_dir is None else [env.prompts_dir])
        template = Template.load(self.config.paradigm, folders, None)
        if set(template.fields) - CRITIC_FIELDS:
            template.check(CRITIC_FIELDS | set(_extras(env)))
        self.environment, self._template = env, template
        self._check_context(env)
        return self

    def _check_context(self, env: BaseEnvironment) -> None:
        room = self.client.longest_prompt
        if room is None:
            return
        names, policies = checked_names(env), env.default_policies()
        least = self._fields(Trajectory(dict(env.tasks()[0]), [], 0.0), policies, names)
        size = self.client.count_tokens(_WORDS["system"], self._template.fill(**least))
        if size > room:
            raise ConfigError(
                f"the critic's prompt has {size} tokens before any agent has answered, and "
                f"{self.client.config.name!r} reads {room}: choose a critic_llm with a longer "
                "context, fewer agents, or shorter templates (prompts_dir)"
            )

    def evaluate(self, trajectory: Trajectory, policies: dict[str, str]) -> dict[str, Any]:
        """Evaluate an episode.

        Args:
            trajectory: the episode.
            policies: the policies that played it.

        Returns:
            ``raw_response``, ``paradigm``, ``per_agent`` (a text for each agent, empty if the agent
            was not addressed), and ``error`` if there is no evaluation.

        Raises:
            ConfigError: a field of a template is not filled.
            BudgetUsedUp: the budget allows no further call.
        """
        env = self.environment
        names = list(policies) if env is None else env.agent_names
        prompt = self._template.fill(**self._fields(trajectory, policies, names))
        raw, error = self._ask(_WORDS["system"], prompt, _MAX_TOKENS)
        found = {"raw_response": raw, "paradigm": self.config.paradigm}
        if error:
            self._fall_back(f"evaluation of episode {trajectory.metadata.get('episode_id')}", error)
            return {**found, "per_agent": dict.fromkeys(names, ""), "error": error}
        if self.config.paradigm == "central_global":
            return {**found, "per_agent": dict.fromkeys(names, raw)}
        hint = None if env is None else env.CREDIT_FORMAT
        return {**found, "per_agent": parse_credit_response(raw, names, credit_format=hint)}

    def _fields(
        self, trajectory: Trajectory, policies: Mapping[str, str], names: Sequence[str]
    ) -> dict[str, str]:
        env, episode = self.environment, {**trajectory.to_dict(), "policies": policies}
        hint = None if env is None else env.CREDIT_FORMAT
        task_type = trajectory.task.get("task_type") or getattr(self.config, "task_type", "general")
        titles = dict(zip(names, _titles(len(names), len(trajectory.steps)), strict=True))
        roles = [(name, title, _WORDS["roles"][title]) for name, title in titles.items()]
        return {
            "trajectory": _FORMATTERS[self.config.paradigm](episode),
            "num_agents": str(len(names)),
            "task_type": task_type,
            "role_context": "\n".join(
                f"- {n}: {title}; {role['place']}." for n, title, role in roles
            ),
            "agent_evaluation_sections": "\n".join(
                f"About {name} ({title}): {role['questions']}" for name, title, role in roles
            ),
            "agent_specific_criteria": _WORDS["criteria"].get(task_type, ""),
            "agent_names": ", ".join(names),
            "answer_format": _answer_format(names, hint),
            **({} if env is None else env.critic_prompt_vars(trajectory)),
        }


def _titles(num_agents: int, num_steps: int) -> list[str]:
    """Description of each agent: its position in the order of answers, if each answers once."""
    if num_steps > num_agents:
        return ["member"] * num_agents
    if num_agents == 1:
        return ["sole responder"]
    between = ["intermediate responder"] * (num_agents - 2)
    return ["first responder", *between, "final responder"][:num_agents]


def _extras(env: BaseEnvironment) -> Mapping[str, str]:
    """The fields that an environment fills, tested on an episode without turns."""
    try:
        return env.critic_prompt_vars(Trajectory(dict(env.tasks()[0]), [], 0.0))
    except Exception as error:
        raise ConfigError(
            f"{type(env).__name__}.critic_prompt_vars must work for an episode without steps, got "
            f"{type(error).__name__}: {error}"
        ) from error


def _answer_format(names: Sequence[str], credit_format: str | None) -> str:
    """Format instructions for the critic, so that its answer can be split."""
    thirds = thirds_of(names)
    if credit_format == "thirds" and thirds is not None:
        members = [[n for n in names if thirds[n] == third] for third in range(3)]
        blocks = [
            f"[{side} THIRD EVALUATION]\n(the text for {', '.join(those)})"
            for side, those in zip(("LEFT", "MIDDLE", "RIGHT"), members, strict=True)
        ]
        return "Answer with three sections under these headings:\n" + "\n".join(blocks)
    if credit_format in ("markers", "thirds"):
        blocks = [f"[{name} EVALUATION]\n(the text for {name})" for name in names]
        return "Begin the text for each agent with its marker, exactly so:\n" + "\n".join(blocks)
    texts = '{"contribution": "...", "worked": "...", "improve": "...", "policy": "..."}'
    body = ",\n".join(f"  {json.dumps(name, ensure_ascii=False)}: {texts}" for name in names)
    return (
        "Answer with one JSON object in a fenced block and with nothing else. Its keys are exactly "
        f"the names of the agents:\n```json\n{{\n{body}\n}}\n```"
    )
