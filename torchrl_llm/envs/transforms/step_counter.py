"""Ends episodes after a number of turns, and says so."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import StepCounter as _StepCounter

from torchrl_llm.data.enums import TruncationReason


class StepCounter(_StepCounter):
    """TorchRL's :class:`~torchrl.envs.StepCounter`, for environments of conversations.

    Rows cut at ``max_steps`` get ``truncation_reason`` ``MAX_STEPS``; a row that terminated in the
    same step is not truncated too. Rows that are not stepped do not count, nor do turns that only
    called tools to think (``("tools", "auxiliary")``): they are no step of the environment. The
    arguments are TorchRL's.

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
            self._write_reason(next_tensordict, cut)
        return next_tensordict

    @staticmethod
    def _write_reason(next_td: TensorDictBase, cut: torch.Tensor) -> None:
        reason = next_td.get("truncation_reason", None)
        if reason is None:
            reason = torch.full_like(cut, int(TruncationReason.NONE), dtype=torch.int8)
        fresh = cut & (reason == TruncationReason.NONE)
        reason = reason.masked_fill(fresh, int(TruncationReason.MAX_STEPS))
        next_td.set("truncation_reason", reason)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        tensordict_reset = super()._reset(tensordict, tensordict_reset)
        if self.max_steps is not None and tensordict_reset.get("truncation_reason", None) is None:
            for key in self.truncated_keys:
                self._write_reason(tensordict_reset, tensordict_reset.get(key) & False)
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


def _either(before: torch.Tensor | None, flag: torch.Tensor) -> torch.Tensor:
    return flag if before is None else before | flag
