"""Limits of turns and tokens: they end an episode, or penalise lengths near the limit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Composite, Unbounded
from torchrl.envs import StepCounter as _StepCounter
from torchrl.envs import Transform

from torchrl_llm._checked import Ge, checked
from torchrl_llm.data.chat import Chat
from torchrl_llm.data.enums import TruncationReason
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.replay_buffers.trajectory_queues import as_path
from torchrl_llm.data.row_transform import Path, RowTransform, RowView
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.envs.transforms.context_strategy import chat_env_of, rows_going_on
from torchrl_llm.errors import ConfigError
from torchrl_llm.functional import overlong_penalty


class StepCounter(_StepCounter):
    """TorchRL's :class:`~torchrl.envs.StepCounter`, for environments of conversations.

    Rows cut at ``max_steps`` get ``truncation_reason`` ``MAX_STEPS``; a row that terminated in the
    same step is not truncated too. Rows that are not stepped do not count. Turns that only called
    tools to think (``("tools", "auxiliary")``) do not count either, because they are no step of the
    environment. The arguments are TorchRL's.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.envs import ChatEnv
        >>> env = ChatEnv(batch_size=(1,)).append_transform(StepCounter(max_steps=1))
        >>> td = env.reset(TensorDict({"query": ["Hi"]}, batch_size=(1,)))
        >>> td["history"].full = td["history"].prompt
        >>> td = env.step(td)["next"]
        >>> td["truncated"].item(), TruncationReason(td["truncation_reason"].item()).name
        (True, 'MAX_STEPS')
    """

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        before = {
            key: next_tensordict.get(key, None) for key in (*self.truncated_keys, *self.done_keys)
        }
        next_tensordict = super()._step(tensordict, next_tensordict)
        stepped = _counted(tensordict, next_tensordict)
        for count_key, truncated_key, terminated_key, done_key in zip(
            self.step_count_keys,
            self.truncated_keys,
            self.terminated_keys,
            self.done_keys,
            strict=True,
        ):
            count = next_tensordict.get(count_key)
            if stepped is not None:
                stepped = stepped.reshape(count.shape)
                count = torch.where(stepped, count, tensordict.get(count_key))
                next_tensordict.set(count_key, count)
            if self.max_steps is None:
                continue
            cut = count >= self.max_steps
            terminated = next_tensordict.get(terminated_key, None)
            if terminated is not None:
                cut = cut & ~terminated
            if stepped is not None:
                cut = cut & stepped
            truncated = _either(before[truncated_key], cut)
            next_tensordict.set(truncated_key, truncated)
            if self.update_done:
                next_tensordict.set(done_key, _either(before[done_key], truncated))
            write_reason(next_tensordict, cut, TruncationReason.MAX_STEPS)
        return next_tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        tensordict_reset = super()._reset(tensordict, tensordict_reset)
        if self.max_steps is not None and tensordict_reset.get("truncation_reason", None) is None:
            for key in self.truncated_keys:
                none = tensordict_reset.get(key) & False
                write_reason(tensordict_reset, none, TruncationReason.MAX_STEPS)
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the step count, and ``truncation_reason`` where the environment has none."""
        observation_spec = super().transform_observation_spec(observation_spec)
        if self.max_steps is not None and "truncation_reason" not in observation_spec.keys():
            shape = self.parent.output_spec["full_done_spec"]["done"].shape
            observation_spec["truncation_reason"] = Unbounded(
                shape=shape, dtype=torch.int8, device=observation_spec.device
            )
        return observation_spec


def _counted(td: TensorDictBase, next_td: TensorDictBase) -> torch.Tensor | None:
    """Rows whose turn is a step of the environment; ``None`` for all."""
    stepped = td.get("_step", None)
    thinking = next_td.get(("tools", "auxiliary"), None)
    if thinking is None:
        return stepped
    return ~thinking if stepped is None else stepped.reshape(thinking.shape) & ~thinking


def write_reason(td: TensorDictBase, cut: Tensor, why: TruncationReason) -> None:
    """Write the reason why rows are cut, unless there is one already.

    Args:
        td: the result of a step.
        cut: bool, shaped as ``done``.
        why: the reason.
    """
    reason = td.get("truncation_reason", None)
    if reason is None:
        reason = torch.full_like(cut, int(TruncationReason.NONE), dtype=torch.int8)
    fresh = cut & (reason == TruncationReason.NONE)
    td.set("truncation_reason", reason.masked_fill(fresh, int(why)))


