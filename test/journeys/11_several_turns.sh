# A task of several turns: a class with reset and step, trained, evaluated and looked at.
cat > guess.py <<'PY'
from torchrl_llm.envs import ActionError, Observed, Session


class Guess(Session):
    """Guess a number from 1 to 4; a wrong guess is answered with a hint."""

    instructions = "Guess my number, from 1 to 4."
    action_help = "1, 2, 3 or 4"

    def reset(self, options):
        self.number = options["seed"] % 4 + 1
        return "From 1 to 4?"

    def step(self, action):
        if action not in ("1", "2", "3", "4"):
            raise ActionError(f"{action} is not a guess.")
        if int(action) == self.number:
            return Observed("Yes.", 1.0, terminated=True, success=True)
        return "More." if int(action) < self.number else "Less."
PY
settings=(env.max_steps=4 env.system_prompt="Guess." inference_model.max_tokens=4)
torchrl-llm train grpo env=guess.py:Guess "${settings[@]}" train.max_steps=4 optimizer.lr=3e-4 \
    train.prompts_per_batch=8 eval.num_prompts=32 hydra.run.dir=run
python "$HERE/metric.py" run train/reward count '==' 4
python "$HERE/metric.py" run train/invalid last '==' 0
python "$HERE/metric.py" run train/turns last '>' 1
torchrl-llm evaluate tasks=[guess.py:Guess] eval.max_steps=4 options.Guess.system_prompt="Guess." \
    inference_model.max_tokens=4 eval.num_prompts=32 model.name=run hydra.run.dir=answers
torchrl-llm view run > said.txt
torchrl-llm view answers >> said.txt
cat said.txt
grep -q '^page run/view.html, 64 rollouts' said.txt
grep -q '^page answers/view.html, 32 answers' said.txt
