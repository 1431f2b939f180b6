"""Environment whose rows are programs with their own loop; the policy answers their calls.

The wrapped task provides only rows and the reward. At each step the policy answers the waiting
calls. A turn is returned once its outcome is known: the program has made its next call, or has
ended. Until then its row is not stepped, so no program waits for the tools of another one.

Next: :mod:`torchrl_llm.gateway.program_sessions` runs the programs and collects their calls.

Shape legend: ``B`` rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Composite, Unbounded
from torchrl.envs import Compose, Transform, TransformedEnv

from torchrl_llm.data.column import Column
from torchrl_llm.data.enums import TruncationReason
from torchrl_llm.data.failures import NO_FAILURE, PROGRAM, Failure
from torchrl_llm.data.nodes import plain_node
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.rollouts import sampled_tokens, split_batch
from torchrl_llm.data.specs import ColumnSpec
from torchrl_llm.data.table_cells import plain_cell
from torchrl_llm.envs.layers import HoldsTurns, insert
from torchrl_llm.envs.transforms.answer_gates import AnswerGate
from torchrl_llm.envs.transforms.episode_limits import write_reason
from torchrl_llm.gateway.program_runner import Ended
from torchrl_llm.gateway.program_sessions import ProgramSessions, Rollout
from torchrl_llm.modules.policies.row_sampling import SAMPLING_KEY
from torchrl_llm.rewards import reward_parser

_NEVER_CALLED = "the program ended without an answer of the model"


class ProgramTransform(Transform):
    """Starts programs, turns their calls into prompts, and records how they ended.

    It is placed before the reward, which scores the last turn of programs that return nothing. It
    writes ``"active"``, bool ``[B, 1]`` (a call of the row waits for the policy), ``"sampling"``
    (the settings of the call) and, at each step, ``"reward"``, ``"success"``, ``"reward_valid"``,
    ``"error"`` and ``"reward_refused"`` (like an ``AnswerGate``), and ``"program"``, the named
    numbers that a program returned.

    Args:
        sessions: runs the programs.
    """

    def __init__(self, sessions: ProgramSessions) -> None:
        super().__init__()
        self.sessions = sessions

    # -- reset ------------------------------------------------------------------------------------

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        size = tensordict_reset.batch_size.numel()
        mask = tensordict.get("_reset", None)
        begins = [True] * size if mask is None else mask.reshape(size, -1).any(-1).tolist()
        self.begin(tensordict_reset, begins)
        if all(begins):
            self.sessions.wait()
        self.ask(tensordict_reset)
        return tensordict_reset

    def begin(self, td: TensorDictBase, places: Sequence[bool]) -> None:
        """Start the programs of some rows, each with its columns and its task's first prompt.

        Args:
            td: all rows.
            places: indices of the rows.
        """
        base, keys = self.parent.base_env, self.container.primer.data_keys
        columns = {key: reward_parser.read_column(td, key) for key in keys}
        for place, begins in enumerate(places):
            if begins:
                row = {key: plain_cell(column[place]) for key, column in columns.items()}
                query = row[base.data_key]
                row["messages"] = list(base.start(query))
                row[base.data_key] = query if isinstance(query, str) else list(row["messages"])
                self.sessions.begin(place, row)

    def ask(self, td: TensorDictBase) -> None:
        """Put the next calls into the prompts.

        Args:
            td: result of a reset or step; changed in place.
        """
        rollouts = self.sessions.rollouts
        for rollout in rollouts:
            if rollout is not None and rollout.held is None:
                self.sessions.take(rollout)
        asked = [None if each is None else each.asked for each in rollouts]
        chats = {place: call.chat for place, call in enumerate(asked) if call is not None}
        if chats:
            self.parent.base_env.mode.replace(td, chats)
        active = torch.tensor([call is not None for call in asked], device=td.device)
        td.set("active", active.unsqueeze(-1))
        wanted = ({} if call is None else dict(call.sampling) for call in asked)
        td.set(SAMPLING_KEY, Column.of(wanted))

    # -- step -------------------------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        size = next_tensordict.batch_size.numel()
        steps = tensordict.get("_step", None)
        told = [True] * size if steps is None else steps.reshape(size, -1).any(-1).tolist()
        ended: list[Ended | None] = [None] * size
        for place, is_told in enumerate(told):
            rollout = self.sessions.rollouts[place]
            if is_told:
                rollout.held = None
                if rollout.asked is None:
                    ended[place] = _outcome(rollout)
                    self.sessions.forget(place)
        _write_outcomes(tensordict, next_tensordict, ended)
        return next_tensordict

    # -- specs ------------------------------------------------------------------------------------

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds ``"active"`` and ``"sampling"``."""
        shape, device = observation_spec.shape, observation_spec.device
        active = Unbounded(shape=(*shape, 1), dtype=torch.bool, device=device)
        observation_spec["active"] = active
        observation_spec[SAMPLING_KEY] = ColumnSpec((*shape, -1), example_data={})
        return observation_spec

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """Adds them to the inputs of a step."""
        return self.transform_observation_spec(state_spec)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Adds the reward, and the flag that it must not be scored again."""
        spec = reward_parser.add_reward_specs(reward_spec, ["reward"], "success")
        spec["reward_refused"] = Unbounded(
            shape=spec.shape, dtype=torch.bool, device=reward_spec.device
        )
        spec["program"] = ColumnSpec((*spec.shape, -1), example_data={})
        return spec

    def close(self) -> None:
        """End all programs."""
        self.sessions.close()
        super().close()


def _outcome(rollout: Rollout) -> Ended:
    """Outcome of a program; a program that never got an answer has failed."""
    ended = rollout.ended
    if ended.failure is None and not rollout.num_answers:
        return Ended(None, Failure.told("NoCallError", _NEVER_CALLED, source=PROGRAM))
    return ended


def _write_outcomes(
    td: TensorDictBase, next_td: TensorDictBase, ended: Sequence[Ended | None]
) -> None:
    size = len(ended)
    failures = [NO_FAILURE if e is None or e.failure is None else e.failure for e in ended]
    scores = [(0.0, False) if e is None else _score(e) for e in ended]
    pairs = zip(failures, scores, strict=True)
    rewards = [float("nan") if failure.kind else reward for failure, (reward, _) in pairs]
    device, cell = next_td.device, (size, 1, 1)
    over = torch.tensor([e is not None for e in ended], device=device).unsqueeze(-1)
    late = torch.tensor([f.kind == "ProgramTimeout" for f in failures], device=device)
    late = late.unsqueeze(-1)
    reward_parser.raise_flags(next_td, done=over, terminated=over & ~late, truncated=late)
    write_reason(next_td, late, TruncationReason.ENV)
    next_td.set("reward", torch.tensor(rewards, device=device).view(cell))
    next_td.set("success", torch.tensor([s for _, s in scores], device=device).view(cell))
    next_td.set("reward_valid", torch.tensor([not f.kind for f in failures], device=device))
    # The task's reward is for whole rollouts without their own reward.
    scored = [e is not None and e.failure is None and e.value is None for e in ended]
    next_td.set("reward_refused", torch.tensor([not each for each in scored], device=device))
    values = [None if e is None else e.value for e in ended]
    told = (dict(v) if isinstance(v, Mapping) else {} for v in values)
    next_td.set("program", Column.of(told))
    reward_parser.write_errors(next_td, failures, td)


def _score(ended: Ended) -> tuple[float, bool]:
    """Reward and success from a program's return value."""
    value = ended.value
    if value is None:
        return 0.0, False
    if not isinstance(value, Mapping):
        return float(value), value > 0
    reward = value["reward"] if "reward" in value else sum(value.values())
    return float(reward), bool(value.get("success", reward > 0))


