from torchrl_llm.langmarl.callbacks import (
    Callback as Callback,
    CheckpointCallback as CheckpointCallback,
    EarlyStoppingCallback as EarlyStoppingCallback,
    LoggingCallback as LoggingCallback,
)
from torchrl_llm.langmarl.calls import (
    Budget as Budget,
    BudgetUsedUp as BudgetUsedUp,
    CallLog as CallLog,
)
from torchrl_llm.langmarl.config import (
    BaseConfig as BaseConfig,
    LanguageTaskConfig as LanguageTaskConfig,
    OvercookedConfig as OvercookedConfig,
    PistonballConfig as PistonballConfig,
    load_config as load_config,
)
from torchrl_llm.langmarl.credit_reader import parse_credit_response as parse_credit_response
from torchrl_llm.langmarl.critic import CentralizedCritic as CentralizedCritic
from torchrl_llm.langmarl.environment import (
    BaseAgent as BaseAgent,
    BaseCritic as BaseCritic,
    BaseEnvironment as BaseEnvironment,
    BaseOptimizer as BaseOptimizer,
    BaseReward as BaseReward,
    Trajectory as Trajectory,
    list_envs as list_envs,
    make_env as make_env,
    register_env as register_env,
)
from torchrl_llm.langmarl.formatter import TrajectoryFormatter as TrajectoryFormatter
from torchrl_llm.langmarl.language_policy import (
    LanguagePolicy as LanguagePolicy,
    LanguagePrompts as LanguagePrompts,
)
from torchrl_llm.langmarl.llm_client import LLMClient as LLMClient, TokenTracker as TokenTracker
from torchrl_llm.langmarl.llm_config import (
    LLMConfig as LLMConfig,
    get_llm_config as get_llm_config,
    list_available_models as list_available_models,
)
from torchrl_llm.langmarl.optimizer import PolicyGradientOptimizer as PolicyGradientOptimizer
from torchrl_llm.langmarl.run_logger import RunLogger as RunLogger
from torchrl_llm.langmarl.store import (
    BaseStore as BaseStore,
    LocalStore as LocalStore,
    PolicyCheckpoint as PolicyCheckpoint,
    TrajectoryStore as TrajectoryStore,
    read_policy_file as read_policy_file,
    write_policy_file as write_policy_file,
)
from torchrl_llm.langmarl.text_credit import TextCredit as TextCredit
from torchrl_llm.langmarl.trainer import (
    MonteCarloTrainer as MonteCarloTrainer,
    make_trainer as make_trainer,
    train as train,
)
from torchrl_llm.recipes.flat_settings import parse_overrides as parse_overrides
