"""Joins the turns of a trajectory into one row, so that each sampled token is trained once.

A turn's row contains the whole conversation up to that turn. Without joining, the tokens of the
first of three turns would be trained three times, and three rows would be scored instead of one.

Shape legend: ``T`` tokens of the joined row, ``P`` its prompt, ``R = T - P`` its response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_tensorclass,
)
from torch import Tensor
from torchrl.envs import Transform

from torchrl_llm.data.enums import Source
from torchrl_llm.data.nodes import cell, leaf, new_node, plain_node, set_copied, typed_node
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers.trajectory_queues import (
    CUT_TOKENS,
    TrajectoryQueue,
    as_path,
    was_cut,
)
from torchrl_llm.data.rollouts import row_list, unpadded
from torchrl_llm.data.scoring import Support
from torchrl_llm.data.token_facts import FACTS, TokenFact


class JoinTurns(Transform):
    """Inverse transform of a replay buffer that joins the turns of a trajectory into one row.

    Rows wait until their trajectory is done (identified by ``traj_id``; see
    :class:`~torchrl_llm.data.replay_buffers.trajectory_queues.TrajectoryQueue`). A turn is joined
    to an earlier turn if its prompt begins with exactly the ids of that turn, and both were sampled
    at the same temperature. If a turn does not extend the last turn of any row (because a template
    rewrote the history, or a program branched), the trajectory gets a further row. The whole prompt
    of that row is marked as prompt, because the sampled tokens in it are trained in the row in
    which they were sampled.

    The joined row has the first turn's prompt. Everything after the prompt is the response,
    including tool results and template text; ``trace`` distinguishes them. For each response,
    log-probs, masks, trace, kept ids and the other per-token facts whose ``join`` is ``"turns"``
    (:class:`~torchrl_llm.data.token_facts.TokenFact`) come from the turn that sampled it. The
    reward is the sum of the turns' rewards (``[1, 1]``, or ``[R, 1]`` if they are per token). The
    transform also sums the parts of the reward: floats with the name of the reward and a suffix
    (``reward_right``, ``reward_seconds``), value and seconds of each ``("next", "rewards", name)``
    (valid if valid in all turns), and ``"cut_tokens"``. An existing advantage is kept if all turns
    have the same one; otherwise it becomes one value per token, ``[T, 1]``. All other values are
    those of the last turn. ``"num_turns"``, int64, is the number of turns in a row.

    Args:
        done_key: key of the flag that the trajectory ends with this row.
        reward_key: key of the reward to sum.
        advantage_key: key of the advantage.

    In a buffer, the transform appended last runs first. So append ``JoinTurns`` after
    ``MCAdvantage``. In the other order, a trajectory still counts once, but its turns have separate
    advantages if rewards are not summed.

    Example:
        >>> from torchrl_llm.data.replay_buffers import ReplayBuffer
        >>> ids = torch.arange(5)
        >>> def turn(prompt, full, done):
        ...     tokens = {"prompt": ids[:prompt], "response": ids[prompt:full], "full": ids[:full]}
        ...     next_ = {"reward": torch.ones(1, 1), "done": torch.tensor([done])}
        ...     return TensorDict(tokens=tokens, next=next_, traj_id=torch.tensor(0))
        >>> buffer = ReplayBuffer(transform=JoinTurns())
        >>> buffer.extend([turn(1, 2, False), turn(3, 5, True)]).tolist()
        [0]
        >>> buffer[0]["tokens", "response"].tolist(), buffer[0]["next", "reward"].item()
        ([1, 2, 3, 4], 2.0)
    """

    adds_keys_only = True
    requires_shared_write_state = True

    def __init__(
        self,
        *,
        done_key: Any = ("next", "done"),
        reward_key: Any = ("next", "reward"),
        advantage_key: Any = "advantage",
    ) -> None:
        super().__init__()
        self.reward_key = reward_key
        self.advantage_key = advantage_key
        self.queue = TrajectoryQueue(done_key)
        self.stats = {"trajectories": 0, "turns": 0, "rows": 0, "forks": 0}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Sampled rows pass through."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase | None) -> LazyStackedTensorDict | None:
        if tensordict is None:
            return None
        joined = []
        for turns in self.queue.push(row_list(tensordict)):
            turns = unpadded(turns) if len(turns) > 1 else turns
            chains = [chain for own in _conversations(turns) for chain in _chains(own)]
            self.stats["trajectories"] += 1
            self.stats["turns"] += len(turns)
            self.stats["rows"] += len(chains)
            self.stats["forks"] += len(chains) - 1
            rows = [self._join(chain, continues=bool(i)) for i, chain in enumerate(chains)]
            # The row that ends the trajectory is its last one.
            last = next(i for i, chain in enumerate(chains) if chain[-1] is turns[-1])
            joined += [*rows[:last], *rows[last + 1 :], rows[last]]
        return lazy_rows(joined) if joined else None

    def _join(self, turns: list[TensorDict], *, continues: bool) -> TensorDict:
        last = turns[-1]
        row = new_node({**last._tensordict, "num_turns": torch.tensor(len(turns))})
        alone = len(turns) == 1 and not continues
        if alone or leaf(last, ("tokens", "full")) is None:
            return row
        spans = [_span(turn) for turn in turns]
        start = spans[0][0]
        changed: dict[tuple[str, ...], Any] = {}
        facts = list(FACTS.values())
        for fact in facts:
            if fact.join == "turns":
                column = _overlay([leaf(turn, fact.key) for turn in turns], spans)
                if column is not None:
                    changed[fact.key] = column
        support = _joined_support(turns, spans, continues=continues)
        if support is not None:
            for name, column in support._asdict().items():
                changed["support", name] = column
        if continues:
            _forget_prompt(changed, start)
        if len(turns) > 1:
            changed |= self._joined_views(turns)
            changed |= self._joined_reward(turns, spans)
            changed |= _first_prompts(turns[0], facts)
        changed |= _responses(last, changed, facts, start)
        if cut := [turn.get(CUT_TOKENS) for turn in turns if was_cut(turn)]:
            changed[CUT_TOKENS,] = torch.stack(cut).sum()
        for key, value in changed.items():
            set_copied(row, key, value)
        return row

    @staticmethod
    def _joined_views(turns: list[TensorDict]) -> dict[tuple[str, ...], Any]:
        first, last = turns[0], turns[-1]
        changed: dict[tuple[str, ...], Any] = {}
        cut = [turn.get(("tokens", "truncated_support"), None) for turn in turns]
        if all(flag is not None for flag in cut):
            changed["tokens", "truncated_support"] = torch.stack(cut).any(0)
        for kind in ("history", "text"):
            prompt, whole = first.get((kind, "prompt"), None), last.get((kind, "full"), None)
            if prompt is None or whole is None:
                continue
            changed[kind, "prompt"] = prompt
            response = _rest(prompt, whole)
            if response is not None:
                changed[kind, "response"] = response
        return changed

    def _joined_reward(
        self, turns: list[TensorDict], spans: list[tuple[int, int]]
    ) -> dict[tuple[str, ...], Any]:
        changed: dict[tuple[str, ...], Any] = {}
        rewards = [turn.get(self.reward_key, None) for turn in turns]
        if all(reward is not None for reward in rewards):
            changed[as_path(self.reward_key)] = _sum_rewards(rewards, spans)
        changed |= _sum_parts(turns, as_path(self.reward_key))
        flag_key = ("next", "reward_valid")
        flags = [turn.get(flag_key, None) for turn in turns]
        if all(flag is not None for flag in flags):
            changed[flag_key] = torch.stack(flags).all(0)
            error = turns[_broken(flags)].get(("next", "error"), None)
            if error is not None:
                changed["next", "error"] = error
        advantages = [turn.get(self.advantage_key, None) for turn in turns]
        if all(advantage is not None for advantage in advantages):
            changed[as_path(self.advantage_key)] = _spread(advantages, spans)
        return changed

    # -- the queue --------------------------------------------------------------------------------

    def get_stats(self) -> dict[str, int]:
        """Return the numbers of trajectories, turns, rows, forks, and waiting trajectories."""
        return {**self.stats, "open_trajectories": len(self.queue)}

    def clear_queues(self) -> int:
        """Drop unfinished trajectories, and return the number of dropped rows."""
        return len(self.queue.clear())

    def get_extra_state(self) -> dict[str, Any]:
        """Return waiting rows and counts."""
        return {"queue": self.queue.state_dict(), "stats": dict(self.stats)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`get_extra_state`."""
        self.queue.load_state_dict(state["queue"])
        self.stats = dict(state["stats"])


