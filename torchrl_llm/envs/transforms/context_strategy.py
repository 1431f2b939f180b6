"""Context strategies: the model sees the whole conversation, no old thoughts, or only the end.

A context strategy stands between the environment and the policy and rewrites
``("history", "prompt")``. A rewritten conversation loses its sampled ids: the row *forks*. The
turns so far are kept as they were sampled, and can be trained. The next prompt is encoded again;
none of its tokens is trained, and its record holds the cause
(:attr:`~torchrl_llm.data.record.TokenRecord.fork_cause`).
:class:`~torchrl_llm.data.replay_buffers.JoinTurns` then makes one row of each part.

A context strategy does not handle a model's maximum length: a
:class:`~torchrl_llm.envs.transforms.episode_limits.ContextLimit` ends an episode there. Next:
``docs/source/howto/keep_the_context_short.rst``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from tensordict import TensorDictBase
from torchrl.envs import Transform, TransformedEnv

from torchrl_llm._checked import Ge, checked
from torchrl_llm.data.chat import Chat
from torchrl_llm.data.history import History
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.envs.layers import innermost
from torchrl_llm.errors import ConfigError

Message = Mapping[str, Any]
_OPEN, _CLOSE = "<think>", "</think>"


def forked(messages: Sequence[Message], cause: str, *, before: Chat | None = None) -> Chat:
    """A conversation with rewritten messages: it is encoded again, and its record holds the cause.

    Args:
        messages: messages that the model sees from now on.
        cause: one word; the answers to the conversation have it as ``record.fork_cause``.
        before: the conversation before; its count of the model's turns is continued.

    Example:
        >>> forked([{"role": "user", "content": "Hi"}], "window").record.fork_cause
        'window'
    """
    record = None if before is None else before.record
    turns = 0 if record is None else record.num_turns
    return Chat(messages, TokenRecord.forked(cause, earlier_turns=turns))


class ContextStrategy(Transform):
    """Base of the strategies: subclasses write ``rewrite`` and name their ``cause``.

    It acts on every prompt of the environment. It does not change rows that are done or not
    stepped, and conversations that end with an unfinished message of the model. Append it after
    transforms that add messages and before those that tokenize (``ChatEnv(with_tokenizer=True)``
    keeps its own last).

    In text and tokens mode the environment then also keeps ``("history", "prompt")``
    (:meth:`~torchrl_llm.envs.ChatEnv.keep_history`), which holds the record of a fork.

    Raises:
        ConfigError: at the first prompt, in an environment that has no messages.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.envs import ChatEnv
        >>> class LastMessage(ContextStrategy):
        ...     cause = "last_message"
        ...     def rewrite(self, messages):
        ...         return messages[-1:]
        >>> env = ChatEnv(system_prompt="Be brief.").append_transform(LastMessage())
        >>> env.reset(TensorDict(query=["Hi"], batch_size=[1]))["history"].prompt.content
        [['Hi']]
    """

    cause: str

    def __init__(self) -> None:
        super().__init__()

    @abstractmethod
    def rewrite(self, messages: tuple[Message, ...]) -> Sequence[Message]:
        """The messages of a conversation that the model sees.

        Args:
            messages: all messages that the environment still holds; do not change them.

        Returns:
            The same messages, or others. Messages that are left out are missing in later turns,
            too.
        """

    def set_container(self, container: Any) -> None:
        """Let the environment keep the messages."""
        super().set_container(container)
        env = chat_env_of(self)
        if env is not None:
            env.keep_history()
            inner = self.container.base_env
            while isinstance(inner, TransformedEnv):
                inner.empty_cache()
                inner = inner.base_env

    def _rewritten(self, chat: Chat, *, starts: bool) -> Chat:
        if not len(chat) or chat.messages[-1].get("is_complete") is False:
            return chat
        messages = tuple(self.rewrite(chat.messages))
        if messages == chat.messages:
            return chat
        if not messages:
            raise ConfigError(f"{type(self).__name__} leaves nothing of a conversation")
        if _broken_calls(messages) > _broken_calls(chat.messages):
            raise ConfigError(
                f"{type(self).__name__} drops a tool call without its result, or a result "
                "without its call, which no template can write: keep or drop both"
            )
        return Chat(messages) if starts else forked(messages, self.cause, before=chat)

    def _chats(self, td: TensorDictBase) -> list[Chat]:
        history = td.get(("history", "prompt"), None)
        if history is None:
            raise ConfigError(
                f"{type(self).__name__} rewrites messages, and the prompts have none: append it to "
                "a ChatEnv, or to an environment with ('history', 'prompt')"
            )
        return history.chats

    def _write(self, td: TensorDictBase, before: list[Chat], after: list[Chat]) -> None:
        changed = {
            row: chat
            for row, (old, chat) in enumerate(zip(before, after, strict=True))
            if chat is not old
        }
        env = chat_env_of(self)
        if changed and env is not None:
            env.mode.replace(td, changed)
        elif changed:
            td.set(("history", "prompt"), History.of(after))

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        chats = self._chats(next_tensordict)
        after = [
            self._rewritten(chat, starts=False) if goes else chat
            for chat, goes in zip(chats, rows_going_on(tensordict, next_tensordict), strict=True)
        ]
        self._write(next_tensordict, chats, after)
        return next_tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        # A first prompt has no earlier turns to fork from.
        chats = self._chats(tensordict_reset)
        after = [self._rewritten(chat, starts=True) for chat in chats]
        self._write(tensordict_reset, chats, after)
        return tensordict_reset


class FullDialog(ContextStrategy):
    """The model sees the whole conversation: nothing is rewritten, so nothing forks.

    Environments do this by default; the class exists so that a setting can name it.

    Example:
        >>> FullDialog().rewrite(({"role": "user", "content": "Hi"},))
        ({'role': 'user', 'content': 'Hi'},)
    """

    cause = "none"

    def rewrite(self, messages: tuple[Message, ...]) -> Sequence[Message]:
        """All messages."""
        return messages


class TruncatedThinking(ContextStrategy):
    """Later turns see a placeholder instead of thoughts; see ``truncate_thoughts``.

    Each turn that thinks forks the row, because its thought is removed from the next prompt.

    Args:
        placeholder: text that replaces a thought.

    Raises:
        ConfigError: for a placeholder that is empty or holds a ``think`` tag.
    """

    cause = "think_truncated"

    def __init__(self, placeholder: str = "[TRUNCATED]") -> None:
        super().__init__()
        if not placeholder.strip() or _OPEN in placeholder or _CLOSE in placeholder:
            raise ConfigError(f"a placeholder is a text without think tags, got {placeholder!r}")
        self.placeholder = placeholder

    def rewrite(self, messages: tuple[Message, ...]) -> Sequence[Message]:
        """The messages with placeholders."""
        return truncate_thoughts(messages, self.placeholder)


class SlidingWindow(ContextStrategy):
    """The model sees its last turns only; see ``slide_window``.

    Once the conversation is longer than the window, every turn forks.

    Args:
        num_turns: number of the model's turns to keep.
        keep_task: whether to keep also the messages before the model's first turn.

    Raises:
        ConfigError: the window has less than one turn.
    """

    cause = "window"

    @checked
    def __init__(self, num_turns: Annotated[int, Ge(1)], *, keep_task: bool = True) -> None:
        super().__init__()
        self.num_turns = num_turns
        self.keep_task = keep_task

    def rewrite(self, messages: tuple[Message, ...]) -> Sequence[Message]:
        """The messages in the window."""
        return slide_window(messages, self.num_turns, keep_task=self.keep_task)


def truncate_thoughts(
    messages: Sequence[Message], placeholder: str = "[TRUNCATED]"
) -> list[Message]:
    """Replace the thoughts of the model by a placeholder.

    Only a message that is exactly one thought and then an answer is changed: content of the form
    ``<think>thought</think>answer``, or a ``reasoning_content`` next to content or tool calls.
    Anything else (a block that never ends, two of them, no answer) does not change.

    Args:
        messages: a conversation.
        placeholder: text that replaces a thought.

    Example:
        >>> said = {"role": "assistant", "content": "<think>2+2 is 4</think>4"}
        >>> truncate_thoughts([said])[0]["content"]
        '<think>[TRUNCATED]</think>4'
    """
    return [
        _without_thought(message, placeholder) if message.get("role") == "assistant" else message
        for message in messages
    ]


def _without_thought(message: Message, placeholder: str) -> Message:
    content, reasoning = message.get("content"), message.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning.strip():
        answered = bool(message.get("tool_calls")) or bool(content and str(content).strip())
        changed = {"reasoning_content": placeholder} if answered else {}
    else:
        text = _truncated(content, placeholder) if isinstance(content, str) else None
        changed = {} if text is None else {"content": text}
    if all(message.get(key) == value for key, value in changed.items()):
        return message
    # The exact sample is in the earlier rows; in this row it would contradict the other fields.
    return {key: value for key, value in message.items() if key != "raw"} | changed


def _truncated(text: str, placeholder: str) -> str | None:
    start = len(text) - len(text.lstrip())
    if not text.startswith(_OPEN, start):
        return None
    thought, closed, answer = text[start + len(_OPEN) :].partition(_CLOSE)
    nested = _OPEN in thought or _OPEN in answer or _CLOSE in answer
    if not closed or nested or not thought.strip() or not answer.strip():
        return None
    return f"{text[:start]}{_OPEN}{placeholder}{_CLOSE}{answer}"


def slide_window(
    messages: Sequence[Message], num_turns: int, *, keep_task: bool = True
) -> list[Message]:
    """The beginning of a conversation and the model's last turns.

    A turn is a message of the model and everything up to its next message, so a call never loses
    its results.

    Args:
        messages: a conversation.
        num_turns: number of the model's turns to keep.
        keep_task: keep everything before the model's first turn. Without it only the first system
            messages are kept, and the window begins with the last message of the user before its
            first turn (in a loop of tool calls this may be some turns earlier), so that the result
            is a valid conversation.

    Example:
        >>> roles = ["system", "user", "assistant", "user", "assistant", "user"]
        >>> chat = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
        >>> [m["content"] for m in slide_window(chat, 1)]
        ['0', '1', '4', '5']
        >>> [m["content"] for m in slide_window(chat, 1, keep_task=False)]
        ['0', '3', '4', '5']
    """
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if len(turns) <= num_turns:
        return list(messages)
    start, task = turns[-num_turns], turns[0]
    if not keep_task:
        lead = (i for i, m in enumerate(messages) if m.get("role") not in ("system", "developer"))
        task = next(lead, 0)
        start = max((i for i in range(task, start) if _asks(messages, i)), default=task)
    return [*messages[:task], *messages[max(start, task) :]]


def _asks(messages: Sequence[Message], index: int) -> bool:
    """Whether a message is the user's, and the message before it is not."""
    before = messages[index - 1].get("role") if index else None
    return messages[index].get("role") == "user" and before != "user"


