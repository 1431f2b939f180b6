# Collectors in processes of their own, on Ray; the same settings as in one process.
torchrl-llm train grpo-async train.max_steps=30 train.prompts_per_batch=16 eval.num_prompts=128 \
    optimizer.lr=4e-4 train.max_policy_age=2 hydra.run.dir=run
python "$HERE/metric.py" run train/policy_age_max last '<=' 2
python "$HERE/metric.py" run eval/accuracy last '>=' 0.6
