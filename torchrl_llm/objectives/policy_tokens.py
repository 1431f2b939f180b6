"""What a policy-gradient loss sees of its tokens, and what it returns.

Shape legend: ``B`` rows, ``T`` tokens of a row, ``N`` tokens that count.
"""

from __future__ import annotations

from typing import NamedTuple

from tensordict import TensorClass
from torch import Tensor

from torchrl_llm.functional import ess_from_moments
from torchrl_llm.objectives.token_loss import LLMLossOutput


class PolicyLossOutput(TensorClass["nocast"], LLMLossOutput):
    """Output of a policy-gradient loss; fields are float32 scalars.

    Attributes:
        loss_objective: the surrogate, averaged as the loss's ``aggregation`` says; ``[B, T]`` per
            token when that is ``"none"``.
        clip_fraction: share of tokens whose gradient is cut by a bound.
        kl_approx: mean of sampled (with a correction, proximal) minus current log-prob, nats.
        ess_moments: ``[3]``, sums that the effective sample size is made of, see ``ESS``.
        entropy: mean entropy, nats.
        loss_entropy: the entropy bonus, where asked for.
        loss_kl_to_ref: weighted divergence from the reference, where asked for.
        kl_to_ref: its mean, nats.
        loss_kl_to_inference: weighted divergence from the sampler, where asked for.
        kl_to_inference: its mean, nats.
        correction_masked: share of tokens that the correction gives weight zero.
        mismatch_k1: mean of sampled minus proximal log-prob, nats: the divergence of the proximal
            policy from the sampler.
        mismatch_k3: the same by the estimate that is never negative.
    """

    loss_objective: Tensor
    clip_fraction: Tensor
    kl_approx: Tensor
    ess_moments: Tensor
    entropy: Tensor | None = None
    loss_entropy: Tensor | None = None
    loss_kl_to_ref: Tensor | None = None
    kl_to_ref: Tensor | None = None
    loss_kl_to_inference: Tensor | None = None
    kl_to_inference: Tensor | None = None
    correction_masked: Tensor | None = None
    mismatch_k1: Tensor | None = None
    mismatch_k3: Tensor | None = None

    @property
    def ESS(self) -> Tensor:
        """Effective sample size of the ratios current / sampled, as a share.

        Exact for the sum of the outputs of micro-batches, too.
        """
        return ess_from_moments(self.ess_moments.detach())

    def metrics(self) -> dict[str, Tensor]:
        """Every scalar that is there, loss terms included, and ``ESS``, without gradient."""
        metrics = LLMLossOutput.metrics(self)
        del metrics["ess_moments"]
        return {**metrics, "ESS": self.ESS}


class PolicyTokens(NamedTuple):
    """The tokens that count, flat, as a surrogate sees them.

    Attributes:
        log_probs: float32 ``[N]`` under the current policy, with gradients, nats.
        log_ratio: float32 ``[N]``, current minus proximal log-prob, with gradients, nats. The
            proximal policy is the sampler, or with a correction what that says.
        advantage: float32 ``[N]``.
        row: int64 ``[N]``, the row of each token.
        num_rows: ``B``.
        sample_log_probs: float32 ``[N]`` under the sampler, nats.
    """

    log_probs: Tensor
    log_ratio: Tensor
    advantage: Tensor
    row: Tensor
    num_rows: int
    sample_log_probs: Tensor


class Surrogate(NamedTuple):
    """What a surrogate says about each token.

    Attributes:
        loss: float32 ``[N]``.
        clipped: bool ``[N]``, where a bound cuts the gradient.
    """

    loss: Tensor
    clipped: Tensor
