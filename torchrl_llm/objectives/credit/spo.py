"""Single-stream policy optimisation: tracks a baseline per prompt and needs no sampled group.

:class:`PolicyShift` measures how far a policy has moved since it sampled some rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Annotated, Any, Literal, Unpack

import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm._checked import Ge, Gt, In, Pair, checked
from torchrl_llm._registry import register
from torchrl_llm.data.nodes import leaf
from torchrl_llm.data.replay_buffers.trajectory_queues import Trajectory, as_path, group_value
from torchrl_llm.data.saved_state import SavedState
from torchrl_llm.data.scoring import ScoreExtras, Support, TokenScorer
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.objectives.credit import comparing, credit_assigner

_COLUMNS = {
    "ids": ("tokens", "full"),
    "log_probs": ("log_probs", "full"),
    "temperature": ("tokens", "temperature"),
    "support_ids": ("support", "token_ids"),
    "support_counts": ("support", "counts"),
}


class PolicyShift(SavedState):
    r"""Keeps a few rows of a batch, and scores them again after the update of the policy.

    The mean of ``k3`` over their sampled tokens estimates :math:`KL(\pi_{then} \| \pi_{now})` in
    nats per token. Differences between sampler and scorer (kernels, precision) make the estimate
    larger.

    Args:
        policy: scores tokens; the policy in training.
        num_rows: number of rows kept per batch.

    Raises:
        ConfigError: for a policy that cannot score, or ``num_rows`` below 1.

    Example:
        >>> from torchrl_llm.data.scoring import TokenScores
        >>> class Coin(TokenScorer):
        ...     def token_scores(self, sequences, select, **_):
        ...         return TokenScores(torch.full((sum(int(s.sum()) for s in select),), -0.6931))
        >>> row = TensorDict(
        ...     tokens={"full": torch.arange(3), "response": torch.arange(1, 3)},
        ...     log_probs={"full": torch.tensor([0.0, -0.6931, -0.6931])})
        >>> shift = PolicyShift(Coin())
        >>> shift.remember([Trajectory([row])])
        >>> shift.measure()
        0.0
    """

    saved_rows = ("_rows",)

    @checked
    def __init__(self, policy: TokenScorer, *, num_rows: Annotated[int, Ge(1)] = 8) -> None:
        if not isinstance(policy, TokenScorer):
            raise ConfigError(f"policy must be a TokenScorer, got {type(policy).__name__}")
        self.policy, self.num_rows = policy, num_rows
        self._rows: list[TensorDict] = []

    def remember(self, trajectories: Sequence[Trajectory]) -> None:
        """Keep the first rows of a batch; they replace the rows kept before.

        Args:
            trajectories: trajectories, in the format that advantage estimators get.

        Raises:
            DataError: when rows lack tokens or log-probs.
        """
        rows = [row for trajectory in trajectories for row in trajectory.rows][: self.num_rows]
        self._rows = [self._columns(row) for row in rows]

    @staticmethod
    def _columns(row: TensorDict) -> TensorDict:
        columns = {name: leaf(row, path) for name, path in _COLUMNS.items()}
        ids, log_probs = columns["ids"], columns["log_probs"]
        if ids is None or log_probs is None or ids.shape != log_probs.shape:
            raise DataError(
                "how far the policy moved is measured on ('tokens', 'full') and "
                "('log_probs', 'full'), which the policy writes, one of each a token"
            )
        mask = credit_assigner.sampled_in_row(row, ids.shape[0])
        mask[:1] = False  # the first token has no prefix
        kept = {name: value.clone() for name, value in columns.items() if value is not None}
        return TensorDict({**kept, "mask": mask})

    def measure(self) -> float:
        """Return how far the policy has moved since then, in nats per token; 0 without rows.

        Raises:
            DataError: when log-probs are not finite, because the policy has diverged.
        """
        rows = [row for row in self._rows if bool(row["mask"].any())]
        if not rows:
            return 0.0
        masks = [row["mask"] for row in rows]
        with torch.no_grad():
            scores = self.policy.token_scores(
                [row["ids"] for row in rows],
                masks,
                temperature=torch.stack([self._temperature(row) for row in rows]),
                extras=self._support(rows, masks),
            )
        then = torch.cat([row["log_probs"][mask] for row, mask in zip(rows, masks, strict=True)])
        now = scores.log_probs.to(then.device).double()
        moved = F.k3(now - then.double()).mean()
        if not bool(moved.isfinite()):
            raise DataError(
                "how far the policy moved is not finite: its weights have diverged, or a token "
                "that was sampled has probability zero under it"
            )
        return moved.clamp(min=0.0).item()

    @staticmethod
    def _temperature(row: TensorDict) -> Tensor:
        value = row.get("temperature", None)
        return torch.ones(()) if value is None else value.reshape(()).float()

    @staticmethod
    def _support(rows: list[TensorDict], masks: list[Tensor]) -> ScoreExtras | None:
        names = ("support_ids", "support_counts")
        columns = [[row.get(name, None) for row in rows] for name in names]
        if any(value is None for column in columns for value in column):
            return None
        return ScoreExtras(support=Support.of_rows(*columns, masks))


@register("advantages", "spo")
class SPOAdvantage(credit_assigner.BatchStatistics):
    r"""SPO: the reward minus the prompt's tracked success rate, standardised over the batch.

    arXiv:2509.13232, section 3. Each prompt has :math:`(\alpha, \beta)`; its baseline is :math:`v =
    \alpha / (\alpha + \beta)`. The baseline is read before the update with the new rewards, so it
    does not contain them. The advantage is :math:`A = r - v`, standardised over the batch. An
    update discounts the past by :math:`\rho = clip(2^{-KL / D_{half}}, \rho_{min}, \rho_{max})`. KL
    is how far the policy has moved since the last batch that contained the prompt. It is the sum of
    the moves from batch to batch, or the value of the row at ``kl_key``. :meth:`watch` measures
    each move on a few rows of the previous batch; :meth:`advance` adds a measurement of your own.
    (The sum overestimates the KL between the first and the last policy. Without any measurement,
    ``rho`` is ``rho_max``, as if the policy did not move.) All trajectories of a prompt in one
    batch share one baseline and one update.

    Prompts are identified by their text and not by ``group_id``, because a prompt must be
    recognised in later epochs. The estimator needs no groups.

    Args:
        prompt_key: key that identifies a prompt.
        half_life: divergence in nats that halves the weight of the past.
        rho_bounds: ``(rho_min, rho_max)``.
        initial_value: ``v`` of a new prompt.
        initial_count: number of samples that the initial value counts for; :math:`N_0 = 1 / (1 -
            \rho_{min})` by default.
        kl_key: key of the KL since the last batch with the prompt, in nats per token; ``None`` uses
            the sum of the moves.
        trajectory_return: how the reward, in [0, 1], is computed from the rewards of the turns:
            sum, max, mean or last.
        normalize: ``"population"`` or ``"sample"`` deviation of the batch, or ``"none"`` for
            :math:`r - v` unchanged (also not centred).
        eps: small number that prevents a division by 0.
        eps_as: ``"floor"``: the deviation is at least ``eps``; ``"added"``: ``eps`` is added to the
            deviation.
        batch_size: trajectories per batch, see
            :class:`~torchrl_llm.objectives.credit.BatchStatistics`.
        **options: see :class:`~torchrl_llm.objectives.credit.CreditOptions`.

    Raises:
        ConfigError: for impossible arguments.
        DataError: when a reward is outside [0, 1], where the tracker is not defined.

    Example:
        >>> from tensordict import TensorDict
        >>> def row(reward):
        ...     next_ = {"reward": torch.full((1, 1), reward), "done": torch.ones(1).bool()}
        ...     return TensorDict(next=next_, query=torch.tensor(3))
        >>> spo = SPOAdvantage(normalize="none")
        >>> spo.inv(torch.stack([row(1.0)]))["advantage"].item(), round(spo.value(3), 4)
        (0.5, 0.5576)
    """

    @checked
    def __init__(
        self,
        *,
        prompt_key: NestedKey = "query",
        half_life: Annotated[float, Gt(0)] = 0.1,
        rho_bounds: Annotated[tuple[float, float], Pair("[0, 1]", equal=True)] = (0.875, 0.96),
        initial_value: Annotated[float, In("[0, 1]")] = 0.5,
        initial_count: Annotated[float, Gt(0)] | None = None,
        kl_key: NestedKey | None = None,
        trajectory_return: comparing.TrajectoryReturn = "sum",
        normalize: Literal["population", "sample", "none"] = "population",
        eps: Annotated[float, Ge(0)] = 1e-6,
        eps_as: Literal["floor", "added"] = "floor",
        batch_size: int | None = None,
        **options: Unpack[credit_assigner.CreditOptions],
    ) -> None:
        super().__init__(1, prompt_key=prompt_key, batch_size=batch_size, **options)
        comparing.check_deviation(normalize, eps, eps_as)
        low = rho_bounds[0]
        if low == 1 and initial_count is None:
            raise ConfigError(f"rho_bounds={rho_bounds} forget nothing: give initial_count")
        self.initial_count = 1 / (1 - low) if initial_count is None else initial_count
        self.half_life, self.rho_bounds, self.initial_value = half_life, rho_bounds, initial_value
        self.kl_key, self.trajectory_return = kl_key, trajectory_return
        self.normalize, self.eps, self.eps_as = normalize, eps, eps_as
        # Per prompt: alpha, beta, and the value of ``moved`` at the last batch with the prompt.
        self._known: dict[Hashable, tuple[float, float, float]] = {}
        self._moved = 0.0
        self._shift: PolicyShift | None = None
        self._shift_state: Any = None

    @property
    def moved(self) -> float:
        """How far the policy has moved since the start, in nats per token."""
        return self._moved

    # -- the tracker ------------------------------------------------------------------------------

    @checked
    def advance(self, kl: Annotated[float, In("[0, inf)")]) -> None:
        """Report that the policy has moved.

        Args:
            kl: nats per token, between the policy before and after an update; at least 0.

        Raises:
            ConfigError: for a negative or infinite number.
        """
        self._moved += float(kl)

    def watch(self, policy: TokenScorer, *, num_rows: int = 8) -> None:
        """Measure how far a policy moves, with one forward of a few rows per batch.

        Args:
            policy: the policy in training, the same object that the loss uses.
            num_rows: number of rows of each batch that are scored again when the next batch comes.

        Raises:
            ConfigError: if ``kl_key`` is set, because the rows already hold the KL.
        """
        if self.kl_key is not None:
            raise ConfigError("watch has no effect with kl_key, where rows say how far it moved")
        self._shift = PolicyShift(policy, num_rows=num_rows)
        if self._shift_state is not None:
            self._shift.load_state_dict(self._shift_state)
            self._shift_state = None

    def initialize(self, prompt: Any, rewards: Sequence[float], agent: Any = None) -> None:
        r"""Initialise a prompt from samples of the first policy (the paper uses 8).

        Args:
            prompt: value of the rows at ``prompt_key``.
            rewards: rewards in [0, 1]; their mean becomes ``v``, with the weight of :math:`N_0`
                samples.
            agent: value at ``"agent"``, if the rows have it.

        Raises:
            DataError: when there is no reward, or a reward is outside [0, 1].
        """
        values = torch.tensor(rewards, dtype=torch.float64)
        self._check(values)
        if not len(values):
            raise DataError("a prompt is initialised from at least one reward")
        mean = values.mean().item()
        known = (self.initial_count * mean, self.initial_count * (1 - mean), self._moved)
        self._known[self._name(prompt, agent)] = known

    def value(self, prompt: Any, agent: Any = None) -> float:
        """Return the current baseline of a prompt.

        Args:
            prompt: value of the rows at ``prompt_key``.
            agent: value at ``"agent"``, if the rows have it.
        """
        return self._value(self._name(prompt, agent))

    def value_of(self, row: TensorDict) -> float:
        """Return the current baseline of a row's prompt.

        Args:
            row: a turn, without batch dimension.
        """
        return self._value(self._name(self._group_of(row), leaf(row, ("agent",))))

    def sampling_weights(self, prompts: Sequence[Any], *, floor: float = 0.05) -> Tensor:
        r"""Return how often each prompt should be drawn, :math:`\sqrt{v (1 - v)} + \epsilon`.

        Args:
            prompts: ``N`` prompts, as rows have them.
            floor: the smallest weight.

        Returns:
            float64 ``[N]``, not normalised.
        """
        values = torch.tensor([self.value(prompt) for prompt in prompts], dtype=torch.float64)
        return F.uncertainty_weight(values, floor=floor)

    @staticmethod
    def _name(prompt: Any, agent: Any) -> Hashable:
        return group_value(prompt), None if agent is None else group_value(agent)

    def _value(self, name: Hashable) -> float:
        if name not in self._known:
            return self.initial_value
        alpha, beta, _ = self._known[name]
        return alpha / (alpha + beta)

    # -- credit -----------------------------------------------------------------------------------

    def assign_all(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[list[Tensor]]]:
        """Return the advantages of a batch; see the class."""
        flat = [trajectory for group in groups for trajectory in group]
        rewards = comparing.trajectory_returns(flat, self.trajectory_return)
        self._check(rewards)
        if self._shift is not None:
            self._moved += self._shift.measure()
            self._shift.remember(flat)
        names = [self._name(self._group_of(t.rows[0]), leaf(t.rows[0], ("agent",))) for t in flat]
        values = torch.tensor([self._value(name) for name in names], dtype=torch.float64)
        advantages = rewards - values
        visits: dict[Hashable, list[int]] = {}
        for i, name in enumerate(names):
            visits.setdefault(name, []).append(i)
        for name, members in visits.items():
            self._visit(name, rewards[members], [flat[i] for i in members])
        if self.normalize != "none":
            advantages = F.batch_normalize(
                advantages, normalize=self.normalize, eps=self.eps, eps_as=self.eps_as
            )
        return credit_assigner.per_trajectory(groups, advantages)

    def _visit(self, name: Hashable, rewards: Tensor, trajectories: list[Trajectory]) -> None:
        count, value = self.initial_count, self.initial_value
        start = (count * value, count * (1 - value), 0.0)
        known = torch.tensor(self._known.get(name, start), dtype=torch.float64)
        kl = self._moved - known[2]
        if self.kl_key is not None:
            kl = torch.stack([self._row_kl(t) for t in trajectories]).mean()
        rho = F.forgetting_factor(kl, half_life=self.half_life, bounds=self.rho_bounds)
        alpha, beta = F.beta_update(known[0], known[1], rewards.sum(), rho, len(rewards))
        self._known[name] = (alpha.item(), beta.item(), self._moved)

    def _row_kl(self, trajectory: Trajectory) -> Tensor:
        kl = leaf(trajectory.rows[-1], as_path(self.kl_key))
        if kl is None or kl.numel() != 1 or not bool(kl.isfinite().all()):
            raise DataError(
                f"the tracker reads the KL since a prompt's last visit, one finite number, at "
                f"{self.kl_key!r}, and got {kl}; write it, or leave kl_key out and call advance"
            )
        return kl.reshape(()).double().clamp(min=0)

    @staticmethod
    def _check(rewards: Tensor) -> None:
        outside = (rewards < 0) | (rewards > 1)
        if bool(outside.any()):
            raise DataError(
                "SPO tracks success rates, so rewards must be in [0, 1], and one is "
                f"{rewards[outside][0].item():g}: rescale it in the environment"
            )

    # -- state ------------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """Return queues, counts, the state of each prompt, and the rows of :meth:`watch`."""
        tracker = {"known": dict(self._known), "moved": self._moved}
        if self._shift is not None:
            tracker["shift"] = self._shift.state_dict()
        elif self._shift_state is not None:
            tracker["shift"] = self._shift_state
        return {**super().get_extra_state(), "tracker": tracker}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        super().set_extra_state(state)
        self._known = dict(state["tracker"]["known"])
        self._moved = state["tracker"]["moved"]
        self._shift_state = state["tracker"].get("shift")
        if self._shift is not None and self._shift_state is not None:
            self._shift.load_state_dict(self._shift_state)
            self._shift_state = None
