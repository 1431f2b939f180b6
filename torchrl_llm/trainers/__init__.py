"""Parts of a training loop: configuration, batches, optimizer, ledger, metrics, checkpoints.

There is no trainer class: a recipe writes its loop on one page and takes from here what is the same
for every algorithm (see ``sota-implementations/grpo/grpo-sync.py``).
"""

from __future__ import annotations

from torchrl_llm._imports import lazy

_LAZY = {
    "torchrl_llm._progress": "ProgressBar",
    "torchrl_llm._run_log": "RunLog say show",
    "torchrl_llm.collectors.staleness": "Pacer StalenessRule",
    "torchrl_llm.recipes": "AsyncGRPOConfig GRPOConfig check_arguments load_config",
    "torchrl_llm.recipes.strict_config": "check_override_keys from_mapping",
    "torchrl_llm.trainers.batch_source": "BatchSource TokenLedger rollout_metrics trained_rows",
    "torchrl_llm.trainers.checkpoint": "CheckpointStore save_pretrained",
    "torchrl_llm.trainers.hub": "push_to_hub",
    "torchrl_llm.trainers.loggers": "make_loggers",
    "torchrl_llm.trainers.metrics": "LossMeter MetricsTable",
    "torchrl_llm.trainers.optim": (
        "clipped_step make_optimizer make_scheduler micro_batches optimize"
    ),
    "torchrl_llm.trainers.progress": "StopRequest",
    "torchrl_llm.trainers.ranks": "Ranks begin_ranks global_normalizer sum_over_ranks",
    "torchrl_llm.trainers.reward_watch": "FailureTally RewardWatch",
    "torchrl_llm.trainers.run": "TrainingRun",
    "torchrl_llm.trainers.run_config": "CheckpointConfig EvalConfig LoggingConfig",
    "torchrl_llm.trainers.run_results": "EvalResult Shown",
}
__getattr__ = lazy(__name__, _LAZY)