class ProgramEnv(TransformedEnv, HoldsTurns):
    """A task whose rows are programs; see :class:`~torchrl_llm.agents.ProgramAgent`.

    Args:
        task: task in history mode, which provides rows and the reward.
        sessions: runs the programs.
    """

    def __init__(self, task: TransformedEnv, sessions: ProgramSessions) -> None:
        self.__dict__["sessions"] = sessions
        self.__dict__["programs"] = ProgramTransform(sessions)
        insert(task, self.programs, before=(AnswerGate, reward_parser.RewardParser))
        super().__init__(task, Compose())

    @property
    def tokens_held(self) -> int:
        """Sampled tokens of turns that have not been returned yet."""
        held = (each.held for each in self.sessions.rollouts if each is not None)
        return sum(sampled_tokens(row) for row in held if row is not None)

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Pass the answers to the programs, and step the rows with a known outcome.

        Args:
            tensordict: all rows after the policy.

        Returns:
            All rows; ``"_step"`` marks the stepped rows, which contain the completed turn instead
            of the current one.
        """
        rollouts, rows = self.sessions.rollouts, split_batch(tensordict.exclude("_step", "next"))
        lost = [
            each is None and not done
            for each, done in zip(rollouts, tensordict.get("done").flatten().tolist(), strict=True)
        ]
        self.programs.begin(tensordict, lost)  # this happens after a resume
        self.sessions.answered()
        for rollout, row in zip(rollouts, rows, strict=True):
            if rollout is not None and rollout.asked is not None:
                self.sessions.answer(rollout, row)
        self.sessions.wait()
        told = {}
        for place, rollout in enumerate(rollouts):
            if rollout is None or rollout.asked is not None:
                continue
            self.sessions.take(rollout)
            if rollout.held is not None and (rollout.asked or rollout.ended):
                told[place] = rollout.held
            elif rollout.ended and rollout.asked is None:  # it never made a call
                told[place] = rows[place]
        out = self._told(_with_rows(tensordict.exclude("_step", "next"), told), told)
        self.programs.ask(out.get("next"))
        return out

    def _told(self, td: TensorDictBase, told: Mapping[int, TensorDict]) -> TensorDictBase:
        """Step the rows with a known outcome."""
        steps = torch.zeros(*self.batch_size, 1, dtype=torch.bool, device=td.device)
        steps[list(told)] = True
        if told:
            td = super().step(td.set("_step", steps.clone()))
        else:  # only new calls are waiting
            next_td = self._skip_tensordict(td)
            next_td.set("reward_valid", torch.ones(self.batch_size, dtype=torch.bool))
            td.set("next", next_td)
        return td.set("_step", steps)


def _with_rows(node: TensorDictBase, rows: Mapping[int, Any]) -> Any:
    """A batch with some rows replaced.

    Args:
        node: ``[B]``, dense or lazy.
        rows: plain rows by index.
    """
    if isinstance(node, LazyStackedTensorDict):
        return lazy_rows([rows.get(at, old) for at, old in enumerate(node.tensordicts)])
    made: dict[str, Any] = {}
    for name, value in node._tensordict.items():
        own = {at: plain_node(row)._tensordict[name] for at, row in rows.items()}
        if isinstance(value, Tensor):
            made[name] = value.clone() if own else value
            for at, cell in own.items():
                made[name][at] = cell
        elif isinstance(value, NonTensorStack):
            items = value.tolist()
            for at, cell in own.items():
                items[at] = cell.data
            made[name] = Column.of(items)
        else:
            inner = _with_rows(plain_node(value), {at: plain_node(c) for at, c in own.items()})
            typed = plain_node(value) is not value
            made[name] = type(value)._from_tensordict(inner) if typed else inner
    return TensorDict._new_unsafe(made, batch_size=node.batch_size, device=node.device)
