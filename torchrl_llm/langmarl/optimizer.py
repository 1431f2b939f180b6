"""Optimizer that turns evaluations into advice, and advice into changed policies.

The advice is called a gradient: a few sentences from one evaluation. An update either replaces the
feedback section of a policy (:meth:`PolicyGradientOptimizer.apply_gradient`) or lets a model
rewrite the policy (:meth:`~PolicyGradientOptimizer.synthesize_policy`). A failed call changes
nothing and is counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from torchrl_llm.langmarl.credit_reader import parse_credit_response
from torchrl_llm.langmarl.environment import BaseOptimizer
from torchrl_llm.langmarl.language_policy import FEEDBACK_MARKER, split_policy, with_feedback
from torchrl_llm.langmarl.llm_client import LLMClient
from torchrl_llm.langmarl.llm_config import LLMConfig
from torchrl_llm.langmarl.prompts import PROMPTS, Folders, Template
from torchrl_llm.langmarl.safe_chat import SafeChat

_BETWEEN = "\n\n---\n\n"
_CONTEXT_CHARS = 800
_FENCED = re.compile(r"```\w*\n(?P<inside>(?:(?!```)[^\n]*+\n)*+)```")
_FIELDS = {
    "gradient": {"agent_name", "policy", "context", "evaluation"},
    "shared_gradient": {"context", "evaluation"},
    "aggregate": {"num_gradients", "gradients"},
    "rewrite": {"policy", "gradient", "limit"},
}
_WORDS = json.loads((PROMPTS / "optimizer.json").read_text(encoding="utf-8"))


class PolicyGradientOptimizer(SafeChat, BaseOptimizer):
    """Writes gradients with a model, and applies them to policies.

    Args:
        llm_config: configuration of the model.
        prompts_dir: folders of templates that replace the built-in ones.

    Attributes:
        client: client of the model.
        num_fallbacks: number of failed calls and rejected rewritten policies.

    Raises:
        TypeError: ``llm_config`` is not an :class:`LLMConfig`.
        ConfigError: a field of a template is not filled.

    Example:
        >>> text = PolicyGradientOptimizer.apply_gradient("Be kind.", "Be brief.")
        >>> PolicyGradientOptimizer.apply_gradient(text, "")
        'Be kind.'
    """

    def __init__(self, llm_config: LLMConfig, *, prompts_dir: Folders = None) -> None:
        if not isinstance(llm_config, LLMConfig):
            raise TypeError(f"llm_config is an LLMConfig, got {type(llm_config).__name__}")
        super().__init__(LLMClient(llm_config))
        self._templates = {
            name: Template.load(name, prompts_dir, fields) for name, fields in _FIELDS.items()
        }

    def generate_gradient(
        self, policy: str, evaluation: str, context: str, agent_name: str = "agent"
    ) -> str:
        """Write what one agent should do differently.

        Args:
            policy: policy of the agent.
            evaluation: the critic's text for the agent; if empty, no call is made.
            context: the task, of which 800 characters are shown.
            agent_name: name of the agent.

        Returns:
            2 to 4 sentences; empty if the call failed.

        Raises:
            BudgetUsedUp: the budget is used up.
        """
        if not evaluation.strip():
            return ""
        prompt = self._templates["gradient"].fill(
            agent_name=agent_name,
            policy=policy,
            context=context[:_CONTEXT_CHARS],
            evaluation=evaluation,
        )
        return self._advice(prompt, f"gradient for {agent_name}")

    def generate_shared_gradient(self, evaluation: str, task_context: str) -> str:
        """Write what every agent of a team should do differently.

        Args:
            evaluation: the critic's text for the team; if empty, no call is made.
            task_context: the task, of which 800 characters are shown.

        Returns:
            2 to 4 sentences; empty if the call failed.

        Raises:
            BudgetUsedUp: the budget is used up.
        """
        if not evaluation.strip():
            return ""
        prompt = self._templates["shared_gradient"].fill(
            context=task_context[:_CONTEXT_CHARS], evaluation=evaluation
        )
        return self._advice(prompt, "gradient for the team")

    def reconcile_gradients(self, gradients: Sequence[str]) -> str:
        """Let a model merge the gradients of several episodes into one.

        Args:
            gradients: gradients of the episodes.

        Returns:
            The merged gradient; all of them joined if the call failed. A single gradient needs no
            call.

        Raises:
            BudgetUsedUp: the budget is used up.
        """
        joined = self.aggregate_gradients(gradients)
        if len(gradients) < 2:
            return joined
        prompt = self._templates["aggregate"].fill(num_gradients=len(gradients), gradients=joined)
        return self._advice(prompt, "gradient for several episodes", most_tokens=600) or joined

    def synthesize_policy(self, policy: str, gradient: str, max_chars: int | None = None) -> str:
        """Let a model rewrite a policy so that it follows a gradient.

        Args:
            policy: the old policy.
            gradient: the advice; if empty, no call is made.
            max_chars: most characters of the new policy; ``None`` for no limit.

        Returns:
            The new policy; the old one if the call failed, or if the answer is empty, too long, or
            contains the feedback marker.

        Raises:
            BudgetUsedUp: the budget is used up.
        """
        if not gradient.strip():
            return policy
        limit = "" if max_chars is None else f", at most {max_chars} characters"
        prompt = self._templates["rewrite"].fill(policy=policy, gradient=gradient, limit=limit)
        text, error = self._ask(_WORDS["rewrite"], prompt, 1024)
        fenced = _FENCED.fullmatch(text)
        text = (fenced["inside"] if fenced else text).strip()
        if not error and not text:
            error = "the answer is empty"
        if max_chars is not None and len(text) > max_chars:
            error = f"it has {len(text)} characters, at most {max_chars} are allowed"
        if FEEDBACK_MARKER in text:
            error = f"it contains {FEEDBACK_MARKER}"
        if error:
            self._fall_back("rewritten policy", error)
        return policy if error else text

    @staticmethod
    def apply_gradient(base_policy: str, gradient: str) -> str:
        """Replace the feedback of a policy by a gradient.

        Args:
            base_policy: a policy, with or without feedback; its base does not change.
            gradient: the new feedback; empty for none.
        """
        return with_feedback(split_policy(base_policy).base, gradient)

    @staticmethod
    def aggregate_gradients(gradients: Sequence[str]) -> str:
        """Join gradients, with a line between them.

        Args:
            gradients: gradients of several episodes.
        """
        return _BETWEEN.join(gradients)

    @staticmethod
    def parse_credit_response(response: str, agent_names: list[str]) -> dict[str, str]:
        """Same as :func:`~torchrl_llm.langmarl.parse_credit_response`.

        Args:
            response: the answer.
            agent_names: names of the agents.
        """
        return parse_credit_response(response, agent_names)

    def _advice(self, prompt: str, what: str, most_tokens: int = 400) -> str:
        text, error = self._ask(_WORDS["advise"], prompt, most_tokens)
        if error:
            self._fall_back(what, error)
        return "" if error else text
