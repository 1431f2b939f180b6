"""A language model as the judge of responses.

The reward parses a score from the judge's text. If the text has no score, or the judge does not
answer, the reward is invalid; it does not count as a low score. Answers are cached. The judge is a
:class:`~torchrl_llm.rewards.TextModel`: a model in this process, a server, or a function.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm._registry import refuse_foreign, register
from torchrl_llm.errors import ConfigError, RewardError
from torchrl_llm.rewards.reward_scorer import BatchScorer, Sample
from torchrl_llm.rewards.text_models import EndpointTextModel, Messages, TextModel

_Key = tuple[tuple[str, str], ...]
_FIELD = re.compile(r"\{(\w+)\}")
# ASCII digits only, because float() must read the result.
_NUMBER = r"[-+]?(?:[0-9]+(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)(?![.,]?[0-9]|e[-+]?[0-9])"
_OUT_OF = rf"(?:[\s*_]*(?:/|\(?out of\b)[\s*_]*({_NUMBER})|\s*(%))?"
# The scale may come before the score: "Score (0-10): 7".
_SCALE = r"(?:\s*\([^()\n]{0,40}\)(?=\W{0,10}\d))?"
_SCORE = re.compile(rf"\bscore\b{_SCALE}\W{{0,10}}?({_NUMBER}){_OUT_OF}", re.IGNORECASE)
_TAG = re.compile(rf"<score>\s*({_NUMBER}){_OUT_OF}\s*</score>", re.IGNORECASE)
_VERDICT = re.compile(r"\bverdict\b\W{0,10}\b(in)?correct\b", re.IGNORECASE)
_SHOWN = 200

PROMPT = Path(__file__).with_name("judge_prompt.txt").read_text(encoding="utf-8").strip()


def read_score(text: str) -> tuple[float, float | None]:
    """Read the last score in a text.

    ``Score: 7``, ``score (0-10): 7``, ``Score: **7**/10``, ``7 out of 10``, ``Score: 70%`` and
    ``<score>7</score>`` are read.

    Args:
        text: text of the judge.

    Returns:
        The score, and its maximum if the text contains it.

    Raises:
        RewardError: when the text has no score.

    Example:
        >>> read_score("A score of 5 is too low. Score: 7.5"), read_score("Score: **3/4**")
        ((7.5, None), (3.0, 4.0))
    """
    found = [*_SCORE.finditer(text), *_TAG.finditer(text)]
    if not found:
        raise RewardError(f"the judge stated no score: {_shown(text)!r}")
    last = max(found, key=lambda match: match.end())
    highest = "100" if last[3] else last[2]
    return float(last[1]), None if highest is None else float(highest)


def read_verdict(text: str) -> tuple[float, float]:
    """Read the last verdict of a text, ``Verdict: correct`` or ``VERDICT: INCORRECT``.

    Args:
        text: text of the judge.

    Returns:
        The score, 1.0 or 0.0, and its maximum, 1.0.

    Raises:
        RewardError: when the text has no verdict.

    Example:
        >>> read_verdict("Well reasoned. VERDICT: CORRECT"), read_verdict("Verdict: incorrect.")
        ((1.0, 1.0), (0.0, 1.0))
    """
    found = list(_VERDICT.finditer(text))
    if not found:
        raise RewardError(f"the judge gave no verdict: {_shown(text)!r}")
    return float(found[-1][1] is None), 1.0


class JudgeReward(BatchScorer):
    """Asks a judge about each response and parses a score between 0 and 1 from its text.

    All responses of a step are sent at once; equal responses are sent only once. Parsed answers are
    cached.

    Args:
        grader: the judge, a :class:`~torchrl_llm.rewards.TextModel`; or a function that takes a
            list of conversations and returns a text for each.
        prompt: the question to the judge, with ``{response}``, ``{answer}``, and names of further
            columns of the rows in braces, for example ``{query}``. Braces in inserted texts are not
            interpreted.
        system_prompt: first message to the judge.
        read: function from the judge's text to a score and its maximum (``None`` means
            ``highest``); raises if there is no score.
        highest: the best score; scores outside 0 to this are invalid.
        retries: number of retries if the judge fails or its text has no score.
        cache_size: number of cached answers; with 0 the judge is asked every time.

    Raises:
        ConfigError: for a prompt without ``{response}``, or invalid numbers.

    Example:
        >>> judge = JudgeReward(lambda conversations: ["Fine. Score: 8"] * len(conversations))
        >>> judge.score_batch([Sample("4", answer="4", columns={"query": "2+2?"})])
        [0.8]
    """

    @checked
    def __init__(
        self,
        grader: TextModel | Callable[[Sequence[Messages]], Sequence[str | Exception]],
        prompt: str = PROMPT,
        *,
        system_prompt: str | None = None,
        read: Callable[[str], tuple[float, float | None]] = read_score,
        highest: Annotated[float, Gt(0)] = 10.0,
        retries: Annotated[int, Ge(0)] = 1,
        cache_size: Annotated[int, Ge(0)] = 4096,
    ) -> None:
        fields = set(_FIELD.findall(prompt))
        if "response" not in fields:
            raise ConfigError("the prompt must show the judge the {response}")
        self.columns = tuple(sorted(fields - {"response", "answer"}))
        self.grader, self.prompt, self.system_prompt = grader, prompt, system_prompt
        self.read, self.highest = read, highest
        self.retries, self.cache_size = retries, cache_size
        self._cache: OrderedDict[_Key, float] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_cache": OrderedDict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def conversation(self, sample: Sample) -> _Key:
        """Build the messages to the judge about a row: roles and contents."""
        values = {**sample.columns, "response": sample.response, "answer": sample.answer}
        # All names are replaced in one pass, so that braces in a response are not interpreted.
        text = _FIELD.sub(lambda match: str(values[match[1]]), self.prompt)
        messages = [("user", text)]
        if self.system_prompt is not None:
            messages.insert(0, ("system", self.system_prompt))
        return tuple(messages)

    def score_batch(self, samples: Sequence[Sample]) -> list[float | Exception]:
        """See :class:`JudgeReward`."""
        asked = [self.conversation(sample) for sample in samples]
        with self._lock:
            known = {key: self._cache[key] for key in asked if key in self._cache}
        scores: dict[_Key, float | Exception] = dict(known)
        for _ in range(self.retries + 1):
            unknown = [key for key in dict.fromkeys(asked) if not _is_known(scores, key)]
            if not unknown:
                break
            scores.update(zip(unknown, self._answers(unknown), strict=True))
        self._remember({key: scores[key] for key in asked if _is_known(scores, key)})
        return [scores[key] for key in asked]

    def _remember(self, scores: Mapping[_Key, float]) -> None:
        with self._lock:
            for key, score in scores.items():
                self._cache[key] = score
                self._cache.move_to_end(key)
            while len(self._cache) > self.cache_size:
                self._cache.popitem(last=False)

    def _answers(self, asked: Sequence[_Key]) -> list[float | Exception]:
        conversations = [
            tuple({"role": role, "content": content} for role, content in key) for key in asked
        ]
        ask = self.grader.ask if isinstance(self.grader, TextModel) else self.grader
        try:
            texts = list(ask(conversations))
        except Exception as error:  # a failing judge makes the reward invalid
            return [error] * len(asked)
        if len(texts) != len(asked):
            error = RewardError(f"the judge was asked {len(asked)} times and answered {len(texts)}")
            return [error] * len(asked)
        return [self._value(text) for text in texts]

    def _value(self, text: str | Exception) -> float | Exception:
        if isinstance(text, Exception):
            return text
        try:
            score, out_of = self.read(text)
            highest = self.highest if out_of is None else out_of
            value = score / highest
            if not (math.isfinite(value) and 0 <= value <= 1):
                raise RewardError(f"the judge's score is not between 0 and {highest:g}: {score:g}")
        except Exception as error:  # a text without a score makes the reward invalid
            return error
        return value


def _is_known(scores: Mapping[_Key, float | Exception], key: _Key) -> bool:
    return key in scores and not isinstance(scores[key], Exception)


def _shown(text: str) -> str:
    """Return the end of a text, where a score would be."""
    return text if len(text) <= _SHOWN else f"...{text[-_SHOWN:]}"


_READ = {"score": read_score, "verdict": read_verdict}


@register("rewards", "judge")
@checked
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
    """Make a judge that uses a server, from settings of a configuration file.

    Args:
        url: see :class:`~torchrl_llm.rewards.EndpointTextModel`.
        model: see :class:`~torchrl_llm.rewards.EndpointTextModel`.
        prompt: see :class:`~torchrl_llm.rewards.JudgeReward`.
        system_prompt: see :class:`~torchrl_llm.rewards.JudgeReward`.
        read: which text to parse from the judge's answers: ``"score"`` (``Score: 7``) or
            ``"verdict"`` (``Verdict: correct``).
        highest: the best score; no effect on verdicts.
        retries: see :class:`~torchrl_llm.rewards.JudgeReward`.
        cache_size: see :class:`~torchrl_llm.rewards.JudgeReward`.
        api_key_variable: environment variable that holds the API key, so that no file contains the
            key.
        options: see :class:`~torchrl_llm.rewards.EndpointTextModel`.
        request_timeout: timeout of a request in seconds.
        concurrency: number of parallel requests.

    Raises:
        ConfigError: for an unknown ``read``, a variable that is not set, or arguments that the two
            classes reject.

    Example:
        >>> endpoint_judge("http://localhost:8000", "judge", read="verdict").grader.model
        'judge'
    """
    refuse_foreign(url, "which is sent nothing")
    key = None
    if api_key_variable is not None:
        key = os.environ.get(api_key_variable)
        if key is None:
            raise ConfigError(f"the environment variable {api_key_variable} is not set")
    grader = EndpointTextModel(
        url, model, api_key=key, options=options, timeout=request_timeout, concurrency=concurrency
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
