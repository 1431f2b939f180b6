# A model that learns a game by imitation, then by playing it.
torchrl-llm train imitate output=player train.max_steps=60 eval.num_prompts=64
torchrl-llm train grpo env=tic_tac_toe model.name=player model.show_tools=false \
    env.options.actions=bare env.system_prompt="Play tic-tac-toe." inference_model.max_tokens=8 \
    train.max_steps=6 train.prompts_per_batch=8 eval.num_prompts=64 optimizer.lr=1e-4 hydra.run.dir=run
python "$HERE/metric.py" run train/reward count '==' 6
python "$HERE/metric.py" run train/invalid last '==' 0