def _span(turn: TensorDict) -> tuple[int, int]:
    """Return start and end of a turn's response in ``tokens.full``."""
    end = turn.get(("tokens", "full")).shape[0]
    return end - turn.get(("tokens", "response")).shape[0], end


def _conversations(turns: list[TensorDict]) -> list[list[TensorDict]]:
    """Return the turns of a trajectory, and the turns of each child whose rows are in it."""
    by_child: dict[int, list[TensorDict]] = {}
    for turn in turns:
        child = leaf(turn, ("child_id",))
        by_child.setdefault(-1 if child is None else int(child), []).append(turn)
    return list(by_child.values())


def _chains(turns: list[TensorDict]) -> list[list[TensorDict]]:
    """Build chains of turns: each prompt extends the newest chain that it can extend.

    Several conversations of one trajectory (of sub-agents or parallel calls) may alternate.
    """
    chains: list[list[TensorDict]] = []
    for turn in turns:
        extended = next((chain for chain in reversed(chains) if _extends(chain[-1], turn)), None)
        if extended is None:
            chains.append([turn])
        else:
            extended.append(turn)
    return chains


def _extends(before: TensorDict, turn: TensorDict) -> bool:
    old, prompt = before.get(("tokens", "full"), None), turn.get(("tokens", "prompt"), None)
    if old is None or prompt is None or prompt.shape[0] < old.shape[0]:
        return False
    temperatures = [row.get(("tokens", "temperature"), None) for row in (before, turn)]
    if None not in temperatures and not torch.equal(*temperatures):
        return False
    source = leaf(turn, ("trace", "source"))
    between = slice(old.shape[0], prompt.shape[0])
    if source is not None and bool((source[between] == Source.SAMPLED).any()):
        return False  # a turn of a different row lies between them
    return torch.equal(prompt[: old.shape[0]], old)


