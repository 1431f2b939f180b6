"""Asks the model to think again: :class:`AddThinkingPrompt`.

An edited turn loses its end, so its sampled ids cannot be continued: the row forks. The sampled
turn, with its answer, can still be trained in the earlier row. In the next row the kept part has
the same tokens if the tokenizer is known, the prompt's tokens are marked as forced, and only the
model's text after them is new.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDictBase
from torchrl.envs import StepCounter as _StepCounter
from torchrl.envs import Transform

from torchrl_llm._checked import checked
from torchrl_llm.data.chat import Chat
from torchrl_llm.data.enums import FinishReason, Source
from torchrl_llm.data.history import History
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.data.text.codec import Codec, Piece
from torchrl_llm.envs.layers import transforms_of
from torchrl_llm.envs.transforms.context_strategy import chat_env_of
from torchrl_llm.errors import ConfigError

_CAUSE = "turn_edited"


class AddThinkingPrompt(Transform):
    """Lets the model continue if a condition decides that it should think again.

    With ``edit_last_turn`` the model's turn is opened again: the prompt replaces its last
    ``<answer>`` block and everything after it, and the model continues the same message. Without
    ``edit_last_turn``, the prompt is a separate message, and the model answers in a new one.

    Append it after the reward. Rows that were cut (``truncated``, or at the limit of a
    ``StepCounter``) are over and do not change, nor do rows that are not stepped; an invalid reward
    also stays invalid. In text and tokens mode, which have no messages to edit, pass
    ``edit_last_turn=False``.

    Args:
        cond: function of one row of the environment's output (with the reward, ``[1, 1]``); returns
            whether the model should think again.
        prompt: the text; by default the first of ``DEFAULT_PROMPTS_EG`` (the model talks to itself)
            or of ``DEFAULT_PROMPTS_COG`` (the user tells it).
        random_prompt: choose one of these at random, the same for the same trajectory and turn.
        role: role of the prompt, ``"assistant"`` or ``"user"``.
        edit_last_turn: open the model's turn again instead of adding a message; role
            ``"assistant"`` only.
        zero_reward: set the reward of such a turn, and its parts of shape ``[B, 1, 1]``, to zero;
            by default the value of ``edit_last_turn``.
        undo_done: let the episode continue.
        egocentric: whether in the default prompt the model talks to itself; by default if its role
            is ``"assistant"``. A given prompt is used unchanged.
        tokenizer: keeps the sampled ids of an edited turn; the environment's if not given. Without
            a tokenizer the whole conversation is encoded again.

    Raises:
        ConfigError: for arguments that contradict each other; when it is appended, for
            ``edit_last_turn`` outside history mode.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.envs import ChatEnv
        >>> env = ChatEnv().append_transform(AddThinkingPrompt(lambda row: True, "Wait,"))
        >>> td = env.reset(TensorDict(query=["3 * 4?"], batch_size=[1]))
        >>> answer = {"role": "assistant", "content": "I say <answer>13</answer>"}
        >>> td["history"].full = History.of([td["history"].prompt.chats[0] + [answer]])
        >>> env.step(td)["next", "history"].prompt.content
        [['3 * 4?', 'I say Wait,']]
    """

    DEFAULT_PROMPTS_EG: ClassVar[Sequence[str]] = (
        "But wait, I should check this once more.",
        "Hold on, is that right? I go through it again.",
        "Let me look at each step again.",
        "I am not sure about this. I start over, more slowly.",
    )
    """What a model says to itself."""
    DEFAULT_PROMPTS_COG: ClassVar[Sequence[str]] = (
        "But wait, please check this once more.",
        "Hold on, is that right? Go through it again.",
        "Look at each step again.",
        "Are you sure about this? Start over, more slowly.",
    )
    """What a user says to a model."""

    @checked
    def __init__(
        self,
        cond: Callable[[TensorDictBase], bool],
        prompt: str | None = None,
        random_prompt: bool = False,
        role: Literal["user", "assistant"] = "assistant",
        edit_last_turn: bool = True,
        zero_reward: bool | None = None,
        undo_done: bool = True,
        egocentric: bool | None = None,
        *,
        tokenizer: Any = None,
    ) -> None:
        super().__init__()
        if edit_last_turn and role != "assistant":
            raise ConfigError(
                "only the model's own turn can be edited: with role='user' pass "
                "edit_last_turn=False"
            )
        if prompt is not None and random_prompt:
            raise ConfigError("a prompt leaves nothing to random_prompt: pass one of the two")
        if prompt is not None and not prompt.strip():
            raise ConfigError("the prompt is empty")
        if tokenizer is not None and not edit_last_turn:
            raise ConfigError("tokenizer has no effect with edit_last_turn=False")
        self.cond = cond
        self.role = role
        self.edit_last_turn = edit_last_turn
        self.zero_reward = edit_last_turn if zero_reward is None else zero_reward
        self.undo_done = undo_done
        self.egocentric = role == "assistant" if egocentric is None else egocentric
        self.random_prompt = random_prompt
        defaults = self.DEFAULT_PROMPTS_EG if self.egocentric else self.DEFAULT_PROMPTS_COG
        self.prompts = (prompt,) if prompt is not None else defaults[: None if random_prompt else 1]
        self._tokenizer = tokenizer
        self._codec: Codec | None = None

    def set_container(self, container: Any) -> None:
        """Reject an environment whose turns cannot be edited."""
        super().set_container(container)
        env = chat_env_of(self)
        if self.edit_last_turn and env is not None and env.input_mode != "history":
            raise ConfigError(
                "AddThinkingPrompt edits messages and needs input_mode='history', got "
                f"{env.input_mode!r}; there pass edit_last_turn=False, so that the prompt is a "
                "message of its own"
            )

    @property
    def prompt(self) -> str:
        """The text; with ``random_prompt`` a different one each time."""
        return random.choice(self.prompts)

    # -- which rows, which prompt -----------------------------------------------------------------

    def _rows(
        self, td: TensorDictBase, next_td: TensorDictBase, chats: Sequence[Chat] | None
    ) -> list[int]:
        size = next_td.batch_size.numel()
        open_rows = torch.ones(size, dtype=torch.bool)
        stepped, truncated = td.get("_step", None), next_td.get("truncated", None)
        if stepped is not None:
            open_rows &= stepped.reshape(size, -1).any(-1).cpu()
        if truncated is not None:
            open_rows &= ~truncated.reshape(size, -1).any(-1).cpu()
        for counter in transforms_of(self.parent):
            if not isinstance(counter, _StepCounter):
                continue
            for key in counter.step_count_keys:
                count = next_td.get(key, None)
                if counter.max_steps is not None and count is not None:
                    open_rows &= count.reshape(size).cpu() < counter.max_steps
        rows = open_rows.nonzero().flatten().tolist()
        if self.edit_last_turn:
            rows = [row for row in rows if self._is_models(chats[row])]
        return [row for row in rows if self.cond(next_td[row])]

    def _is_models(self, chat: Chat) -> bool:
        last = chat.messages[-1] if len(chat) else {}
        role = getattr(self.parent, "policy_role", "assistant")
        return last.get("role") == role and isinstance(last.get("content"), str)

    def _prompt(self, next_td: TensorDictBase, row: int) -> str:
        if len(self.prompts) == 1:
            return self.prompts[0]
        # A random choice without state: a resumed run makes the same choice.
        place = [next_td.get(name)[row].item() for name in ("traj_id", "turn")]
        return random.Random(f"{place[0]}/{place[1]}").choice(self.prompts)

    # -- the change -------------------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        env = chat_env_of(self)
        if env is not None and env.input_mode != "history":
            rows = self._rows(tensordict, next_tensordict, None)
            added: list[list[dict[str, str]]] = [[] for _ in range(env.batch_size[0])]
            for row in rows:
                prompt = self._prompt(next_tensordict, row)
                added[row] = [{"role": self.role, "content": prompt}]
            env.mode.append(tensordict, next_tensordict, added)
        else:
            rows = self._ask_in_history(tensordict, next_tensordict)
        if not rows:
            return next_tensordict
        chosen = torch.zeros(next_tensordict.batch_size.numel(), dtype=torch.bool)
        chosen[rows] = True
        chosen = chosen.to(next_tensordict.device or "cpu")
        if self.undo_done:
            _fill(next_tensordict, ("done", "terminated"), chosen)
        if self.zero_reward:
            self._zero(next_tensordict, chosen)
        return next_tensordict

    def _ask_in_history(self, td: TensorDictBase, next_td: TensorDictBase) -> list[int]:
        history = next_td.get(("history", "prompt"), None)
        if history is None or self.parent is None:
            raise ConfigError(
                "AddThinkingPrompt acts on the steps of a chat environment, or of one with "
                "('history', 'prompt')"
            )
        chats = history.chats
        rows = self._rows(td, next_td, chats)
        for row in rows:
            chats[row] = self._asked_again(chats[row], self._prompt(next_td, row))
        if rows:
            next_td.set(("history", "prompt"), History.of(chats))
        return rows

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Raise an error: this transform works only in an environment.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("AddThinkingPrompt belongs in an environment, not in a buffer")

    def _asked_again(self, chat: Chat, prompt: str) -> Chat:
        if not self.edit_last_turn:
            return chat + [{"role": self.role, "content": prompt}]
        last = chat.messages[-1]
        # A thought that was never closed is the whole turn.
        place = "reasoning_content" if "unclosed_reasoning" in last.get("flags", ()) else "content"
        kept = {key: value for key, value in last.items() if key not in ("raw", "flags")}
        message = {**kept, place: edit_turn(last[place], prompt), "is_complete": False}
        return Chat([*chat.messages[:-1], message], self._record(chat, prompt))

    def _record(self, chat: Chat, prompt: str) -> TokenRecord:
        record, codec = chat.record, self._codec or self._make_codec()
        known = record is not None and record.num_messages == len(chat)
        if codec is None or not known or record.response_start is None:
            # The model continues the turn that it has begun.
            turns = 0 if record is None else max(record.num_turns - 1, 0)
            return TokenRecord.forked(_CAUSE, earlier_turns=turns)
        return _reopened(record, codec, prompt)

    def _make_codec(self) -> Codec | None:
        tokenizer = self._tokenizer
        if tokenizer is None:
            tokenizer = getattr(self.parent, "tokenizer", None)
        self._codec = None if tokenizer is None else Codec(tokenizer)
        return self._codec

    def _zero(self, next_td: TensorDictBase, chosen: torch.Tensor) -> None:
        valid = next_td.get("reward_valid", None)
        # An invalid reward stays invalid: it must never count as zero.
        chosen = chosen if valid is None else chosen & valid.reshape(chosen.shape)
        keys = [
            key
            for key in self.parent.reward_keys
            if isinstance(value := next_td.get(key, None), torch.Tensor) and value.ndim == 3
        ]
        _fill(next_td, keys, chosen)


def edit_turn(text: str, prompt: str) -> str:
    r"""A turn without its last answer, with a prompt to continue.

    Args:
        text: the model's text.
        prompt: replaces the last ``<answer>`` block and everything after it; without a block it
            begins a new paragraph.

    Example:
        >>> edit_turn("So <answer>3</answer>.", "Wait,"), edit_turn("So 3. ", "Wait,")
        ('So Wait,', 'So 3.\n\nWait,')
    """
    end, glue = _kept(text)
    return text[:end] + glue + prompt


def _kept(text: str) -> tuple[int, str]:
    """Number of characters of a turn that stay, and the text between them and the prompt."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start >= 0:
        return start, ""
    end = len(text.rstrip())
    return end, "\n\n" if end else ""


