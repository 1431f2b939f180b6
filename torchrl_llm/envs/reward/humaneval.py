"""The reward of HumanEval: does the function pass its tests?"""

from __future__ import annotations

from textwrap import indent

from torchrl_llm.envs.reward.code import CodeProblem, CodeRewardParser, defines

__all__ = ["HumanEvalRewardParser"]


class HumanEvalRewardParser(CodeRewardParser):
    """Runs a function, or the continuation of a prompt that began it, against HumanEval's tests.

    A response may hold the whole function, in a fenced block or plain, or go on where the prompt
    stopped, as a model without a chat template does. Of a continuation that does not compile, what
    follows the body is taken off.

    Args:
        kwargs: see :class:`~torchrl_llm.envs.reward.code.CodeRewardParser`.
    """

    def sources(self, code: str, problem: CodeProblem) -> list[str]:
        """The code as it is where it defines the function, else as the end of the prompt."""
        if defines(code, problem.entry_point):
            return [code]
        body = code.lstrip("\n")
        bodies = [body]
        if not body[:1].isspace():
            # Decoding takes the indentation of the first line, a fenced block that of all lines.
            bodies = ["    " + body, indent(body, "    ")]
        return [problem.prelude + each for each in (*bodies, _first_part(bodies[0]))]


def _first_part(body: str) -> str:
    """What stands in front of the next line without indentation."""
    lines = body.split("\n")
    end = next((i for i, line in enumerate(lines) if i and line[:1].strip()), len(lines))
    return "\n".join(lines[:end])