def _overlay(columns: Sequence[Tensor | None], spans: list[tuple[int, int]]) -> Tensor | None:
    """Return the last turn's column, with each turn's own values at its response."""
    if any(column is None for column in columns):
        return None
    column = columns[-1].clone()
    for own, (start, end) in zip(columns[:-1], spans[:-1], strict=True):
        column[start:end] = own[start:end]
    return column


def _first_prompts(first: TensorDict, facts: Sequence[TokenFact]) -> dict[tuple[str, str], Tensor]:
    """Return the columns of the first turn's prompt, if it has them."""
    keys = [(fact.key[0], "prompt") for fact in facts if fact.key[1] == "full"]
    found = [(key, leaf(first, key)) for key in keys]
    return {key: column for key, column in found if column is not None}


def _responses(
    last: TensorDict, changed: dict[tuple[str, ...], Tensor], facts: Sequence[TokenFact], start: int
) -> dict[tuple[str, str], Tensor]:
    """Return the responses of facts that have them, as slices of the joined columns."""
    keys = [fact.key for fact in facts if fact.parts]
    wholes = [(key, changed[key] if key in changed else leaf(last, key)) for key in keys]
    return {(key[0], "response"): full[start:] for key, full in wholes if full is not None}


def _joined_support(
    turns: list[TensorDict], spans: list[tuple[int, int]], *, continues: bool
) -> Support | None:
    """The kept ids of each turn at its response; those of the first prompt from the last turn."""
    if all(leaf(turn, ("support", "counts")) is None for turn in turns):
        return None
    own = [
        # A turn without the node was sampled from the whole vocabulary, or its flag excludes the
        # row.
        Support.whole(end)
        if leaf(turn, ("support", "counts")) is None
        else Support(*(leaf(turn, ("support", name)) for name in Support._fields))
        for turn, (_, end) in zip(turns, spans, strict=True)
    ]
    start = spans[0][0]
    parts = [Support.whole(start) if continues else own[-1].span(0, start)]
    end = start
    for support, (begin, stop) in zip(own, spans, strict=True):
        # Between two responses nothing was sampled.
        parts += [Support.whole(begin - end), support.span(begin, stop)]
        end = stop
    return Support.join(parts)


