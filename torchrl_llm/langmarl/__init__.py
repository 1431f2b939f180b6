"""Training in language space: policies are texts, credit and gradients are texts, too.

:func:`train` runs a configuration; the parts can be composed by hand. The names are those of
LangMARL, see the reference page.
"""

from __future__ import annotations

from torchrl_llm._imports import lazy

_LAZY = {
    "torchrl_llm.langmarl.callbacks": (
        "Callback CheckpointCallback EarlyStoppingCallback LoggingCallback"
    ),
    "torchrl_llm.langmarl.calls": "Budget BudgetUsedUp CallLog",
    "torchrl_llm.langmarl.config": (
        "BaseConfig LanguageTaskConfig load_config OvercookedConfig parse_overrides "
        "PistonballConfig"
    ),
    "torchrl_llm.langmarl.credit_reader": "parse_credit_response",
    "torchrl_llm.langmarl.critic": "CentralizedCritic",
    "torchrl_llm.langmarl.environment": (
        "BaseAgent BaseCritic BaseEnvironment BaseOptimizer BaseReward list_envs make_env "
        "register_env Trajectory"
    ),
    "torchrl_llm.langmarl.formatter": "TrajectoryFormatter",
    "torchrl_llm.langmarl.language_policy": "LanguagePolicy LanguagePrompts",
    "torchrl_llm.langmarl.llm_client": "LLMClient TokenTracker",
    "torchrl_llm.langmarl.llm_config": "get_llm_config list_available_models LLMConfig",
    "torchrl_llm.langmarl.optimizer": "PolicyGradientOptimizer",
    "torchrl_llm.langmarl.run_logger": "RunLogger",
    "torchrl_llm.langmarl.store": (
        "BaseStore LocalStore PolicyCheckpoint read_policy_file TrajectoryStore write_policy_file"
    ),
    "torchrl_llm.langmarl.text_credit": "TextCredit",
    "torchrl_llm.langmarl.trainer": "make_trainer MonteCarloTrainer train",
}
__getattr__ = lazy(__name__, _LAZY)
