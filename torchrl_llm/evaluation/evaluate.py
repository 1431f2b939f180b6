"""Accuracy of a policy on held-out prompts, with the environment and wrapper of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import torch
from tensordict import TensorDictBase, is_non_tensor
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl._utils import logger
from torchrl.envs import EnvBase

from torchrl_llm._checked import Ge, checked
from torchrl_llm._progress import ProgressBar
from torchrl_llm._run_log import rounded_repr
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.input_modes import message_text
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.row_text import VERDICTS
from torchrl_llm.envs.delegate import delegates_of
from torchrl_llm.envs.layers import HoldsTurns
from torchrl_llm.errors import ConfigError


class Outcome(NamedTuple):
    """Result of one conversation.

    Attributes:
        reward: sum of the rewards of all turns; 0.0 if invalid.
        valid: whether every turn has a valid reward.
        success: whether the answer was correct.
        length: number of tokens of the last response; -1 if a server did not count them.
        cut: whether the last response was cut by its length limit.
    """

    reward: float
    valid: bool
    success: bool
    length: int
    cut: bool


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Results of a policy on held-out prompts.

    Attributes:
        accuracy: fraction of prompts answered correctly; a prompt without a valid reward counts as
            wrong and is included in ``invalid``.
        reward: mean of the valid rewards, each summed over its turns; NaN without valid rewards.
        reward_std: standard deviation of the valid rewards.
        success: accuracy over only the prompts with a valid reward, like ``train/success``.
        invalid: fraction of prompts whose reward failed.
        response_length: mean number of tokens of the last response; NaN if a server did not count
            them.
        truncated: fraction of last responses cut by their length limit.
        num_prompts: number of answered prompts; fewer than requested if the data has fewer.
        shares: for each requested bool key, the fraction of turns in which it is true.
        at_k: with several samples per prompt, the results of
            :func:`~torchrl_llm.evaluation.figures_at_k`, averaged over prompts.
        conversations: the first conversations as text; the last line of each is whether the answer
            is correct.
    """

    accuracy: float
    reward: float
    reward_std: float
    success: float
    invalid: float
    response_length: float
    truncated: float
    num_prompts: int
    shares: Mapping[str, float] = field(default_factory=dict)
    at_k: Mapping[str, float] = field(default_factory=dict)
    conversations: tuple[str, ...] = field(default=(), repr=False)

    __repr__ = rounded_repr

    def metrics(self) -> dict[str, float]:
        """Return the numbers, named ``eval/...``."""
        names = "accuracy reward reward_std success invalid response_length truncated num_prompts"
        own = {f"eval/{name}": getattr(self, name) for name in names.split()}
        return own | {f"eval/{name}": v for name, v in {**self.shares, **self.at_k}.items()}


