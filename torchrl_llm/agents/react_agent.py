"""An agent that calls tools in some turns, and then has to answer (arXiv:2210.03629)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tensordict import TensorDictBase
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_llm._checked import Ge, checked
from torchrl_llm._registry import register
from torchrl_llm.agents.agent import tool_transforms
from torchrl_llm.agents.tool_agent import ToolAgent
from torchrl_llm.envs.transforms.context_strategy import ContextStrategy, Message, rows_going_on
from torchrl_llm.errors import ConfigError

LAST_REQUEST = "Answer now, without tools."


class LastRequest(ContextStrategy):
    """Asks for an answer when a model has used all its turns with tools.

    The request is a message of the user after the last results. It is not kept: the prompt after
    the answer does not contain it, so the row forks there (``fork_cause`` ``"last_request"``).

    Args:
        after: number of consecutive turns that only called tools.
        text: text of the request.

    Raises:
        ConfigError: ``after`` below 1, or an empty text.
    """

    cause = "last_request"

    @checked
    def __init__(self, after: Annotated[int, Ge(1)], text: str = LAST_REQUEST) -> None:
        super().__init__()
        if not text.strip():
            raise ConfigError("the text of a last request is empty")
        self.after, self.text = after, text

    def rewrite(self, messages: tuple[Message, ...]) -> Sequence[Message]:
        """The messages without requests that were answered."""
        last = max((i for i, m in enumerate(messages) if m.get("role") == "assistant"), default=-1)
        return [m for i, m in enumerate(messages) if i > last or not self._is_request(m)]

    def _is_request(self, message: Message) -> bool:
        user_role = "user" if self.parent is None else self.parent.user_role
        return message.get("content") == self.text and message.get("role") == user_role

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        next_tensordict = super()._step(tensordict, next_tensordict)
        thought = next_tensordict.get(("tools", "auxiliary_turns"), None)
        if thought is None:
            return next_tensordict
        going = rows_going_on(tensordict, next_tensordict)
        request = {"role": self.parent.user_role, "content": self.text}
        added = [
            [request] if count >= self.after and goes else []
            for count, goes in zip(thought.flatten().tolist(), going, strict=True)
        ]
        if any(added):
            self.parent.mode.append(tensordict, next_tensordict, added)
        return next_tensordict


@register("agents", "react")
@dataclass(frozen=True, kw_only=True)
class ReActAgent(ToolAgent):
    """A model that calls tools in a limited number of turns, and then answers without them.

    The limit holds for the tools of the environment, too. After the last turn that may call tools
    the model reads a request to answer, which is not kept; calls in that answer are rejected, and
    it counts as a step in any case.

    Args:
        last_request: text of that request.

    Raises:
        ConfigError: as in :class:`~torchrl_llm.agents.ToolAgent`, or an empty request.

    Example:
        >>> from torchrl_llm.envs import CalculatorEnv
        >>> env = ReActAgent(max_auxiliary_turns=1).wrap(CalculatorEnv(num_envs=1, shuffle=False))
        >>> td = env.reset()
        >>> call = {"function": {"name": "calculator", "arguments": {"expression": "2+2"}}}
        >>> turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        >>> td["history"].full = type(td["history"].prompt).of(
        ...     [td["history"].prompt.chats[0] + [turn]]
        ... )
        >>> [message["content"] for message in env.step(td)["next", "history"].prompt.chats[0][-2:]]
        ['4', 'Answer now, without tools.']
        >>> env.close()
    """

    last_request: str = LAST_REQUEST

    def __post_init__(self) -> None:
        super().__post_init__()
        LastRequest(self.max_auxiliary_turns, self.last_request)  # checks the arguments

    def auxiliary_turns(self, own: int) -> int:
        """See :meth:`Agent.auxiliary_turns`; the agent's limit holds for all tools."""
        return self.max_auxiliary_turns

    def wrap(self, env: EnvBase) -> TransformedEnv:
        """See :meth:`Agent.wrap`."""
        env = super().wrap(env)
        for transform in tool_transforms(env):
            transform.max_auxiliary_turns = self.max_auxiliary_turns
        env.append_transform(LastRequest(self.max_auxiliary_turns, self.last_request))
        return env
