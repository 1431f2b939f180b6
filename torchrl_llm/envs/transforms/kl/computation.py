"""Divergence from log-probs that the rows have already."""

from __future__ import annotations

from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.data.kl_controllers import KLController
from torchrl_llm.data.replay_buffers.trajectory_queues import as_path
from torchrl_llm.data.row_transform import Path, RowView
from torchrl_llm.envs.transforms.kl.kl_transform import KLReduction, KLTransform, Sources
from torchrl_llm.functional.kl import KLEstimator


class KLComputation(KLTransform):
    """Measures and penalises the divergence between two columns of log-probs.

    For references whose log-probs are stored: by
    :class:`~torchrl_llm.envs.transforms.RetrieveLogProb`, or with a data set.

    Args:
        gen_log_probs_full_key: log-probs under the policy, by default those recorded when it
            sampled; looked for in the row, then under its ``"next"``.
        ref_log_probs_full_key: log-probs under the reference; looked for under ``"next"``, then in
            the row.
        kl_key: see :class:`~torchrl_llm.envs.transforms.kl.kl_transform.KLTransform`, as for all
        others. add_to_reward: see there.
        coeff: see there.
        reduction: see there.
        estimator: see there.
        reward_key: see there.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect.
        DataError: for rows without one of the columns, misaligned ones, or log-probs that are not
            finite at a sampled token.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> ids = torch.arange(3)
        >>> row = TensorDict(
        ...     tokens={"full": ids, "response": ids[1:]},
        ...     log_probs={"full": torch.tensor([0.0, -1.0, -2.0])},
        ...     next={
        ...         "ref_log_probs": {"full": torch.tensor([0.0, -1.5, -3.0])},
        ...         "reward": torch.ones(1, 1),
        ...     },
        ... )
        >>> row = KLComputation(coeff=0.1)(row)
        >>> round(row["next", "reward"].item(), 4), row["next", "kl_penalty", "full"].tolist()
        (0.85, [0.0, 0.5, 1.0])
    """

    def __init__(
        self,
        gen_log_probs_full_key: NestedKey = ("log_probs", "full"),
        ref_log_probs_full_key: NestedKey = ("ref_log_probs", "full"),
        *,
        kl_key: str = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float | KLController = 1.0,
        reduction: KLReduction = "sum",
        estimator: KLEstimator = "k1",
        reward_key: NestedKey = ("next", "reward"),
    ) -> None:
        super().__init__(
            coeff=coeff,
            add_to_reward=add_to_reward,
            reduction=reduction,
            estimator=estimator,
            reward_key=reward_key,
            kl_key=kl_key,
        )
        self.gen_log_probs_full_key = as_path(gen_log_probs_full_key)
        self.ref_log_probs_full_key = as_path(ref_log_probs_full_key)

    def sources(self, rows: RowView) -> Sources:
        """The two columns."""
        gen, ref = self.gen_log_probs_full_key, self.ref_log_probs_full_key
        return Sources(
            _either(rows, gen, ("next", *gen), "the policy writes it"),
            _either(rows, ("next", *ref), ref, "RetrieveLogProb with the reference writes it"),
            {},
        )


def _either(rows: RowView, first: Path, second: Path, advice: str) -> list[Tensor]:
    values = rows.read(first)
    return rows.read(second, advice) if values is None else values