def _either(before: torch.Tensor | None, flag: torch.Tensor) -> torch.Tensor:
    return flag if before is None else before | flag


# Bounds on the tokens that a template writes around a message, and that may change when it renders
# a conversation again: larger than in any template that we know.
_MOST_OF_TEMPLATE, _MOST_OF_A_MESSAGE = 256, 64


class ContextLimit(Transform):
    """Ends the episode of a conversation that has grown too long for the model.

    When the next prompt would have more than ``max_prompt_length`` tokens, the row is ``truncated``
    and ``done`` with the reason ``MAX_SEQ_LEN``, in the step that made it so long. The model is not
    called again, and the reward of that step is kept. If already the first prompt is too long, the
    policy handles it (``on_overlong``).

    Append it last. In history mode the policy's formatter counts the tokens, but only if a bound
    from the new characters allows too many::

        env.append_transform(ContextLimit(policy.longest_prompt, policy.formatter))

    Args:
        max_prompt_length: tokens that a prompt may have
            (:attr:`~torchrl_llm.modules.policies.LLMWrapperBase.longest_prompt`); with ``None`` no
            episode is ended.
        formatter: the policy's encoder of conversations; history mode only, because in the other
            modes the environment has the ids.

    Raises:
        ConfigError: the formatter is missing or has no effect (raised when the transform is
            appended); or the environment is no :class:`~torchrl_llm.envs.ChatEnv` (raised at the
            first step).

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.envs import ChatEnv
        >>> from torchrl_llm.modules import load_tokenizer
        >>> formatter = ChatFormatter(load_tokenizer())
        >>> env = ChatEnv(batch_size=(1,)).append_transform(ContextLimit(8, formatter))
        >>> td = env.reset(TensorDict({"query": ["Hi"]}, batch_size=(1,)))
        >>> turn = {"role": "assistant", "content": "A few more words than that."}
        >>> prompt = td["history"].prompt
        >>> td["history"].full = type(prompt).of([prompt.chats[0] + [turn]])
        >>> td = env.step(td)["next"]
        >>> td["done"].item(), TruncationReason(td["truncation_reason"].item()).name
        (True, 'MAX_SEQ_LEN')
    """

    use_step = True

    @checked
    def __init__(
        self,
        max_prompt_length: Annotated[int, Ge(1)] | None,
        formatter: ChatFormatter | None = None,
    ) -> None:
        super().__init__()
        self.max_prompt_length, self.formatter = max_prompt_length, formatter

    def set_container(self, container: Any) -> None:
        """Check that the environment and the formatter match."""
        super().set_container(container)
        env = chat_env_of(self)
        if env is not None and (env.mode.name == "history") != (self.formatter is not None):
            needs = "needs formatter=policy.formatter" if self.formatter is None else "needs none"
            raise ConfigError(f"ContextLimit: an environment in {env.mode.name} mode {needs}")

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        going = rows_going_on(tensordict, next_tensordict)
        if self.max_prompt_length is None or not any(going):
            return next_tensordict
        done = next_tensordict.get("done")
        lengths = self._lengths(next_tensordict, going)
        flags = [length > self.max_prompt_length for length in lengths]
        cut = torch.tensor(flags, device=done.device).reshape(done.shape)
        for name in ("truncated", "done"):
            next_tensordict.set(name, _either(next_tensordict.get(name, None), cut))
        write_reason(next_tensordict, cut, TruncationReason.MAX_SEQ_LEN)
        return next_tensordict

    def _lengths(self, td: TensorDictBase, going: list[bool]) -> list[int]:
        """Tokens of the next prompts, or a bound that is not above the limit; 0 for the others."""
        env = chat_env_of(self)
        if env is None:
            raise ConfigError("ContextLimit counts the tokens of conversations: append it to one")
        if self.formatter is not None:
            chats = td.get(("history", "prompt")).chats
            return [self._length(c) if go else 0 for c, go in zip(chats, going, strict=True)]
        ids = [row.shape[0] for row in read_rows(td, ("tokens", "prompt"))]
        lengths = [length if go else 0 for length, go in zip(ids, going, strict=True)]
        if env.mode.name == "text":
            # A policy that writes only text gives no ids.
            tokenizer, texts = env.mode.formatter.tokenizer, td.get(("text", "prompt"))
            for row, text in enumerate(texts):
                if going[row] and not lengths[row]:
                    lengths[row] = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        return lengths

    def _length(self, chat: Chat) -> int:
        record, messages = chat.record, chat.messages
        known = 0 if record is None else record.num_messages
        if known > len(messages):
            known = 0  # rewritten: all of it is encoded again
        # No token has less than one byte.
        most = _MOST_OF_TEMPLATE + sum(map(_bytes_of, messages[known:]))
        most += record.token_ids.shape[0] if known else 0
        if most <= self.max_prompt_length:
            return most
        return self.formatter.continue_record(record, chat).token_ids.shape[0]


