"""Names that users of TorchRL's recipe, TRL, verl, prime-rl and OpenRLHF type, and ours for them.

An unknown key is looked up here before anything is suggested by its spelling. A name is refused,
never accepted as an alias: no two keys mean the same.
"""

from __future__ import annotations

from collections.abc import Mapping

RENAMED: Mapping[str, str] = {
    "mode": "removed: grpo-sync.py and grpo-async.py are the two modes",
    "train.sync": "removed: grpo-sync.py and grpo-async.py are the two modes",
    "train.sync_iter": "removed: grpo-sync.py and grpo-async.py are the two modes",
    "train.buffer_size": "removed: the buffer holds the rows of one step",
    "inference_model.num_replicas": "ray.num_collectors",
    "ray.init_config": "removed: ray.address and ray.num_cpus say it",
    "env.num_envs": "train.prompts_per_batch",
    "env.reasoning": "removed: choose the task with env=...",
    "train.group_size": "env.repeats",
    "train.dialog_turns_per_batch": "train.prompts_per_batch",
    "train.total_dialog_turns": "train.max_steps",
    "train.gradient_accumulation_steps": "train.micro_token_budget",
    "train.entropy_coeff": "loss.entropy_coeff",
    "train.clip_epsilon": "loss.clip_epsilon",
    "train.exp_name": "logging.experiment_name",
    "train.checkpoint_frequency": "checkpoint.interval",
    "train.use_kl_to_ref": "removed: train.kl_to_ref_coeff above 0 says it",
    "train.kl_coef_in_loss": "removed: train.kl_to_ref_coeff or reward.kl_coeff says it",
    "train.empty_replay_buffer": "removed: a synchronous step trains on its own batch only",
    "train.logging_frequency": "removed: every step is a row of metrics.csv",
    "train.learning_rate": "optimizer.lr",
    "train_model.torch_dtype": "train_model.dtype",
    "inference_model.max_new_tokens": "inference_model.max_tokens",
    "logging.checkpoint_dir": "removed: checkpoints are in hydra.run.dir",
    "logging.checkpoint_frequency": "checkpoint.interval",
    "loss.beta": "train.kl_to_ref_coeff",
    "loss.correction": "correction.type",
    "loss.entropy_bonus": "loss.entropy_coeff",
    "loss.epsilon": "loss.clip_epsilon",
    "loss.kl_to_ref_coeff": "train.kl_to_ref_coeff",
    "loss.masking_strategy": "removed: the sampled tokens of every turn are trained",
    "loss.reduction": "loss.aggregation",
    "advantage.group_size": "env.repeats",
    "agent.system_prompt": "env.system_prompt",
    "env.options.accept_cut": "agent.accept_cut",
    "advantage.grpo_size": "env.repeats",
    "advantage.trajectory_return": "removed: the rewards of all turns are added up",
    "advantage.truncated": "filter.truncated",
    "advantage.keep_return_bounds": "filter.return_bounds",
    "advantage.keep_zero_variance": "filter.zero_variance",
    "algorithm": "removed: an algorithm is loss=... with advantage=...",
}
"""Keys of TorchRL's recipe and former ones of this: the new key, or what became of it."""

