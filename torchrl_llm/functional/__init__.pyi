from torchrl_llm.functional.advantages import (
    adapted_kl_coefficient as adapted_kl_coefficient,
    are_equal as are_equal,
    batch_normalize as batch_normalize,
    beta_update as beta_update,
    discounted_returns as discounted_returns,
    forgetting_factor as forgetting_factor,
    group_advantages as group_advantages,
    hybrid_advantages as hybrid_advantages,
    leave_one_out as leave_one_out,
    overlong_penalty as overlong_penalty,
    uncertainty_weight as uncertainty_weight,
)
from torchrl_llm.functional.chunked_head import (
    HeadScores as HeadScores,
    chunked_greedy_ids as chunked_greedy_ids,
    chunked_log_probs as chunked_log_probs,
)
from torchrl_llm.functional.divergence import (
    chunked_divergence as chunked_divergence,
    divergence_from_logits as divergence_from_logits,
)
from torchrl_llm.functional.gae import GAE as GAE, gae as gae, value_loss as value_loss
from torchrl_llm.functional.intervals import (
    Interval as Interval,
    bootstrap_interval as bootstrap_interval,
    wilson_interval as wilson_interval,
)
from torchrl_llm.functional.kl import (
    KL_ESTIMATORS as KL_ESTIMATORS,
    k1 as k1,
    k2 as k2,
    k3 as k3,
    weighted_k3 as weighted_k3,
)
from torchrl_llm.functional.logprobs import (
    entropy_from_logits as entropy_from_logits,
    kept_ids as kept_ids,
    restrict_logits as restrict_logits,
    selective_log_softmax as selective_log_softmax,
    support_log_probs as support_log_probs,
    take_support as take_support,
    token_log_probs as token_log_probs,
)
from torchrl_llm.functional.packing import (
    AttentionBlock as AttentionBlock,
    Prefix as Prefix,
    PrefixView as PrefixView,
    RowCosts as RowCosts,
    block_attention as block_attention,
    block_mask as block_mask,
    blocks_cost as blocks_cost,
    length_buckets as length_buckets,
    prefix_views as prefix_views,
)
from torchrl_llm.functional.padding import (
    flatten_padded as flatten_padded,
    length_mask as length_mask,
    mask_to_spans as mask_to_spans,
    pad_flat as pad_flat,
    row_counts as row_counts,
    row_index as row_index,
    run_lengths as run_lengths,
    spans_to_mask as spans_to_mask,
)
from torchrl_llm.functional.policy_surrogates import (
    cispo as cispo,
    gmpo as gmpo,
    gspo as gspo,
    gspo_token as gspo_token,
    policy_gradient_loss as policy_gradient_loss,
    ppo_clip as ppo_clip,
    reinforce as reinforce,
    sapo as sapo,
    sequence_weights as sequence_weights,
    topr as topr,
)
from torchrl_llm.functional.preferences import (
    bradley_terry as bradley_terry,
    calibration_error as calibration_error,
    kto_loss as kto_loss,
    log_odds as log_odds,
    pair_loss as pair_loss,
)
from torchrl_llm.functional.ratios import (
    PolicyMismatch as PolicyMismatch,
    effective_sample_size as effective_sample_size,
    ess_from_moments as ess_from_moments,
    ess_moments as ess_moments,
    geometric_log_ratio as geometric_log_ratio,
    level_log_ratio as level_log_ratio,
    masked_weights as masked_weights,
    policy_mismatch as policy_mismatch,
    sequence_log_ratio as sequence_log_ratio,
    sequence_mask as sequence_mask,
    truncated_weights as truncated_weights,
)
from torchrl_llm.functional.reduce import (
    Normalizer as Normalizer,
    aggregate as aggregate,
    token_weights as token_weights,
)
