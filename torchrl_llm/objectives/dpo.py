"""DPO: compares pairs of answers by their log-ratios to a reference."""

from __future__ import annotations

from torch import Tensor

from torchrl_llm._registry import register
from torchrl_llm.objectives.answer_loss import Answers, PairLoss


@register("preference_losses", "dpo")
class DPOLoss(PairLoss):
    r"""Direct preference optimization, :math:`-\log \sigma(\beta (r_c - r_r))`.

    arXiv:2305.18290, with :math:`r = \log \pi - \log \pi_\mathrm{ref}` of the whole answer. Other
    forms are IPO (``form="ipo"``, where :math:`r` is a mean per token, as its authors compute it),
    SLiC's hinge and the robust loss, see :func:`~torchrl_llm.functional.pair_loss`. TRL's
    ``loss_type`` of the same name gives the same values. In TRL, ``label_smoothing`` has no effect
    on ``"sigmoid"``; in torchrl_llm it has an effect.

    Args:
        actor_network: model that scores tokens: a policy wrapper or a ``CausalScorer``.
        beta: slope; larger values keep the policy closer to the reference.
        form: form of the loss, see :func:`~torchrl_llm.functional.pair_loss`.
        label_smoothing: share of pairs whose answers are assumed to be swapped; for ``"sigmoid"``
            and ``"robust"``.
        target_margin: target difference of the implicit rewards of a pair.
        sft_coeff: weight of the cross-entropy of the chosen answers; 0 for none.
        sft_tokens: tokens of that cross-entropy: the ``"answer"``, or the whole ``"conversation"``.
        device: device on which the loss is computed from the log-probs; by default the device of
            the log-probs.

    Raises:
        ConfigError: for settings that are unknown, invalid or without effect.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.ragged import ragged_rows
        >>> from torchrl_llm.modules import load_model
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> ids = [torch.tensor([3, 4, 5]), torch.tensor([3, 7])]
        >>> masks = [torch.tensor([False, True, True]), torch.tensor([False, True])]
        >>> rows = TensorDict(
        ...     tokens=ragged_rows({"full": ids}),
        ...     masks=ragged_rows({"all_assistant_mask": masks}),
        ...     pair_id=torch.tensor([0, 0]),
        ...     is_chosen=torch.tensor([True, False]),
        ...     ref_log_prob=torch.zeros(2),
        ...     batch_size=2,
        ... )
        >>> DPOLoss(CausalScorer(load_model()))(rows).total_loss().backward()
    """

    needs_reference = True

    def compared(self, answers: Answers) -> Tensor:
        """Return the log-ratio of each answer; for IPO, its mean per token."""
        ratio = answers.log_ratio
        return ratio / answers.length if self.form == "ipo" else ratio