# A line each: the name, then our key. Two keys are joined by "and"; several lines of one name are
# those of recipes with other keys; "=" shows the value, and any other sentence is said as it is.
_TABLE = """
# models and data
model_name_or_path          model.name
model_path                  model.name
model_name                  model.name
model_id                    model.name
pretrain                    model.name
model.path                  model.name
tokenizer_name_or_path      the tokenizer is that of model.name
chat_template               model.chat_template_name
chat_template_kwargs        model.template_kwargs
apply_chat_template_kwargs  model.template_kwargs
template_kwargs             model.template_kwargs
enable_thinking             model.template_kwargs={enable_thinking: false}
reasoning_effort            model.template_kwargs={reasoning_effort: low}
dtype                       train_model.dtype
torch_dtype                 train_model.dtype
attn_implementation         train_model.attn_implementation
gradient_checkpointing      train_model.gradient_checkpointing
enable_gradient_checkpointing train_model.gradient_checkpointing
use_peft                    train_model.lora.enabled
peft_config                 train_model.lora.enabled
lora_r                      train_model.lora.enabled and train_model.lora.r
lora_rank                   train_model.lora.enabled and train_model.lora.r
rank                        train_model.lora.enabled and train_model.lora.r
lora.rank                   train_model.lora.enabled and train_model.lora.r
lora_alpha                  train_model.lora.enabled and train_model.lora.alpha
lora_dropout                train_model.lora.enabled and train_model.lora.dropout
lora_target_modules         train_model.lora.enabled and train_model.lora.target_modules
target_modules              train_model.lora.enabled and train_model.lora.target_modules
load_in_4bit             training is not quantized here; train_model.lora.enabled=true saves memory
load_in_8bit             training is not quantized here; train_model.lora.enabled=true saves memory
quantization_config      training is not quantized here; train_model.lora.enabled=true saves memory
trust_remote_code           code of a model's folder is not run here
dataset                     data.source
dataset_name                data.source
dataset_path                data.source
train_dataset               data.source
prompt_data                 data.source
train_files                 data.source
data.train_files            data.source
eval_dataset                data.eval_source
val_files                   data.eval_source
data.val_files              data.eval_source
input_key                   data.prompt
prompt_key                  data.prompt
data.prompt_key             data.prompt
label_key                   data.answer
response_key                data.completion
dataset_text_field          data.messages names conversations; data.prompt, data.completion a pair
assistant_only_loss         what the assistant says is learned, with the end of each turn
completion_only_loss        what the assistant says is learned, with the end of each turn
# sampling
num_generations             env.repeats
group_size                  env.repeats
n_samples_per_prompt        env.repeats
num_generations_per_prompt  env.repeats
n_samples                   env.repeats
rollouts_per_example        env.repeats
rollout.n                   env.repeats
num_samples                 env.repeats
max_completion_length       inference_model.max_tokens
max_response_length         inference_model.max_tokens
max_completion_tokens       inference_model.max_tokens
max_new_tokens              inference_model.max_tokens
max_tokens                  inference_model.max_tokens
generate_max_len            inference_model.max_tokens
max_prompt_length           env.max_prompt_length
prompt_max_len              env.max_prompt_length
data.truncation             env.on_overlong
temperature                 inference_model.temperature
top_p                       inference_model.top_p
top_k                       inference_model.top_k
min_p                       inference_model.min_p
repetition_penalty          not here: the trainer would have to repeat it
use_vllm                    inference_model.backend=vllm
vllm_mode                   inference_model.backend=vllm
rollout.name                inference_model.backend
generation.backend          inference_model.backend
vllm_gpu_memory_utilization inference_model.gpu_memory_utilization
gpu_memory_utilization      inference_model.gpu_memory_utilization
vllm_tensor_parallel_size   inference_model.num_devices
tensor_model_parallel_size  inference_model.num_devices
tensor_parallel_size        inference_model.num_devices
vllm_max_model_length       inference_model.max_model_len
max_model_len               inference_model.max_model_len
enforce_eager               inference_model.enforce_eager
vllm_enable_sleep_mode      inference_model.sleep
vllm_enable_sleep           inference_model.sleep
enable_sleep_mode           inference_model.sleep
free_cache_engine           inference_model.sleep
vllm_sync_backend           weight_sync.type
sync_backend                weight_sync.type
vllm_server_base_url        a sampler behind a URL is for programs: docs, howto/use_a_server
vllm_importance_sampling_correction correction.type=tis
vllm_importance_sampling_mode correction.type and correction.level
vllm_importance_sampling_cap correction.bounds
vllm_importance_sampling_clip_max correction.bounds
off_policy_mask_threshold   correction.sequence_bounds
rollout_is                  correction.type
rollout_is_threshold        correction.bounds
rollout_rs                  correction.sequence_bounds
# optimizer
learning_rate               optimizer.lr
lr                          optimizer.lr
actor_learning_rate         optimizer.lr
optim.lr                    optimizer.lr
max_grad_norm               optimizer.clip_grad_norm
grad_clip                   optimizer.clip_grad_norm
gradient_clipping           optimizer.clip_grad_norm
max_norm                    optimizer.clip_grad_norm
lr_scheduler_type           optimizer.scheduler
lr_scheduler                optimizer.scheduler
warmup                      optimizer.warmup_steps
warmup_ratio                optimizer.warmup_steps
warmup_steps                optimizer.warmup_steps
lr_warmup_steps             optimizer.warmup_steps
lr_warmup_steps_ratio       optimizer.warmup_steps
weight_decay                optimizer.weight_decay
adam_beta1                  optimizer.betas
adam_beta2                  optimizer.betas
adam_epsilon                optimizer.eps
optim                       optimizer.name
# the loop
num_iterations              train.epochs
ppo_epochs                  train.epochs
max_epochs                  train.epochs
num_train_epochs            a run is so many steps: train.max_steps; of fine-tuning train.max_epochs
num_episodes                a run is so many steps: train.max_steps; of fine-tuning train.max_epochs
total_epochs                a run is so many steps: train.max_steps; of fine-tuning train.max_epochs
max_steps                   train.max_steps
max_num_steps               train.max_steps
total_training_steps        train.max_steps
num_steps                   train.max_steps
batch_size                  train.prompts_per_batch
train_batch_size            train.prompts_per_batch
rollout_batch_size          train.prompts_per_batch
num_prompts_per_step        train.prompts_per_batch
generation_batch_size       train.prompts_per_batch
per_device_train_batch_size train.micro_token_budget
per_device_eval_batch_size  eval.batch_size
gradient_accumulation_steps train.micro_token_budget
micro_batch_size            train.micro_token_budget
micro_train_batch_size      train.micro_token_budget
ppo_micro_batch_size        train.micro_token_budget
ppo_micro_batch_size_per_gpu train.micro_token_budget
ppo_max_token_len_per_gpu   train.micro_token_budget
max_tokens_per_gpu          train.micro_token_budget
ppo_mini_batch_size         train.optim_batch_size
steps_per_generation        train.optim_batch_size
mini_batch_size             train.optim_batch_size
max_length                  train.max_seq_len
max_seq_length              train.max_seq_len
sequence_len                train.max_seq_len
padding_free                train.packing
use_remove_padding          train.packing
packing_samples             train.packing
bf16                        train.mixed_precision
fp16                        train.mixed_precision
use_cpu                     train.device=cpu
use_liger_kernel            the head in chunks is always on: train_model.logprob_chunk_size
use_liger_loss              the head in chunks is always on: train_model.logprob_chunk_size
logprob_chunk_size          train_model.logprob_chunk_size
fused_lm_head_token_chunk_size train_model.logprob_chunk_size
max_staleness               train.max_policy_age
max_off_policy_steps        train.max_policy_age
max_async_level             train.max_policy_age
max_head_offpolicyness      train.max_policy_age
weight_sync_steps           train.weight_update_frequency
deepspeed                   one process trains; the samplers may be many: grpo-async.py
fsdp                        one process trains; the samplers may be many: grpo-async.py
random_seed                 seed
data_seed                   seed
# loss and advantage
loss_type                   loss
policy_loss.loss_mode       loss
loss.type                   loss
importance_sampling_level   loss=gspo
loss_agg_mode               loss.aggregation
epsilon                     loss.clip_epsilon
epsilon_high                loss.clip_epsilon
cliprange                   loss.clip_epsilon
clip_ratio                  loss.clip_epsilon
clip_ratio_low              loss.clip_epsilon
clip_ratio_high             loss.clip_epsilon
eps_clip                    loss.clip_epsilon
eps_clip_low_high           loss.clip_epsilon
clip_eps                    loss.clip_epsilon
clip_ratio_c                loss.ratio_cap
delta                       loss.ratio_cap
entropy_coef                loss.entropy_coeff
entropy_coeff               loss.entropy_coeff
entropy_loss_coef           loss.entropy_coeff
beta                        train.kl_to_ref_coeff
kl_coef                     train.kl_to_ref_coeff
kl_coeff                    train.kl_to_ref_coeff
init_kl_coef                train.kl_to_ref_coeff
kl_loss_coef                train.kl_to_ref_coeff
use_kl_loss                 train.kl_to_ref_coeff
kl_loss_type                loss.kl_estimator
kl_estimator                loss.kl_estimator
ref_model_name              ref_model.name
ref_model.path              ref_model.name
scale_rewards               advantage.normalize
norm_adv_by_std_in_grpo     advantage.normalize
adv_estimator               advantage
advantage_estimator         advantage
gamma                       advantage.gamma
lambd                       advantage.lmbda
lam                         advantage.lmbda
mask_truncated_completions  filter.truncated=mask
overlong_filtering          filter.truncated=mask
overlong_buffer.len         reward.overlong_cache
filter_groups               filter.zero_variance
dynamic_filtering           filter.zero_variance=resample
use_dynamic_sampling        filter.zero_variance=resample
filter_zero_advantages      filter.zero_variance=drop
# rewards, tools, environments
reward_funcs                reward.function
reward_func                 reward.function
reward_fn                   reward.function
reward_function             reward.function
custom_reward_function.path reward.function
reward_model_path           a reward model is for programs: docs, howto/use_a_reward_model
reward_weights              reward.components
use_kl_in_reward            reward.kl_coeff
kl_ctrl.kl_coef             reward.kl_coeff
environment_factory         env.dataset
env.name                    env.dataset
task                        env.dataset
max_tool_calling_iterations env.max_tool_turns
tools                       env.tools
max_turns                   env.max_steps
max_assistant_turns         env.max_steps
system_prompt               env.system_prompt
# logging, evaluation, checkpoints
output_dir                  hydra.run.dir names the folder of a run
default_local_dir           hydra.run.dir names the folder of a run
save_path                   hydra.run.dir names the folder of a run
run_name                    logging.experiment_name
experiment_name             logging.experiment_name
exp_name                    logging.experiment_name
project_name                logging.project
wandb_project               logging.project
wandb                       logging.backend=[wandb]
report_to                   logging.backend
use_wandb                   logging.backend=[wandb]
logger                      logging.backend
trainer.logger              logging.backend
logging_steps               every step is a row of metrics.csv
log_completions             logging.samples
num_completions_to_print    logging.samples
eval_steps                  eval.interval
eval.steps                  eval.interval
eval_strategy               eval.interval
test_freq                   eval.interval
val_before_train            eval.before_train
save_steps                  checkpoint.interval
save_freq                   checkpoint.interval
save_strategy               checkpoint.interval
save_total_limit            checkpoint.keep_last
max_actor_ckpt_to_keep      checkpoint.keep_last
resume_from_checkpoint      checkpoint.resume
resume_mode                 checkpoint.resume
resume                      checkpoint.resume
push_to_hub                 checkpoint.push_to_hub
hub_model_id                checkpoint.push_to_hub
# clusters
n_gpus_per_node             ray.gpus_per_collector
nnodes                      ray.address and ray.num_collectors
num_gpus                    inference_model.num_devices
num_workers                 ray.num_collectors
"""


def _parse(table: str) -> dict[str, str]:
    lines = (line.split(maxsplit=1) for line in table.splitlines())
    return {line[0]: line[1] for line in lines if line and line[0] != "#"}


OTHER_NAMES: Mapping[str, str] = _parse(_TABLE)
"""Name of another library's, with as many of its groups as it takes to be told apart, to ours."""
