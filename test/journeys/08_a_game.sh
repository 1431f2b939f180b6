# A model that has never seen a game: it learns the moves by imitation, then what wins by playing.
torchrl-llm train imitate hydra.run.dir=player train.max_steps=20 eval.num_prompts=32
torchrl-llm train grpo env=tic_tac_toe model.name=player/checkpoints/step_000020 \
    env.options.actions=bare \
    env.system_prompt="Play tic-tac-toe." inference_model.max_tokens=4 \
    train.max_steps=4 train.prompts_per_batch=4 optimizer.lr=4e-4 eval.num_prompts=32 \
    hydra.run.dir=run
python "$HERE/metric.py" run train/invalid last '==' 0
python "$HERE/metric.py" run eval/accuracy first '<=' 0.15
python "$HERE/metric.py" run eval/accuracy last '>=' 0.25
