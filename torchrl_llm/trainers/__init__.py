"""Parts of a training loop: configuration, batches, optimizer, ledger, metrics, checkpoints.

There is no trainer class: a recipe writes its loop on one page and takes from here what is the same
for every algorithm (see ``sota-implementations/grpo/grpo-sync.py``).
"""

from __future__ import annotations

from torchrl_llm._imports import lazy
from torchrl_llm.collectors.staleness import Pacer, StalenessRule
from torchrl_llm.trainers.batch_source import (
    BatchSource,
    TokenLedger,
    rollout_metrics,
    trained_rows,
)
from torchrl_llm.trainers.checkpoint import CheckpointStore, save_pretrained
from torchrl_llm.trainers.metrics import LossMeter, MetricsTable, make_loggers
from torchrl_llm.trainers.optim import (
    clipped_step,
    global_normalizer,
    make_optimizer,
    make_scheduler,
    micro_batches,
    sum_over_ranks,
)
from torchrl_llm.trainers.progress import ProgressBar, StopRequest
from torchrl_llm.trainers.run import CheckpointConfig, EvalConfig, LoggingConfig, TrainingRun

__all__ = [
    "AsyncGRPOConfig",
    "BatchSource",
    "CheckpointConfig",
    "CheckpointStore",
    "EvalConfig",
    "GRPOConfig",
    "LoggingConfig",
    "LossMeter",
    "MetricsTable",
    "Pacer",
    "ProgressBar",
    "StalenessRule",
    "StopRequest",
    "TokenLedger",
    "TrainingRun",
    "check_arguments",
    "check_override_keys",
    "clipped_step",
    "from_mapping",
    "global_normalizer",
    "load_config",
    "make_loggers",
    "make_optimizer",
    "make_scheduler",
    "micro_batches",
    "rollout_metrics",
    "save_pretrained",
    "sum_over_ranks",
    "trained_rows",
]

_LAZY = {
    "torchrl_llm.recipes": "AsyncGRPOConfig GRPOConfig check_arguments load_config",
    "torchrl_llm.recipes.strict_config": "check_override_keys from_mapping",
}
__getattr__ = lazy(__name__, _LAZY)
