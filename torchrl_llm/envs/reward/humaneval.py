"""The reward of HumanEval: does the function pass its tests?"""

from __future__ import annotations

import re
from textwrap import indent

from torchrl_llm.envs.reward.code import CodeProblem, CodeRewardParser, defines

__all__ = ["HumanEvalRewardParser"]

_CODE_LINE = re.compile(r"^(?:import |from \w|def |async def |class |@)", re.MULTILINE)


class HumanEvalRewardParser(CodeRewardParser):
    """Runs a function, or the continuation of a prompt that began it, against HumanEval's tests.

    A response may hold the whole function, in a fenced block or plain, or go on where the prompt
    stopped, as a model without a chat template does. Of a continuation that does not compile, what
    follows the body is taken off; of a plain function, the words before and behind it.

    Args:
        kwargs: see :class:`~torchrl_llm.envs.reward.code.CodeRewardParser`.
    """

    def sources(self, code: str, problem: CodeProblem) -> list[str]:
        """The code as it is where it defines the function, else as the end of the prompt."""
        if defines(code, problem.entry_point):
            return [code, *_without_words(code, problem.entry_point)]
        body = code.lstrip("\n")
        bodies = [body]
        if not body[:1].isspace():
            # Decoding takes the indentation of the first line, a fenced block that of all lines.
            bodies = ["    " + body, indent(body, "    ")]
        return [problem.prelude + each for each in (*bodies, _first_part(bodies[0]))]


def _without_words(code: str, name: str) -> list[str]:
    """The code from its first line that looks like some, and that up to the end of a function."""
    begin = _CODE_LINE.search(code)
    if begin is None:
        return []
    code = code[begin.start() :]
    function = re.search(rf"^(?:async )?def {re.escape(name)}\b", code, re.MULTILINE)
    if function is None:
        return [code]
    return [code, code[: function.start()] + _first_part(code[function.start() :])]


def _first_part(body: str) -> str:
    """What stands in front of the next line without indentation."""
    lines = body.split("\n")
    end = next((i for i, line in enumerate(lines) if i and line[:1].strip()), len(lines))
    return "\n".join(lines[:end])