@checked
def evaluate(
    env: EnvBase,
    policy: TensorDictModuleBase,
    *,
    num_prompts: Annotated[int, Ge(1)],
    max_turns: int = 1,
    success_key: str = "success",
    num_shown: int = 2,
    on_answer: Callable[[TensorDictBase, Outcome], None] | None = None,
    title: str = "evaluating",
    share_keys: Sequence[str] = (),
) -> Evaluation:
    """Answer held-out prompts and count correct answers.

    First the data of the environment restarts, so every evaluation uses the same prompts, each
    once. For a greedy policy the result is therefore deterministic.

    Args:
        env: environment that writes a reward, ends its conversations, and restarts its data with
            ``reset_dataloader()``; batch size ``[B]``. If it has a ``primer``, as
            :class:`~torchrl_llm.envs.DatasetChatEnv` does, the primer reports the end of the data.
        policy: the policy; pass a greedy one for greedy accuracy.
        num_prompts: number of prompts, from the start of the data. If the data has fewer prompts,
            all prompts are used, with a warning.
        max_turns: number of turns after which a conversation is stopped and counted. Finished
            conversations wait for the other conversations of the batch.
        success_key: bool key under ``"next"`` that marks a correct answer.
        num_shown: number of conversations to return as text.
        on_answer: called for each prompt, in order, with the row of its last turn and the outcome
            of the conversation; see :func:`torchrl_llm.evaluation.answer_record`.
        title: label of the progress bar.
        share_keys: bool keys under ``"next"``, such as ``"game_legal"``; the fraction of turns in
            which each is true is returned.

    Returns:
        The results.

    Raises:
        ConfigError: when the environment does not write ``success_key`` or a reward.
    """
    for delegate in delegates_of(env):
        delegate.use_policy(policy)
    env.reset_dataloader()
    columns: dict[str, list[Tensor]] = {}
    shown: list[str] = []
    answered, limit = 0, num_prompts
    primer = getattr(env, "primer", None)
    with ProgressBar(title, limit) as bar:
        while answered < limit:
            td = env.reset()
            if primer is not None and (epoch := primer.first_epoch) is not None:
                limit = bar.total = min(limit, epoch)
                if answered == limit:
                    break
            facts, rows = _play(
                env, policy, td, limit - answered, max_turns, success_key, share_keys
            )
            for name, values in facts.items():
                columns.setdefault(name, []).append(values)
            answered += len(facts["reward"])
            right = (facts["success"] & facts["valid"]).tolist()
            first = zip(rows[: num_shown - len(shown)], right, strict=False)
            shown += [f"{_text(batch[i])}\n{VERDICTS[ok]}" for (batch, i), ok in first]
            if on_answer is not None:
                outcomes = zip(*(facts[name].tolist() for name in Outcome._fields), strict=True)
                for (batch, i), outcome in zip(rows, outcomes, strict=True):
                    on_answer(batch[i], Outcome(*outcome))
            right = sum(
                int((part & ok).sum())
                for part, ok in zip(columns["success"], columns["valid"], strict=True)
            )
            bar.update(answered, f"accuracy {right / answered:.3f}")
    if answered < num_prompts:
        logger.warning(
            f"num_prompts={num_prompts} is more than the data has: its {answered} prompts were "
            "evaluated, each once"
        )
    flat = {name: torch.cat(values) for name, values in columns.items()}
    valid = flat["valid"]
    rewards = flat["reward"][valid]
    return Evaluation(
        accuracy=(flat["success"] & valid).float().mean().item(),
        reward=rewards.mean().item(),
        reward_std=(rewards - rewards.mean()).square().mean().sqrt().item(),
        success=flat["success"][valid].double().mean().item(),
        invalid=(~valid).float().mean().item(),
        response_length=flat["length"][flat["length"] >= 0].float().mean().item(),
        truncated=flat["cut"].float().mean().item(),
        num_prompts=answered,
        shares={
            name: (flat[f"held/{name}"].sum() / flat["turns"].sum()).item() for name in share_keys
        },
        conversations=tuple(shown),
    )


def _play(
    env: EnvBase,
    policy: TensorDictModuleBase,
    td: TensorDictBase,
    wanted: int,
    max_turns: int,
    success_key: str,
    share_keys: Sequence[str],
) -> tuple[dict[str, Tensor], list[tuple[TensorDictBase, int]]]:
    """Play the first conversations of a batch to the end; return each row's facts and last turn."""
    size = env.batch_size.numel()
    facts: dict[str, Tensor] = {
        "reward": torch.zeros(size, dtype=torch.float64),
        "valid": torch.ones(size, dtype=torch.bool),
        "success": torch.zeros(size, dtype=torch.bool),
        "length": torch.zeros(size, dtype=torch.int64),
        "cut": torch.zeros(size, dtype=torch.bool),
    }
    running = torch.arange(size) < wanted
    rows = [(td.reshape(size), i) for i in range(min(wanted, size))]
    counted = {f"held/{name}": torch.zeros(size, dtype=torch.int64) for name in share_keys}
    turns = facts["turns"] = torch.zeros(size, dtype=torch.int64)
    facts |= counted
    while True:
        # If players share an episode, a row acts when it is its player's turn.
        active = td.get("active", None)
        acting = running if active is None else running & active.reshape(size).cpu()
        late = isinstance(env, HoldsTurns)
        if not (acting.any() or late):
            break  # the player who acts next has used all turns
        if late or not acting.all():
            td.set("_step", acting.to(td.device) if td.device else acting)
        td = env.step(policy(td))
        if late:
            acting = running & td.get("_step").reshape(size).cpu()
        turn = _facts(td, size, success_key)
        facts["reward"] += torch.where(running, turn.pop("reward"), 0.0)
        facts["valid"] &= turn.pop("valid") | ~running
        facts["success"] = torch.where(running, turn.pop("success"), facts["success"])
        for name, values in turn.items():
            facts[name] = torch.where(acting, values, facts[name])
        flat = td.reshape(size)
        rows = [(flat, i) if acting[i] else row for i, row in enumerate(rows)]
        turns += acting
        for name in share_keys:
            held = td.get(("next", name)).reshape(size, -1).all(-1).cpu()
            counted[f"held/{name}"] += held & acting
        running = running & ~td.get(("next", "done")).reshape(size, -1).any(-1).cpu()
        running &= turns < max_turns
        if not running.any():
            break
        td = env.step_mdp(td)
    return {name: values[:wanted] for name, values in facts.items()}, rows