def _forget_prompt(columns: dict[tuple[str, ...], Any], start: int) -> None:
    """Mark sampled tokens of the prompt as prompt: a different row trains them."""
    source = columns.get(("trace", "source"))
    if source is None:
        return
    sampled = source[:start] == Source.SAMPLED
    for fact in FACTS.values():
        if fact.key in columns and fact.default is not None:
            columns[fact.key][:start][sampled] = fact.default
    source[:start][sampled] = int(Source.PROMPT)


def _rest(prompt: Any, whole: Any) -> Any:
    """Return the part of ``whole`` after ``prompt``: messages of a History or characters."""
    if isinstance(prompt, NonTensorData):
        if isinstance(prompt.data, str) and whole.data.startswith(prompt.data):
            return cell(whole.data[len(prompt.data) :])
        return None
    before, chat = (plain_node(node).get("messages").data for node in (prompt, whole))
    if chat.messages[: len(before)] != before.messages:
        return None
    messages = cell(type(chat)(chat.messages[len(before) :]))
    inner = new_node({"messages": messages})
    return typed_node(type(whole), inner) if is_tensorclass(whole) else inner


def _sum_rewards(rewards: list[Tensor], spans: list[tuple[int, int]]) -> Tensor:
    if all(reward.numel() == 1 for reward in rewards):
        return torch.stack(rewards).sum(0)
    start = spans[0][0]
    total = rewards[-1].new_zeros(spans[-1][1] - start, 1)
    for reward, (begin, end) in zip(rewards, spans, strict=True):
        # A reward of the whole turn is placed on its last token.
        begin = end - 1 if reward.numel() == 1 else begin
        total[begin - start : end - start] += reward.reshape(-1, 1)
    return total


def _sum_parts(turns: list[TensorDict], reward: tuple[str, ...]) -> dict[tuple[str, ...], Any]:
    """Sum the parts of a reward and its components in the same way as the reward itself."""
    *above, name = reward
    last = leaf(turns[-1], tuple(above))
    summed = {
        (*above, part): [leaf(turn, (*above, part)) for turn in turns]
        for part in (() if last is None else plain_node(last).keys())
        if part.startswith(f"{name}_")
    }
    changed: dict[tuple[str, ...], Any] = {}
    components = [leaf(turn, ("next", "rewards")) for turn in turns]
    shared = [] if any(node is None for node in components) else plain_node(components[-1]).keys()
    for part in shared:
        path = ("next", "rewards", part)
        for field in ("value", "seconds"):
            summed[*path, field] = [leaf(turn, (*path, field)) for turn in turns]
        valid = [leaf(turn, (*path, "valid")) for turn in turns]
        if all(flag is not None for flag in valid):
            changed[*path, "valid"] = torch.stack(valid).all(0)
            error = leaf(turns[_broken(valid)], (*path, "error"))
            if error is not None:
                changed[*path, "error"] = error
    for path, values in summed.items():
        if all(isinstance(v, Tensor) and v.is_floating_point() for v in values):
            changed[path] = torch.stack(values).sum(0)
    return changed


def _broken(flags: Sequence[Tensor]) -> int:
    """Return the first turn with a failure flag, or else the last turn."""
    return next((at for at, flag in enumerate(flags) if not flag.all()), len(flags) - 1)


def _spread(advantages: list[Tensor], spans: list[tuple[int, int]]) -> Tensor:
    first = advantages[0]
    if all(a.numel() == 1 and torch.equal(a, first) for a in advantages):
        return first
    spread = first.new_zeros(spans[-1][1], 1)
    for advantage, (start, end) in zip(advantages, spans, strict=True):
        own = advantage.reshape(-1, 1)
        spread[start:end] = own if own.shape[0] == 1 else own[start:end]
    return spread
