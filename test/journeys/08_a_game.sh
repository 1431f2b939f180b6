# A model that has never seen a game: it learns the moves by imitation, then goes on by playing.
torchrl-llm train imitate train.max_steps=100 eval.num_prompts=64 hydra.run.dir=player
python "$HERE/metric.py" player eval/accuracy first '==' 0
python "$HERE/metric.py" player eval/accuracy last '>=' 0.3
torchrl-llm train grpo env=tic_tac_toe model.name=player/checkpoints/step_000100 \
    env.options.actions=bare env.system_prompt="Play tic-tac-toe." inference_model.max_tokens=4 \
    train.max_steps=4 train.prompts_per_batch=8 optimizer.lr=1e-4 eval.num_prompts=64 \
    hydra.run.dir=run
python "$HERE/metric.py" run train/reward count '==' 4
python "$HERE/metric.py" run train/invalid last '==' 0
python "$HERE/metric.py" run train/turns last '>=' 3
python "$HERE/metric.py" run eval/accuracy first '>=' 0.3
