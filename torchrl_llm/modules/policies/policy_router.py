"""A policy that contains several: each row is answered by the policy of its player.

Rows name their player in ``"agent"`` (:mod:`torchrl_llm.envs.players`). Collectors,
:func:`~torchrl_llm.evaluation.evaluate` and weight updaters use a :class:`PolicyRouter` as a
policy. The policies in it may be different models, adapters on one model, or the same model twice.

Shape legend: ``B`` rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
)
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from torchrl_llm.data.column import Column
from torchrl_llm.errors import BackendError, CheckpointError, ConfigError, DataError
from torchrl_llm.modules.policies.llm_wrapper import LLMWrapperBase

AGENT_KEY = "agent"
_NOBODY = -1  # the place of a row that is not answered


def derived_seed(seed: int, *parts: Any) -> int:
    """Derive a seed from a base seed and its purpose, by hashing.

    Args:
        seed: seed of the run.
        parts: the purpose: a name, a count.

    Returns:
        A seed in ``[0, 2**31)``, independent of the seeds for other parts.

    Example:
        >>> derived_seed(0, "X", 1) == derived_seed(0, "X", 1), derived_seed(0, "X", 1) % 1000
        (True, 742)
    """
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) % 2**31


class CallCounts:
    """Number of calls of each player's policy; a resumed router derives its next seeds from them.

    Args:
        names: names of the players.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.counts = dict.fromkeys(names, 0)

    def state_dict(self) -> dict[str, int]:
        """The counts."""
        return dict(self.counts)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the state of :meth:`state_dict`.

        Raises:
            CheckpointError: the state belongs to different players.
        """
        if set(state) != set(self.counts):
            raise CheckpointError(
                f"the router has policies for {sorted(self.counts)}, and the saved one had them "
                f"for {sorted(state)}"
            )
        self.counts = dict(state)


class PolicyRouter(TensorDictModuleBase):
    """Passes each row to the policy of its player.

    Rows that ``"_step"`` excludes get an empty answer, as with any policy. A policy without rows to
    answer is not called.

    Args:
        policies: the policy of each player, by the player's name. One policy may serve several
            players.
        seed: base of the sampling seeds. Each call of each player has a separate seed, derived by
            hashing. ``None`` does not change how the policies sample.

    Attributes:
        policies: as given.
        asked: the wrappers that answer, one per different policy, which share the weights of the
            policy.
        calls: number of calls of each player's policy, part of a checkpoint.

    Raises:
        ConfigError: there are no policies, or a value is not a policy.

    Example:
        >>> from torchrl_llm.envs.games import TicTacToeForTwoEnv
        >>> from torchrl_llm.modules import FakeWrapper, load_tokenizer
        >>> tokenizer = load_tokenizer()
        >>> said = {"X": "<move>5</move>", "O": "<move>1</move>"}
        >>> policies = {name: FakeWrapper(text, tokenizer=tokenizer) for name, text in said.items()}
        >>> env, router = TicTacToeForTwoEnv(), PolicyRouter(policies)
        >>> td = env.reset()
        >>> for _ in range(2):
        ...     td = env.step_mdp(env.step(router(td.set("_step", td["active"].clone()))))
        >>> print(td["history"].prompt.chats[0][-1]["content"])
        O takes 1.
        O 2 3
        4 X 6
        7 8 9
        You are X. Your move.
    """

    def __init__(self, policies: Mapping[str, LLMWrapperBase], *, seed: int | None = None) -> None:
        super().__init__()
        if not policies:
            raise ConfigError("a PolicyRouter needs the policy of each player, got none")
        for name, policy in policies.items():
            if not isinstance(policy, LLMWrapperBase):
                raise ConfigError(f"the policy of {name!r} must be a wrapper, got {policy!r}")
        self.seat(policies)
        self.seed, self.calls = seed, CallCounts(policies)
        first = next(iter(policies.values()))
        self.in_keys, self.out_keys = list(first.in_keys), list(first.out_keys)

    def seat(self, policies: Mapping[str, LLMWrapperBase]) -> None:
        """Give players different policies, between two batches.

        Args:
            policies: as in the constructor.
        """
        self.policies = dict(policies)
        # These are submodules, so that collectors and optimizers find each of them once.
        distinct = list(dict.fromkeys(policies.values()))
        self._distinct = nn.ModuleList(distinct)
        self.asked = [policy.get_new_version(inplace=False) for policy in distinct]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Answer the rows.

        Args:
            tensordict: ``[B]``, with ``"agent"``.

        Returns:
            The same rows, with the outputs of the policies.

        Raises:
            DataError: the rows have no ``"agent"``.
            ConfigError: a player has no policy.
            BackendError: the policy of a player failed; the message contains its name.
        """
        size = tensordict.batch_size.numel()
        rows = self._rows(tensordict, size)
        places = [(_NOBODY, 0)] * size
        answers: list[TensorDictBase] = []
        for name, theirs in rows.items():
            for at, row in enumerate(theirs):
                places[row] = (len(answers), at)
            answers.append(self._ask(name, tensordict, theirs))
        if not answers:
            raise DataError("no row is to be answered: its '_step' is false everywhere")
        for node in answers[0].keys():
            parts, given = [each.get(node) for each in answers], tensordict.get(node, None)
            tensordict.set(node, _merged(parts, places, given))
        return tensordict

    def _rows(self, td: TensorDictBase, size: int) -> dict[str, list[int]]:
        """Return the rows that each player has to answer, without players that have none."""
        names = td.get(AGENT_KEY, None)
        if names is None:
            raise DataError(
                f"{len(self.policies)} policies wait for the rows of {', '.join(self.policies)}, "
                "and the rows have no 'agent'; an environment of several players writes it"
            )
        names = names.tolist() if hasattr(names, "tolist") else list(names)
        steps = td.get("_step", None)
        acts = [True] * size if steps is None else steps.reshape(size, -1).any(-1).tolist()
        if unknown := sorted(set(names) - set(self.policies)):
            raise ConfigError(
                f"the players {unknown} have no policy; there are {', '.join(self.policies)}"
            )
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            if acts[row]:
                rows.setdefault(name, []).append(row)
        return rows

    def _ask(self, name: str, td: TensorDictBase, rows: Sequence[int]) -> TensorDictBase:
        given, options = self.policies[name], {}
        policy = self.asked[list(self._distinct).index(given)]
        # Version counters update the policies that were given, not the wrappers.
        policy.policy_version = given.policy_version
        if self.seed is not None:
            options["seed"] = derived_seed(self.seed, name, self.calls.counts[name])
        self.calls.counts[name] += 1
        asked = td[torch.tensor(rows)].exclude("_step", "next")
        try:
            return policy(asked, **options)
        except BackendError as error:
            raise type(error)(f"the policy of {name!r} failed: {error}") from error


