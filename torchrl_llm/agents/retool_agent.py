"""An agent that writes code, reads its output, and answers (ReTool, arXiv:2504.11536)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_llm._registry import register
from torchrl_llm.agents.react_agent import ReActAgent
from torchrl_llm.envs.transforms.context_strategy import chat_env_of
from torchrl_llm.sandbox.interface import MEMORY_BYTES, Limits, Sandbox
from torchrl_llm.tools import CodeBlockParser, PythonTool, Tool, ToolResult, ToolTransform


class CodeTransform(ToolTransform):
    """Runs the first code block of a turn; its output becomes a message of the user.

    The message is ``<interpreter>...</interpreter>``, which every chat template can write.

    Args:
        tool: runs the code.
        kwargs: further arguments of :class:`~torchrl_llm.tools.ToolTransform`.
    """

    def __init__(self, tool: Tool, **kwargs: Any) -> None:
        parser = CodeBlockParser(tool.name)
        super().__init__([tool], parser, timeout=tool.timeout, max_calls=1, **kwargs)

    def result_messages(self, results: Sequence[ToolResult]) -> list[dict[str, Any]]:
        """Make one message with the output of the code.

        Args:
            results: results of the block that was run, and of the blocks that were not.
        """
        env = chat_env_of(self)
        said = "\n".join(result.content.rstrip("\n") for result in results)
        role = "user" if env is None else env.user_role
        return [{"role": role, "content": f"<interpreter>\n{said}\n</interpreter>"}]


@register("agents", "retool")
@dataclass(frozen=True, kw_only=True)
class ReToolAgent(ReActAgent):
    r"""A model whose Python code is run in a sandbox before it answers.

    A turn with a code block (``python`` fences) is a part of thinking, even if it also contains an
    answer. Its first block is run, and the model reads the output. A turn without code is the
    answer. Everything else is as in a :class:`~torchrl_llm.agents.ReActAgent`;
    ``max_auxiliary_turns`` counts turns with code, too. No template tells the model that its code
    runs: write this in ``system_prompt``.

    Args:
        timeout: seconds that a piece of code, or a call, may take.
        sandbox: kind of sandbox (``"bubblewrap"``, ...); by default the strongest that the machine
            has, see :func:`~torchrl_llm.sandbox.make_sandbox`.
        memory_bytes: address space of each process of a piece of code.

    Example:
        >>> from torchrl_llm.envs import ArithmeticEnv
        >>> env = ReToolAgent().wrap(ArithmeticEnv(num_envs=1, shuffle=False))
        >>> td = env.reset()
        >>> turn = {"role": "assistant", "content": "```python\nprint(6 * 7)\n```"}
        >>> chat = td["history"].prompt.chats[0] + [turn]
        >>> td["history"].full = type(td["history"].prompt).of([chat])
        >>> print(env.step(td)["next", "history"].prompt.chats[0][-1]["content"])
        <interpreter>
        42
        </interpreter>
        >>> env.close()
    """

    sandbox: str | Sandbox | None = None
    memory_bytes: int = MEMORY_BYTES

    def make_transforms(self, acting: Sequence[Tool] = ()) -> list[ToolTransform]:
        """See :meth:`Agent.make_transforms`; code comes first."""
        has_own = isinstance(self.sandbox, Sandbox)
        limits = None if has_own else Limits(memory_bytes=self.memory_bytes)
        code = CodeTransform(
            PythonTool(timeout=self.timeout, sandbox=self.sandbox, limits=limits),
            max_auxiliary_turns=self.max_auxiliary_turns,
            accept_cut=self.accept_cut,
        )
        return [code, *super().make_transforms(acting)]
