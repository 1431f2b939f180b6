# Three lines of Python on a table of one's own, and the same by the command, bit for bit.
python - > qa.csv <<'PY'
import random
random.seed(0)
pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
random.shuffle(pairs)
print("question,answer")
for a, b in pairs[:1280]:
    print(f"What is {a}+{b}?,{a + b}")
PY
cat > rewards.py <<'PY'
def exactly(response, answer):
    return response.strip() == answer
PY
cat > three_lines.py <<'PY'
from rewards import exactly
from torchrl_llm import GRPO

run = GRPO(data="qa.csv", prompt="question", answer="answer", reward=exactly, folder="by_python")
run.train()
open("command.txt", "w").write(str(run.config))
PY
python three_lines.py > results.txt
grep -q "accuracy" results.txt
python "$HERE/metric.py" by_python eval/accuracy first '<=' 0.4
python "$HERE/metric.py" by_python eval/accuracy last '>=' 0.9

bash -c "$(cat command.txt) hydra.run.dir=by_command" > /dev/null
python - <<'PY'
import csv

from safetensors.torch import load_file

def rows(folder):
    with open(f"{folder}/metrics.csv", newline="") as file:
        kept = lambda row: {k: v for k, v in row.items() if not k.startswith("perf/")}
        return [kept(row) for row in csv.DictReader(file)]

assert rows("by_python") == rows("by_command")
a, b = (
    load_file(f"{folder}/checkpoints/step_000100/model.safetensors")
    for folder in ("by_python", "by_command")
)
assert all((a[name] == b[name]).all() for name in a)
PY
