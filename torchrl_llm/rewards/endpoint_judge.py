"""Judge behind an address, made of settings that a file can hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from torchrl_llm._registry import register
from torchrl_llm.errors import ConfigError
from torchrl_llm.rewards.graders import EndpointGrader
from torchrl_llm.rewards.judge import PROMPT, JudgeReward, read_score, read_verdict

_READ = {"score": read_score, "verdict": read_verdict}


@register("rewards", "judge")
def endpoint_judge(
    url: str,
    model: str,
    *,
    prompt: str = PROMPT,
    system_prompt: str | None = None,
    read: Literal["score", "verdict"] = "score",
    highest: float = 10.0,
    retries: int = 1,
    cache_size: int = 4096,
    api_key_variable: str | None = None,
    options: Mapping[str, Any] | None = None,
    request_timeout: float = 60.0,
    concurrency: int = 32,
) -> JudgeReward:
    """A judge behind an address, from settings that a file can hold.

    Args:
        url: see :class:`~torchrl_llm.rewards.EndpointGrader`.
        model: see there.
        prompt: see :class:`~torchrl_llm.rewards.JudgeReward`.
        system_prompt: see there.
        read: what is read out of its answers: ``"score"`` (``Score: 7``) or ``"verdict"``
            (``Verdict: correct``).
        highest: the best score; of no effect on verdicts.
        retries: see :class:`~torchrl_llm.rewards.JudgeReward`.
        cache_size: see there.
        api_key_variable: environment variable that holds the key, so that no file does.
        options: see :class:`~torchrl_llm.rewards.EndpointGrader`.
        request_timeout: seconds of a request.
        concurrency: requests at a time.

    Raises:
        ConfigError: another ``read``, a variable that is not set, or what the two classes refuse.

    Example:
        >>> endpoint_judge("http://localhost:8000", "judge", read="verdict").grader.model
        'judge'
    """
    if read not in _READ:
        raise ConfigError(f"read must be one of {sorted(_READ)}, got {read!r}")
    key = None
    if api_key_variable is not None:
        key = os.environ.get(api_key_variable)
        if key is None:
            raise ConfigError(f"the environment variable {api_key_variable} is not set")
    grader = EndpointGrader(
        url,
        model,
        api_key=key,
        options=options,
        timeout=request_timeout,
        concurrency=concurrency,
    )
    return JudgeReward(
        grader,
        prompt,
        system_prompt=system_prompt,
        read=_READ[read],
        highest=highest,
        retries=retries,
        cache_size=cache_size,
    )
