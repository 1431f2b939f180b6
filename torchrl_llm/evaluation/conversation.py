"""A user's conversation with a policy, with the same environment and wrapper as in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase

from torchrl_llm.data.chat import Chat
from torchrl_llm.data.column import Column
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.history import History
from torchrl_llm.data.input_modes import message_text
from torchrl_llm.envs.chat_env import ChatEnv
from torchrl_llm.modules.policies import LLMWrapperBase
from torchrl_llm.tools import Tool, ToolTransform


class Conversation:
    """A conversation with history: each answer depends on all earlier messages.

    As in training, sampled tokens are never encoded again; their ids stay in the conversation. Tool
    calls are executed, and the policy continues until it answers.

    Args:
        policy: the policy, in history mode.
        system_prompt: first message; none by default.
        tools: tools, functions with type hints and a docstring, or transforms with tools (from a
            task's ``make_tools``). The prompt describes the tools if the policy has their schemas
            (``TransformersWrapper(tools=...)``).

    Attributes:
        system_prompt: first message; a new value takes effect at the next :meth:`reset`.
        was_cut: whether the last answer was cut, by ``max_new_tokens`` or by the context.

    Example:
        >>> from torchrl_llm.modules import FakeWrapper, load_tokenizer
        >>> policy = FakeWrapper(lambda prompt: "Hello!", tokenizer=load_tokenizer())
        >>> with Conversation(policy, system_prompt="Be brief.") as conversation:
        ...     print(conversation.say("Hi."))
        ...     print([message["role"] for message in conversation.messages])
        Hello!
        ['system', 'user', 'assistant']
    """

    def __init__(
        self,
        policy: LLMWrapperBase,
        *,
        system_prompt: str | None = None,
        tools: Sequence[Tool | Callable[..., Any] | ToolTransform] = (),
    ) -> None:
        # A full context is always reported to the user, whatever the setting in training is.
        self.policy = policy.get_new_version(input_mode="history", on_overlong="error")
        self.system_prompt = system_prompt
        self.was_cut = False
        self._env: Any = ChatEnv(batch_size=(1,))
        self._td: TensorDictBase | None = None
        plain = [tool for tool in tools if not isinstance(tool, ToolTransform)]
        transforms = [tool for tool in tools if isinstance(tool, ToolTransform)]
        for transform in [*transforms, *([ToolTransform(plain)] if plain else [])]:
            self._env = self._env.append_transform(transform)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages, oldest first."""
        return list(self._begun()) if self._td is None else list(self._chat(self._td))

    def _begun(self) -> Chat:
        system = {"role": "system", "content": self.system_prompt}
        return Chat([] if self.system_prompt is None else [system])

    def reset(self) -> None:
        """Start a new conversation with ``system_prompt``."""
        self._td = None

    def say(self, text: str, **generate_kwargs: Any) -> str:
        """Send a message and return the answer.

        Args:
            text: message of the user.
            **generate_kwargs: arguments of generation that override the arguments of the policy.

        Returns:
            The answer. Calls of tools and their results are among :attr:`messages`.

        Raises:
            OverlongError: when the conversation does not fit into the model's context any more. The
                message is not added.
        """
        said = {"role": "user", "content": text}
        if self._td is None:
            query = Column.of([self._begun() + [said]])
            td = self._env.reset(TensorDict({"query": query}, batch_size=(1,)))
        else:
            td = self._td.clone(False)
            td["history"] = td["history"].clone(False)
            td["history"].prompt = History.of([self._chat(td) + [said]])
        refused = False
        while True:
            td = self._env.step(self.policy(td, **generate_kwargs))
            cut = FinishReason(td["tokens", "finish_reason"].item()).cut
            td = self._env.step_mdp(td)
            if self._chat(td)[-1]["role"] == "assistant" or refused:
                break
            # A model that must answer without tools gets only one more turn.
            refused = not td["tools", "auxiliary"].item()
        self._td, self.was_cut = td, cut
        answers = [message for message in self._chat(td) if message["role"] == "assistant"]
        return message_text(answers[-1])

    @staticmethod
    def _chat(td: TensorDictBase) -> Chat:
        return td["history"].prompt.chats[0]

    def close(self) -> None:
        """Close the tools' processes and connections."""
        self._env.close()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