def _merged(nodes: Sequence[Any], places: Sequence[tuple[int, int]], given: Any = None) -> Any:
    """Merge the rows of several answers into a column.

    Args:
        nodes: the column of each answer.
        places: for each row, the index of an answer and of a row in it.
        given: the existing column of the rows, if any. Unanswered rows keep their value, or are
            empty without such a column.
    """
    if is_tensorclass(nodes[0]) and not is_non_tensor(nodes[0]):
        plain = [node._tensordict for node in nodes]
        given = given._tensordict if is_tensorclass(given) else given
        return type(nodes[0])._from_tensordict(_merged(plain, places, given))
    if is_non_tensor(nodes[0]):
        values = [node.tolist() for node in nodes]
        kept = None if given is None else given.tolist()
        return Column.of(
            kept[at] if answer == _NOBODY and kept is not None else values[max(answer, 0)][row]
            for at, (answer, row) in enumerate(places)
        )
    if isinstance(nodes[0], Tensor):
        return torch.stack(
            [
                given[at] if answer == _NOBODY and given is not None else nodes[max(answer, 0)][row]
                for at, (answer, row) in enumerate(places)
            ]
        )
    if isinstance(nodes[0], LazyStackedTensorDict):
        empty = _emptied(nodes[0].tensordicts[0])
        rows = [
            empty.copy() if answer == _NOBODY else nodes[answer].tensordicts[row]
            for answer, row in places
        ]
        return LazyStackedTensorDict(*rows, stack_dim=0)
    merged = {
        name: _merged(
            [node.get(name) for node in nodes],
            places,
            None if given is None else given.get(name, None),
        )
        for name in nodes[0].keys()
    }
    return TensorDict._new_unsafe(merged, batch_size=torch.Size([len(places)]))


def _emptied(row: TensorDictBase) -> TensorDictBase:
    """Return a row like the given one, without tokens."""
    return TensorDict(
        {name: value[:0] if value.ndim else value for name, value in row.items()}, batch_size=[]
    )
