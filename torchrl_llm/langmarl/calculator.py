"""The ``calculator`` environment: a tiny model whose policy decides whether it uses a tool.

One agent computes products or differences, as in ``env=calculator`` of the recipe ``grpo``. The
environment evaluates the expression of the tool call, and the result is the answer. The embedded
model knows one instruction, "Use the calculator."; with any other policy it guesses a number.

:func:`critic` and :func:`optimizer` are scripted models for this environment. Configurations name
them: ``scripted:torchrl_llm.langmarl.calculator:critic``.
"""

from __future__ import annotations

import json
import re
from typing import Any

from torchrl_llm._registry import register
from torchrl_llm.envs.datasets.number_tasks import calculator_problem, calculator_problems
from torchrl_llm.errors import ConfigError
from torchrl_llm.langmarl.config import BaseConfig
from torchrl_llm.langmarl.environment import BaseEnvironment, Trajectory
from torchrl_llm.langmarl.llm_client import LLMClient
from torchrl_llm.rewards.text_models import Messages
from torchrl_llm.tools.calculator import Calculator
from torchrl_llm.tools.tool_call import ToolCall

ADVICE = "Use the calculator."
_NUM_TASKS = 64
_EXPRESSION = re.compile(r'"expression": "([^"]*)"')


@register("environments", "calculator")
class CalculatorEnvironment(BaseEnvironment):
    """One agent solves products and differences; it uses a calculator if its policy names it.

    Args:
        config: the training configuration.

    Raises:
        ConfigError: more than one agent.
    """

    ENV_NAME = "calculator"
    CREDIT_FORMAT = "json"

    def __init__(self, config: BaseConfig) -> None:
        super().__init__(config)
        if config.num_agents != 1:
            raise ConfigError(f"env=calculator has 1 agent, got num_agents={config.num_agents}")
        self.actor = LLMClient(config.get_actor_llm())

    def tasks(self) -> list[dict[str, Any]]:
        """The first problems of the training split."""
        numbers = calculator_problems("train")[:_NUM_TASKS].tolist()
        return [dict(calculator_problem(number)) for number in numbers]

    def default_policies(self) -> dict[str, str]:
        """A policy that does not name the calculator."""
        return {"agent_1": "Solve the problem."}

    def task_context(self, task: dict[str, Any]) -> str:
        """The question."""
        return task["query"]

    def reset(self, task: dict[str, Any]) -> dict[str, Any]:
        """Begin an episode by hand: the question."""
        self._by_hand = task
        return {"agent_1": task["query"]}

    def step(self, agent_id: str, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Evaluate the expression of a tool call; the observation is the result."""
        result = _result_of(action)
        return result, float(result == self._by_hand["answer"]), True, {}

    def collect_trajectory(self, policies: dict[str, str], task: dict[str, Any]) -> Trajectory:
        """Ask the agent once, and evaluate its call."""
        said = self.actor.chat(policies["agent_1"], task["query"])
        step = {"agent_id": "agent_1", "observation": task["query"], "action": said}
        result = _result_of(said)
        return Trajectory(task, [{**step, "result": result}], float(result == task["answer"]))


def _result_of(text: str) -> str:
    """Value of the calculator expression in a text; empty if there is none."""
    found = _EXPRESSION.search(text)
    result = Calculator().run(ToolCall("calculator", {"expression": found[1]})) if found else ""
    return result if isinstance(result, str) else ""


def critic(messages: Messages) -> str:
    """A critic that reports whether the agent called the calculator.

    Args:
        messages: the critic's instructions, with an episode.
    """
    text = messages[-1]["content"]
    did = "It called the calculator." if _EXPRESSION.search(text) else "It guessed a number."
    told = {"contribution": did, "improve": ADVICE}
    return f"```json\n{json.dumps({'agent_1': told})}\n```"


def optimizer(messages: Messages) -> str:
    """An optimizer that returns the critic's advice, which is also the whole new policy.

    Args:
        messages: not used.
    """
    return ADVICE
