"""Calls of a critic or an optimizer that may fail: failures are counted and logged.

An empty answer or a refusal counts as a failure. Errors that end a run are raised: a used-up
budget, wrong settings, a full disk.
"""

from __future__ import annotations

import re
import threading

from torchrl._utils import logger

from torchrl_llm.langmarl.calls import FATAL
from torchrl_llm.langmarl.llm_client import LLMClient
from torchrl_llm.langmarl.llm_config import uses_completion_tokens

_REFUSAL = re.compile(
    r"\W*(?:(?:I[’']m|I am)? ?(?:very |so )?(?:sorry|apologi[sz]e|unfortunately)[^.\n]{0,20}\W+)?"
    r"(?:As an AI\b|I (?:cannot|can[’']t|can not|won[’']t|will not|(?:am|[’']m) (?:unable|not able)"
    r" to) (?:help|assist|comply|provide|evaluate|judge|answer|do|continue|engage|write|create)\b)",
    re.IGNORECASE,
)


def is_refusal(text: str) -> bool:
    """Whether the first sentence of an answer is a refusal.

    Args:
        text: the answer.

    Example:
        >>> is_refusal("I'm sorry, but I can't help with that."), is_refusal("I can't fault it.")
        (True, False)
    """
    return len(text) < 600 and _REFUSAL.match(text) is not None


class SafeChat:
    """Mixin for classes that call a model and continue without an answer; thread-safe.

    Args:
        client: client of the model.

    Attributes:
        client: client of the model; may be replaced.
        num_fallbacks: number of calls without a usable answer.
    """

    def __init__(self, client: LLMClient) -> None:
        self.client, self.num_fallbacks = client, 0
        self._counting = threading.Lock()

    def _ask(self, system_prompt: str, user_input: str, most_tokens: int) -> tuple[str, str]:
        """An answer, and the problem with it: empty if there is none."""
        config = self.client.config
        # The hidden reasoning of such a model also counts, and its length is unknown.
        thinks = uses_completion_tokens(config.model_string)
        limit = config.max_tokens if thinks else min(most_tokens, config.max_tokens)
        try:
            answer = self.client.answer(system_prompt, user_input, limit)
        except FATAL:
            raise
        except Exception as error:  # a failed model call is data
            return "", f"{type(error).__name__}: {error}"
        text = answer.text.rpartition("</think>")[2].strip()
        if answer.finish_reason == "length" or text.startswith("<think>"):
            return "", f"the answer was cut at {limit} tokens"
        if not text:
            return "", "the answer is empty"
        return text, "the model refused" if is_refusal(text) else ""

    def _fall_back(self, what: str, reason: str) -> None:
        """Count and log that there is no answer."""
        with self._counting:
            self.num_fallbacks += 1
        logger.warning(f"no {what}: {reason}")
