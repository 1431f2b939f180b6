from torchrl_llm._progress import ProgressBar as ProgressBar
from torchrl_llm._run_log import RunLog as RunLog, say as say, show as show
from torchrl_llm.collectors.staleness import Pacer as Pacer, StalenessRule as StalenessRule
from torchrl_llm.recipes import (
    AsyncGRPOConfig as AsyncGRPOConfig,
    GRPOConfig as GRPOConfig,
    load_config as load_config,
)
from torchrl_llm.recipes.strict_config import from_mapping as from_mapping
from torchrl_llm.trainers.batch_source import (
    BatchSource as BatchSource,
    trained_rows as trained_rows,
)
from torchrl_llm.trainers.checkpoint import (
    CheckpointStore as CheckpointStore,
    save_pretrained as save_pretrained,
)
from torchrl_llm.trainers.episode_metrics import rollout_metrics as rollout_metrics
from torchrl_llm.trainers.hub import push_to_hub as push_to_hub
from torchrl_llm.trainers.ledger import TokenLedger as TokenLedger
from torchrl_llm.trainers.loggers import make_loggers as make_loggers
from torchrl_llm.trainers.metrics import LossMeter as LossMeter, MetricsTable as MetricsTable
from torchrl_llm.trainers.optim import (
    clipped_step as clipped_step,
    make_scheduler as make_scheduler,
    micro_batches as micro_batches,
    optimize as optimize,
)
from torchrl_llm.trainers.optimizers import make_optimizer as make_optimizer
from torchrl_llm.trainers.progress import StopRequest as StopRequest
from torchrl_llm.trainers.ranks import (
    Ranks as Ranks,
    begin_ranks as begin_ranks,
)
from torchrl_llm.trainers.reward_watch import (
    FailureTally as FailureTally,
    RewardWatch as RewardWatch,
)
from torchrl_llm.trainers.run import TrainingRun as TrainingRun
from torchrl_llm.trainers.run_config import (
    CheckpointConfig as CheckpointConfig,
    EvalConfig as EvalConfig,
    SampledEvalConfig as SampledEvalConfig,
    LoggingConfig as LoggingConfig,
)
from torchrl_llm.trainers.run_results import EvalResult as EvalResult, Shown as Shown
