# A plain Python function is a tool: the model learns to call it, and to use what it returns.
cat > clock.py <<'PY'
import re


def calculator(expression: str) -> int:
    """Computes on a clock with 1000 hours.

    Args:
        expression: two numbers with * or - between them, such as 347*28.
    """
    left, sign, right = re.fullmatch(r"(\d+)([*-])(\d+)", expression).groups()
    value = int(left) * int(right) if sign == "*" else int(left) - int(right)
    return value % 1000
PY
python - > clock.csv <<'PY'
import random

from clock import calculator

sums = [f"{a}{sign}{b}" for a in range(100, 1000) for sign in "*-" for b in range(10, 100)]
random.Random(0).shuffle(sums)
print("question,answer")
for sum in sums[:2000]:
    print(f"What is {sum}?,{calculator(sum)}")
PY
torchrl-llm train grpo data=clock.csv reward=last_number env.tools=[clock.py:calculator] \
    env.system_prompt="Use the calculator." inference_model.max_tokens=40 train.max_steps=20 \
    optimizer.lr=4e-4 eval.num_prompts=64 eval.interval=null hydra.run.dir=run
python "$HERE/metric.py" run eval/accuracy first '<=' 0.6
python "$HERE/metric.py" run eval/accuracy last '>=' 0.7

echo "What is 933*95?" | torchrl-llm chat run --trust > answer.txt 2> calls.txt
cat calls.txt answer.txt
grep -q '\[calculator {"expression": "933\*95"}\]' calls.txt
test "$(cat answer.txt)" = 635
