"""Policies whose parameter is a text, and a transform that adds the text to prompts.

A :class:`LanguagePolicy` has a base and a feedback. The base is written by a person or a rewriting
model; the feedback is a section that each update replaces. :class:`LanguagePrompts` makes the text
the system prompt of the player's conversations, in any environment of conversations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tensordict import TensorDictBase
from torch import nn
from torchrl.envs import Transform

from torchrl_llm.data.chat import Chat
from torchrl_llm.data.history import History
from torchrl_llm.envs.transforms.context_strategy import chat_env_of
from torchrl_llm.errors import CheckpointError, ConfigError

FEEDBACK_MARKER = "[CASE-SPECIFIC FEEDBACK]"
_DEFUSED = "(CASE-SPECIFIC FEEDBACK)"


class PolicyParts(NamedTuple):
    """The two parts of a policy.

    Attributes:
        base: the part that updates do not change.
        feedback: the part that updates replace; may be empty.
    """

    base: str
    feedback: str


def split_policy(text: str) -> PolicyParts:
    r"""The base of a policy and its newest feedback.

    Args:
        text: base and then any number of sections that begin with ``FEEDBACK_MARKER``.

    Example:
        >>> split_policy("Be kind.\n\n[CASE-SPECIFIC FEEDBACK]\nBe brief.")
        PolicyParts(base='Be kind.', feedback='Be brief.')
    """
    base, *sections = text.split(FEEDBACK_MARKER)
    return PolicyParts(base.rstrip(), sections[-1].strip()) if sections else PolicyParts(base, "")


def with_feedback(base: str, feedback: str) -> str:
    """Combine a base and a feedback into a policy.

    Args:
        base: a base without a feedback section.
        feedback: the section; markers in it are escaped. Empty for none.

    Example:
        >>> with_feedback("Be kind.", "")
        'Be kind.'
    """
    feedback = feedback.replace(FEEDBACK_MARKER, _DEFUSED).strip()
    return f"{base.rstrip()}\n\n{FEEDBACK_MARKER}\n{feedback}" if feedback else base


class LanguagePolicy(nn.Module):
    """A policy whose parameter is a text; a checkpoint of the module holds it.

    Args:
        base: instructions for the player.
        feedback: additional advice.

    Raises:
        ConfigError: the base is empty, or has the marker of a feedback in it.

    Example:
        >>> policy = LanguagePolicy("Answer with one word.")
        >>> policy.feedback = "Use capitals."
        >>> print(policy.text)
        Answer with one word.
        <BLANKLINE>
        [CASE-SPECIFIC FEEDBACK]
        Use capitals.
        >>> other = LanguagePolicy("Wait.")
        >>> other.load_state_dict(policy.state_dict())
        <All keys matched successfully>
        >>> other.text == policy.text
        True
    """

    def __init__(self, base: str, feedback: str = "") -> None:
        super().__init__()
        check_base(base)
        self.base, self.feedback = base, feedback

    @property
    def text(self) -> str:
        """The whole policy, as the player sees it."""
        return with_feedback(self.base, self.feedback)

    @text.setter
    def text(self, text: str) -> None:
        self.base, self.feedback = split_policy(text)

    def get_extra_state(self) -> dict[str, str]:
        """Both parts."""
        return {"base": self.base, "feedback": self.feedback}

    def set_extra_state(self, state: Mapping[str, str]) -> None:
        """Restore the state of :meth:`get_extra_state`.

        Raises:
            CheckpointError: the state does not belong to a policy.
        """
        if set(state) != {"base", "feedback"}:
            raise CheckpointError(f"a LanguagePolicy has base and feedback, got {sorted(state)}")
        self.base, self.feedback = state["base"], state["feedback"]

    def extra_repr(self) -> str:
        """The length of both parts."""
        return f"base={len(self.base)} characters, feedback={len(self.feedback)}"


def check_base(base: Any) -> None:
    """Raise ``ConfigError`` for a base that is not a text, is empty, or contains the marker."""
    if not isinstance(base, str) or not base.strip():
        raise ConfigError(f"a policy is a text that is not empty, got {base!r}")
    if FEEDBACK_MARKER in base:
        raise ConfigError(
            f"the base of a policy must not contain {FEEDBACK_MARKER}, which begins the section "
            "that updates replace; write it in another way"
        )


class LanguagePrompts(Transform):
    """Makes the policy of each player the system prompt of its conversations.

    It replaces the system message at the player's first turn, or inserts one; a running
    conversation keeps its initial policy. The policies are submodules: ``state_dict`` of the
    environment holds them. Append this transform last.

    Args:
        policies: policy of each player by name (``"agent"``); if rows have no player, one policy
            under any name.

    Raises:
        ConfigError: there is no policy, or a value is not a policy.

    Example:
        >>> from torchrl_llm.envs.games import TicTacToeForTwoEnv
        >>> texts = {"X": LanguagePolicy("Take the middle."), "O": LanguagePolicy("Take corners.")}
        >>> env = TicTacToeForTwoEnv().append_transform(LanguagePrompts(texts))
        >>> env.reset()["history"].prompt[0, 0].content
        'Take the middle.'
    """

    def __init__(self, policies: Mapping[str, LanguagePolicy]) -> None:
        super().__init__()
        if not policies or not all(isinstance(p, LanguagePolicy) for p in policies.values()):
            raise ConfigError(f"policies are LanguagePolicy by player, got {policies!r}")
        self.policies = nn.ModuleDict(policies)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._put(tensordict_reset)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._put(next_tensordict)

    def _put(self, td: TensorDictBase) -> TensorDictBase:
        size = td.batch_size.numel()
        prompt = td.get("history").prompt
        if prompt is None:
            return td
        agents = td.get("agent", None)
        names = [None] * size if agents is None else agents.tolist()
        turns = td.get("turn").reshape(size).tolist()
        chats = [
            chat if turn else self._told(chat, name)
            for chat, name, turn in zip(prompt.chats, names, turns, strict=True)
        ]
        td.set(("history", "prompt"), History.of(chats))
        return td

    def _told(self, chat: Chat, name: str | None) -> Chat:
        role = chat_env_of(self).system_role
        message = {"role": role, "content": self._policy(name).text}
        messages = list(chat.messages)
        if messages and messages[0]["role"] == role:
            messages = messages[1:]
        return Chat([message, *messages])

    def _policy(self, name: str | None) -> LanguagePolicy:
        if name is None and len(self.policies) == 1:
            return next(iter(self.policies.values()))
        if name not in self.policies:
            raise ConfigError(f"player {name!r} has no policy; there are {list(self.policies)}")
        return self.policies[name]