def _bytes_of(message: Mapping[str, Any]) -> int:
    text = json.dumps(message, ensure_ascii=False, default=str)
    return len(text.encode("utf-8", "replace")) + _MOST_OF_A_MESSAGE


class OverlongPenalty(RowTransform):
    r"""Adds DAPO's soft overlong punishment to the reward.

    arXiv:2503.14476, equation 13: the punishment is 0 up to ``max_length - cache`` tokens, falls
    linearly to -1 at ``max_length``, and stays at -1 beyond. It counts the tokens that the policy
    sampled in the row's turn, including the token that ended it; with several turns, each has its
    own punishment.

    Append it after the transform that writes the reward: to the environment, or to a replay buffer
    after its credit assigner, which then sees the punished reward::

        buffer.append_transform(JoinTurns())
        buffer.append_transform(MCAdvantage(grpo_size=8))
        buffer.append_transform(OverlongPenalty(max_length=512, cache=128))

    The paper uses a cache of 4096 of 20480 tokens, so that 16384 are not punished.

    Args:
        max_length: tokens from which on the full punishment applies; usually the limit of sampling.
        cache: tokens before ``max_length`` over which the punishment rises.
        coeff: factor on the punishment, 1 in the paper.
        reward_key: the reward, ``[1, 1]`` per row, or ``[R, 1]`` per token of the response, of
            which the last gets the punishment.
        penalty_key: key of the added punishment, float32 ``[1, 1]``.

    Raises:
        ConfigError: for a cache that is not between 0 and ``max_length``, or a negative factor.
        DataError: for rows without tokens or reward.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.ragged import lazy_rows
        >>> def row(length):
        ...     tokens = {"full": torch.arange(length + 1), "response": torch.arange(length)}
        ...     return TensorDict(tokens=tokens, next={"reward": torch.ones(1, 1)})
        >>> rows = OverlongPenalty(max_length=10, cache=4)(lazy_rows([row(6), row(9), row(10)]))
        >>> [row["next", "reward"].item() for row in rows.unbind(0)]
        [1.0, 0.25, 0.0]
    """

    @checked
    def __init__(
        self,
        max_length: int,
        cache: int,
        *,
        coeff: Annotated[float, Ge(0)] = 1.0,
        reward_key: NestedKey = ("next", "reward"),
        penalty_key: NestedKey = ("next", "overlong_penalty"),
    ) -> None:
        super().__init__()
        if not 0 < cache <= max_length:
            raise ConfigError(
                f"cache must be above 0 and at most max_length={max_length} tokens, got {cache}"
            )
        self.max_length, self.cache, self.coeff = max_length, cache, coeff
        self.reward_key, self.penalty_key = as_path(reward_key), as_path(penalty_key)

    @property
    def written(self) -> Path:
        """Where the punishment is."""
        return self.penalty_key

    def columns(self, rows: RowView) -> dict[Path, list[Tensor]]:
        """Reward and punishment."""
        rewards = rows.read(self.reward_key, "append this after the transform that writes it")
        lengths = torch.stack([mask.sum() for mask in rows.sampled()])
        # In a row that was cut to fit into training, the answer was longer than the remaining part.
        lengths += rows.cut_tokens().to(lengths.device)
        penalties = self.coeff * overlong_penalty(lengths, self.max_length, self.cache)
        penalties = list(penalties.to(rewards[0].device).view(-1, 1, 1).unbind(0))
        changed = []
        for reward, penalty in zip(rewards, penalties, strict=True):
            reward = reward.clone() if reward.is_floating_point() else reward.float()
            reward[-1:] += penalty.to(reward.dtype)
            changed.append(reward)
        return {self.reward_key: changed, self.penalty_key: penalties}

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        zero = torch.zeros(*tensordict_reset.batch_size, 1, 1, device=tensordict_reset.device)
        tensordict_reset.set(self.penalty_key[1:], zero)
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the punishment."""
        observation_spec[self.penalty_key[1:]] = Unbounded(
            shape=(*observation_spec.shape, 1, 1), device=observation_spec.device
        )
        return observation_spec
