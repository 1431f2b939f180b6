"""Pure tensor functions: the mathematics of post-training, on torch and the standard library alone.

Every function takes tensors and returns tensors; shapes, units (nats) and papers are in the
docstrings. Classes that read tensordicts and call models live in :mod:`torchrl_llm.objectives`.
"""

from __future__ import annotations

from torchrl_llm.functional.advantages import (
    batch_normalize,
    discounted_returns,
    group_advantages,
    hybrid_advantages,
    leave_one_out,
)
from torchrl_llm.functional.chunked_head import HeadScores, chunked_log_probs
from torchrl_llm.functional.corrections import level_log_ratio, sequence_mask
from torchrl_llm.functional.diagnostics import (
    PolicyMismatch,
    effective_sample_size,
    ess_from_moments,
    ess_moments,
    policy_mismatch,
)
from torchrl_llm.functional.divergence import chunked_divergence, divergence_from_logits
from torchrl_llm.functional.gae import GAE, gae, value_loss
from torchrl_llm.functional.kl import KL_ESTIMATORS, k1, k2, k3, weighted_k3
from torchrl_llm.functional.logprobs import (
    entropy_from_logits,
    selective_log_softmax,
    token_log_probs,
)
from torchrl_llm.functional.packing import (
    AttentionBlock,
    Prefix,
    PrefixView,
    RowCosts,
    block_attention,
    block_mask,
    blocks_cost,
    length_buckets,
    prefix_views,
)
from torchrl_llm.functional.padding import (
    flatten_padded,
    length_mask,
    pad_flat,
    row_counts,
    row_index,
)
from torchrl_llm.functional.policy_gradient import policy_gradient_loss
from torchrl_llm.functional.ratios import (
    geometric_log_ratio,
    masked_weights,
    sequence_log_ratio,
    truncated_weights,
)
from torchrl_llm.functional.reduce import Normalizer, aggregate, token_weights
from torchrl_llm.functional.shaping import adapted_kl_coefficient, overlong_penalty
from torchrl_llm.functional.spans import mask_to_spans, run_lengths, spans_to_mask
from torchrl_llm.functional.support import (
    kept_ids,
    restrict_logits,
    support_log_probs,
    take_support,
)
from torchrl_llm.functional.surrogates import (
    cispo,
    gmpo,
    gspo,
    gspo_token,
    ppo_clip,
    reinforce,
    sapo,
    sequence_weights,
    topr,
)
from torchrl_llm.functional.trackers import beta_update, forgetting_factor, uncertainty_weight

__all__ = [
    "GAE",
    "KL_ESTIMATORS",
    "AttentionBlock",
    "HeadScores",
    "Normalizer",
    "PolicyMismatch",
    "Prefix",
    "PrefixView",
    "RowCosts",
    "adapted_kl_coefficient",
    "aggregate",
    "batch_normalize",
    "beta_update",
    "block_attention",
    "block_mask",
    "blocks_cost",
    "chunked_divergence",
    "chunked_log_probs",
    "cispo",
    "discounted_returns",
    "divergence_from_logits",
    "effective_sample_size",
    "entropy_from_logits",
    "ess_from_moments",
    "ess_moments",
    "flatten_padded",
    "forgetting_factor",
    "gae",
    "geometric_log_ratio",
    "gmpo",
    "group_advantages",
    "gspo",
    "gspo_token",
    "hybrid_advantages",
    "k1",
    "k2",
    "k3",
    "kept_ids",
    "leave_one_out",
    "length_buckets",
    "length_mask",
    "level_log_ratio",
    "mask_to_spans",
    "masked_weights",
    "overlong_penalty",
    "pad_flat",
    "policy_gradient_loss",
    "policy_mismatch",
    "ppo_clip",
    "prefix_views",
    "reinforce",
    "restrict_logits",
    "row_counts",
    "row_index",
    "run_lengths",
    "sapo",
    "selective_log_softmax",
    "sequence_log_ratio",
    "sequence_mask",
    "sequence_weights",
    "spans_to_mask",
    "support_log_probs",
    "take_support",
    "token_log_probs",
    "token_weights",
    "topr",
    "truncated_weights",
    "uncertainty_weight",
    "value_loss",
    "weighted_k3",
]