def _broken_calls(messages: Sequence[Message]) -> int:
    """Messages with calls that no result follows, and results that follow no call."""
    broken, answered = 0, True  # nothing waits for a result, none may follow
    for message in messages:
        role = message.get("role")
        if role == "tool":
            broken += answered is None
            answered = True if answered is False else answered
            continue
        broken += answered is False
        # A tool may answer after a turn of the model, in whichever form the call was written.
        answered = None if role != "assistant" else not message.get("tool_calls")
    return broken + (answered is False)


def rows_going_on(td: TensorDictBase, next_td: TensorDictBase) -> list[bool]:
    """Rows that were stepped and are not done.

    If players share an episode, the rows whose player must act next.

    Args:
        td: all rows, as the policy left them.
        next_td: the result of the step.
    """
    going = [True] * next_td.batch_size.numel()
    acts = (next_td, "active") if next_td.get("active", None) is not None else (td, "_step")
    for rows, key, wanted in ((*acts, True), (next_td, "done", False)):
        mask = rows.get(key, None)
        if mask is not None:
            flags = (mask.reshape(len(going), -1).any(-1) == wanted).tolist()
            going = [a and b for a, b in zip(going, flags, strict=True)]
    return going


if TYPE_CHECKING:
    from torchrl_llm.envs.chat_env import ChatEnv


def chat_env_of(transform: Transform) -> ChatEnv | None:
    """The chat environment under all transforms; ``None`` if there is none (yet).

    Args:
        transform: a transform in an environment, in a ``Compose``, or alone.
    """
    from torchrl_llm.envs.chat_env import ChatEnv

    try:
        env = transform.container
    except ValueError:  # a Compose that is in no environment yet
        return None
    base = innermost(env)
    return base if isinstance(base, ChatEnv) else None
