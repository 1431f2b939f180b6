"""What recipes build of a configuration: device, problems, environments and policy.

Each function reads the groups that it needs (``env``, ``model``, ``train``, ...) of
:class:`~torchrl_llm.recipes.shared_keys.TrainedConfig` or ``SampledConfig``, so that a recipe with
other groups besides can share them; see ``sota-implementations/expert-iteration``.
"""

from __future__ import annotations

from torchrl_llm._imports import lazy

__getattr__ = lazy(
    __name__,
    {
        "torchrl_llm.recipes.builders.devices": (
            "seed_everything set_threads spare_threads device_of device_kind present_device "
            "reference_device autocast samples_in_bfloat16"
        ),
        "torchrl_llm.recipes.builders.problems": (
            "task_rows task_settings check_problems make_watch minibatches"
        ),
        "torchrl_llm.recipes.builders.task_envs": (
            "make_envs max_turns make_step_buffer make_train_env make_eval_env with_agent "
            "make_evaluation greedy_evaluation"
        ),
        "torchrl_llm.recipes.builders.policies": (
            "wrapper_options make_tokenizer longest_row make_policy load_policy make_reference "
            "overlong_metrics"
        ),
    },
)