def _facts(td: TensorDictBase, size: int, success_key: str) -> dict[str, Tensor]:
    success = td.get(("next", success_key), None)
    reward = td.get(("next", "reward"), None)
    if reward is None or success is None:
        missing = "reward" if reward is None else success_key
        raise ConfigError(
            f"evaluate needs ('next', {missing!r}), which no transform of the environment writes; "
            "append a RewardParser"
        )
    reward = reward.reshape(size, -1).sum(-1, dtype=torch.float64).cpu()
    valid = torch.isfinite(reward)
    flag = td.get(("next", "reward_valid"), None)
    if flag is not None:
        valid &= flag.reshape(size, -1).all(-1).cpu()
    return {
        "reward": torch.where(valid, reward, 0.0),
        "valid": valid,
        "success": success.reshape(size, -1).any(-1).cpu(),
        "length": _lengths(td, size),
        "cut": FinishReason.cut_rows(td.get(("tokens", "finish_reason")).reshape(size).cpu()),
    }


def _lengths(td: TensorDictBase, size: int) -> Tensor:
    counted = td.get(("tokens", "response_length"), None)  # the policy returns no token ids
    if counted is not None:
        return counted.reshape(size).cpu()
    sizes = [ids.shape[0] for ids in read_rows(td, ("tokens", "response"))]
    masks = read_rows(td, ("masks", "all_attention_mask"))
    return torch.stack([m[m.shape[0] - n :].sum() for m, n in zip(masks, sizes, strict=True)])


def _text(row: TensorDictBase) -> str:
    history = row.get("history", None)
    if history is None:
        return row.get(("text", "full"))
    chat = history.full.chats[0]
    return "\n".join(f"{message['role']}: {message_text(message)}" for message in chat)


# Tensors that environments and policies write; they are not columns of the data.
_OWN = {"done", "terminated", "truncated", "truncation_reason", "group_id", "traj_id", "turn"}
_OWN |= {"env_step", "step_count", "policy_version", "active", "_step"}


def answer_record(row: TensorDictBase, outcome: Outcome) -> dict[str, Any]:
    """Convert prompt, answer and outcome to a form for JSON.

    Args:
        row: the last turn of a conversation, without batch dimension.
        outcome: result of the conversation.

    Returns:
        ``messages`` (the whole conversation) or ``text``, ``query``, the :class:`Outcome` field by
        field (``reward`` is ``None`` if invalid), ``error``, the short columns of the dataset
        (``task_id``, ``key``, ...), and ``scores`` if the reward wrote any. ``length`` is ``None``
        if unknown.
    """
    record: dict[str, Any] = {}
    for name, value in row.items():
        if is_non_tensor(value) and isinstance(value.data, (str, int, float, bool)):
            record[name] = value.data
        elif isinstance(value, Tensor) and value.numel() == 1 and name not in _OWN:
            record[name] = value.item()
    history = row.get("history", None)
    if history is None:
        record["text"] = row.get(("text", "full"))
    else:
        record["messages"] = [_message(message) for message in history.full.chats[0]]
    record |= outcome._asdict()
    if outcome.length < 0:
        record["length"] = None
    if not outcome.valid:
        error = row.get(("next", "error"), {"type": "", "message": ""})
        record |= {"reward": None, "error": f"{error['type']}: {error['message']}"}
    scores = row.get(("next", "ifeval_score"), None)
    if scores is not None:
        record["scores"] = {name: value.tolist() for name, value in scores.items()}
    return record


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Remove internal fields from a message; add the sampled text if it differs."""
    same = message.get("raw") == message.get("content")
    left_out = {"is_complete", "raw"} if same else {"is_complete"}
    return {name: value for name, value in message.items() if name not in left_out}


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """Estimate the probability that one of ``k`` samples is correct (arXiv:2107.03374, eq. 1).

    ``1 - C(n - c, k) / C(n, k)`` with ``n`` samples, of which ``c`` are correct.

    Args:
        num_right: ``c``, number of correct samples.
        num_samples: ``n``, number of samples.
        k: at most ``n``.

    Raises:
        ValueError: for impossible counts.

    Example:
        >>> pass_at_k(1, 4, 1), pass_at_k(1, 4, 2), pass_at_k(3, 4, 2)
        (0.25, 0.5, 1.0)
    """
    if not 0 <= num_right <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"expected 0 <= num_right <= num_samples and 1 <= k <= num_samples, got {num_right}, "
            f"{num_samples} and k={k}"
        )
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)
