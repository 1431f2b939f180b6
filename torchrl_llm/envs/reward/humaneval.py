"""The reward of HumanEval: does the function pass its tests?"""

from __future__ import annotations

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
        lines = code.split("\n")
        # The first line belongs to the body even where its indentation was lost in decoding.
        end = next((i for i, line in enumerate(lines) if i and line[:1].strip()), len(lines))
        return [problem.prelude + code, problem.prelude + "\n".join(lines[:end])]