def _reopened(record: TokenRecord, codec: Codec, prompt: str) -> TokenRecord:
    """The record of a turn that was edited as :func:`edit_turn` does, ready to be continued."""
    start = record.response_start or 0
    body = record.token_ids[start:].tolist()
    ends = codec.special_ids | codec.eos_ids
    while body and body[-1] in ends:
        body.pop()
    text = codec.decode(body)
    end, glue = _kept(text)
    count = _whole_tokens(codec, body, text[:end])
    # The characters of a token that spans the cut are encoded again, as part of the forced text.
    rest = text[len(codec.decode(body[:count])) : end] + glue + prompt
    literals = [(a, b) for a, b, _ in codec.shield.markers_in(rest)]
    forced = torch.from_numpy(codec.encode(Piece(rest, literals, continues=True)).ids)
    kept = start + count
    whole = kept == record.token_ids.shape[0]
    longer = record.cut(0, kept).extend(
        forced, torch.full(forced.shape, int(Source.FORCED)), record.num_messages
    )
    cause = record.fork_cause if whole else _CAUSE
    return replace(longer, finish_reason=FinishReason.LENGTH, fork_cause=cause)


def _whole_tokens(codec: Codec, ids: Sequence[int], text: str) -> int:
    """How many of the first ids decode to a beginning of the text."""
    count = bisect_right(
        range(len(ids) + 1), len(text), key=lambda size: len(codec.decode(ids[:size]))
    )
    count = max(count - 1, 0)
    # A character cut in two decodes to something else, and a decoder may count it differently.
    while count and not text.startswith(codec.decode(ids[:count])):
        count -= 1
    return count


def _fill(td: TensorDictBase, keys: Sequence[Any], chosen: torch.Tensor) -> None:
    """Zero, or false, in the chosen rows; the old tensors are not changed."""
    for key in keys:
        value = td.get(key, None)
        if value is not None:
            mask = chosen.view(-1, *[1] * (value.ndim - 1))
            td.set(key, value.masked_fill(mask, 0))
