"""Accuracy of a policy on held-out prompts, through the environment and wrapper of training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.envs.modes import message_text
from torchrl_llm.errors import ConfigError

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a policy does on held-out prompts.

    Attributes:
        accuracy: fraction of prompts answered rightly; a prompt without a valid reward counts as
            not answered rightly and is shown in ``invalid``.
        reward: mean of the valid rewards, each summed over its turns; NaN without any.
        invalid: fraction of prompts whose reward failed.
        response_length: mean tokens of the last response.
        truncated: fraction of last responses cut by their length limit.
        num_prompts: how many prompts were answered.
        conversations: the first few, as text.
    """

    accuracy: float
    reward: float
    invalid: float
    response_length: float
    truncated: float
    num_prompts: int
    conversations: tuple[str, ...] = field(default=(), repr=False)

    def metrics(self) -> dict[str, float]:
        """The numbers, named ``eval/...``."""
        names = ("accuracy", "reward", "invalid", "response_length", "truncated")
        return {f"eval/{name}": getattr(self, name) for name in names}


def evaluate(
    env: EnvBase,
    policy: TensorDictModuleBase,
    *,
    num_prompts: int,
    max_turns: int = 1,
    success_key: str = "success",
    num_shown: int = 2,
) -> Evaluation:
    """Answer held-out prompts and count the right answers.

    Deterministic for a greedy policy: the environment's data is started over first, so that every
    evaluation sees the same prompts.

    Args:
        env: gives a reward, ends its conversations, and starts its data over by
            ``reset_dataloader()``; batch size ``[B]``.
        policy: answers; pass a greedy one for greedy accuracy.
        num_prompts: the first so many prompts of the data.
        max_turns: turns after which a conversation counts as it stands. Conversations that have
            ended wait for the others and are not answered again.
        success_key: bool key under ``"next"`` that says whether an answer is right.
        num_shown: how many conversations are returned as text.

    Returns:
        The counts.

    Raises:
        ConfigError: the environment does not write ``success_key`` or a reward.
    """
    if num_prompts < 1:
        raise ConfigError(f"num_prompts must be at least 1, got {num_prompts}")
    env.reset_dataloader()
    columns: dict[str, list[Tensor]] = {}
    shown: list[str] = []
    answered = 0
    while answered < num_prompts:
        batch = _play(env, policy, max_turns, success_key)
        shown.extend(batch.pop("texts")[: num_shown - len(shown)])
        for name, values in batch.items():
            columns.setdefault(name, []).append(values[: num_prompts - answered])
        answered += len(columns["reward"][-1])
    flat = {name: torch.cat(values) for name, values in columns.items()}
    valid = flat["valid"]
    return Evaluation(
        accuracy=(flat["success"] & valid).float().mean().item(),
        reward=flat["reward"][valid].mean().item(),
        invalid=(~valid).float().mean().item(),
        response_length=flat["length"].float().mean().item(),
        truncated=flat["cut"].float().mean().item(),
        num_prompts=answered,
        conversations=tuple(shown),
    )


def _play(
    env: EnvBase, policy: TensorDictModuleBase, max_turns: int, success_key: str
) -> dict[str, Any]:
    """One batch of conversations to their end; per row sums and the facts of the last turn."""
    size = env.batch_size.numel()
    facts: dict[str, Tensor] = {
        "reward": torch.zeros(size),
        "valid": torch.ones(size, dtype=torch.bool),
        "success": torch.zeros(size, dtype=torch.bool),
        "length": torch.zeros(size, dtype=torch.int64),
        "cut": torch.zeros(size, dtype=torch.bool),
    }
    texts = [""] * size
    running = torch.ones(size, dtype=torch.bool)
    td = env.reset()
    for _ in range(max_turns):
        td = env.step(policy(td))
        turn = _facts(td, size, success_key)
        facts["reward"] += torch.where(running, turn.pop("reward"), 0.0)
        facts["valid"] &= turn.pop("valid") | ~running
        for name, values in turn.items():
            facts[name] = torch.where(running, values, facts[name])
        texts = [
            new if on else old
            for new, old, on in zip(_texts(td), texts, running.tolist(), strict=True)
        ]
        running = running & ~td.get(("next", "done")).reshape(size, -1).any(-1).cpu()
        if not running.any():
            break
        td = env.step_mdp(td).set("_step", running.to(td.device) if td.device else running)
    return {**facts, "texts": texts}


def _facts(td: TensorDictBase, size: int, success_key: str) -> dict[str, Tensor]:
    success = td.get(("next", success_key), None)
    reward = td.get(("next", "reward"), None)
    if reward is None or success is None:
        missing = "reward" if reward is None else success_key
        raise ConfigError(
            f"evaluate needs ('next', {missing!r}), which no transform of the environment writes; "
            "append a RewardParser"
        )
    reward = reward.reshape(size, -1).sum(-1).float().cpu()
    valid = torch.isfinite(reward)
    flag = td.get(("next", "reward_valid"), None)
    if flag is not None:
        valid &= flag.reshape(size, -1).all(-1).cpu()
    return {
        "reward": torch.where(valid, reward, 0.0),
        "valid": valid,
        "success": success.reshape(size, -1).any(-1).cpu(),
        "length": torch.tensor([ids.shape[0] for ids in read_rows(td, ("tokens", "response"))]),
        "cut": td.get(("tokens", "finish_reason")).reshape(size).cpu() == FinishReason.LENGTH,
    }


def _texts(td: TensorDictBase) -> list[str]:
    history = td.get("history", None)
    if history is None:
        return list(td.get(("text", "full")).tolist())
    return [
        "\n".join(f"{message['role']}: {message_text(message)}" for message in chat)
        for chat in history.full.chats
    ]
