from torchrl_llm.recipes.builders.devices import (
    autocast as autocast,
    device_kind as device_kind,
    device_of as device_of,
    present_device as present_device,
    reference_device as reference_device,
    samples_in_bfloat16 as samples_in_bfloat16,
    seed_everything as seed_everything,
    set_threads as set_threads,
    spare_threads as spare_threads,
)
from torchrl_llm.recipes.builders.problems import (
    check_problems as check_problems,
    make_watch as make_watch,
    minibatches as minibatches,
    task_rows as task_rows,
    task_settings as task_settings,
)
from torchrl_llm.recipes.builders.task_envs import (
    greedy_evaluation as greedy_evaluation,
    make_envs as make_envs,
    make_eval_env as make_eval_env,
    make_evaluation as make_evaluation,
    make_step_buffer as make_step_buffer,
    make_train_env as make_train_env,
    max_turns as max_turns,
    num_rows as num_rows,
    with_agent as with_agent,
)
from torchrl_llm.recipes.builders.policies import (
    load_policy as load_policy,
    longest_row as longest_row,
    make_policy as make_policy,
    make_reference as make_reference,
    make_tokenizer as make_tokenizer,
    overlong_metrics as overlong_metrics,
    wrapper_options as wrapper_options,
)
