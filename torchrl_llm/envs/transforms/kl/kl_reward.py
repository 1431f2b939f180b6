"""The KL penalty in the reward under TorchRL's older name and arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Composite

from torchrl_llm.data.kl_controllers import KLController
from torchrl_llm.data.replay_buffers.trajectory_queues import as_path
from torchrl_llm.data.row_transform import Path, RowView
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.envs.transforms.kl.kl_transform import KLReduction, KLTransform, Sources
from torchrl_llm.envs.transforms.kl.retrieve import made
from torchrl_llm.envs.transforms.retrieve_log_prob import RetrieveLogProb
from torchrl_llm.errors import ConfigError
from torchrl_llm.functional.kl import KLEstimator


class KLRewardTransform(KLTransform):
    """Reward less ``coef`` times the divergence of the recorded log-probs from a reference.

    The same as :class:`RetrieveKL` with ``gen_model="from_collector"``, for scripts written for
    TorchRL; its penalty of a reward ``[1, 1]`` is that of the whole response once, where TorchRL
    spreads the reward over all tokens.

    Args:
        ref_model: the reference.
        ref_model_factory: makes it instead.
        coef: a number or a controller, see
            :class:`~torchrl_llm.envs.transforms.kl.kl_transform.KLTransform`.
        in_keys: the reward's name under ``"next"``, ``["reward"]`` by default.
        out_keys: names under ``"next"`` of the penalised reward, and optionally of the divergences
            and of the reference's log-probs; ``["reward", "kl_penalty", "ref_log_probs"]`` by
            default.
        log_prob_key: where the policy recorded its log-probs.
        device: move the reference there once.
        add_to_reward: see :class:`~torchrl_llm.envs.transforms.kl.kl_transform.KLTransform`.
        assistant_only: score the assistant's tokens only.
        reduction: see :class:`~torchrl_llm.envs.transforms.kl.kl_transform.KLTransform`.
        estimator: see there.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect.
        DataError: for rows that lack a column that is needed.

    Example:
        >>> from torchrl_llm.envs import DatasetChatEnv
        >>> from torchrl_llm.modules import TransformersBackend, load_model
        >>> env = DatasetChatEnv(dataset=[{"query": "Hi"}])
        >>> reference = TransformersBackend(load_model().requires_grad_(False))
        >>> env = env.append_transform(KLRewardTransform(reference, coef=0.05))
        >>> sorted(env.reset()["kl_penalty"].keys())
        ['coeff', 'full', 'mean', 'sum']
    """

    def __init__(
        self,
        ref_model: TokenScorer | None = None,
        *,
        ref_model_factory: Callable[[], TokenScorer] | None = None,
        coef: float | KLController = 1.0,
        in_keys: Sequence[str] | None = None,
        out_keys: Sequence[str] | None = None,
        log_prob_key: NestedKey = ("log_probs", "full"),
        device: torch.device | str | None = None,
        add_to_reward: bool = True,
        assistant_only: bool = True,
        reduction: KLReduction = "sum",
        estimator: KLEstimator = "k1",
    ) -> None:
        in_keys = ["reward"] if in_keys is None else list(in_keys)
        out_keys = in_keys if out_keys is None else list(out_keys)
        if len(in_keys) != 1 or len(out_keys) not in (1, 3):
            raise ConfigError(
                "in_keys names the reward and out_keys the new one (and the divergences and the "
                f"reference's log-probs), got {in_keys} and {out_keys}"
            )
        names = out_keys if len(out_keys) == 3 else [*out_keys, "kl_penalty", "ref_log_probs"]
        super().__init__(
            coeff=coef,
            add_to_reward=add_to_reward,
            reduction=reduction,
            estimator=estimator,
            reward_key=("next", in_keys[0]),
            penalised_key=("next", names[0]),
            kl_key=names[1],
        )
        self.reference = RetrieveLogProb(
            made(ref_model, ref_model_factory),
            log_probs_full_key=(names[2], "full"),
            assistant_only=assistant_only,
            device=device,
        )
        self.log_prob_key = as_path(log_prob_key)

    def sources(self, rows: RowView) -> Sources:
        """What the policy recorded, and scores of the reference."""
        columns = self.reference.columns(rows)
        gen = rows.read(self.log_prob_key, "the policy writes it when it samples")
        return Sources(gen, columns[self.reference.written], columns)

    def empty_columns(self) -> dict[Path, Tensor]:
        """No token has a log-prob or divergence yet."""
        return super().empty_columns() | self.reference.empty_columns()

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds log-probs and divergences."""
        observation_spec = self.reference.transform_observation_spec(observation_spec)
        return super().transform_observation_spec(observation_spec)
