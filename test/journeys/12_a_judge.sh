# A judge scores the answers to rows of one's own; one that fails ends the run with its message.
cat > sums.py <<'PY'
import csv

with open("qa.csv", "w", newline="") as file:
    rows = csv.writer(file)
    rows.writerow(["question", "answer", "topic"])
    for a in range(20, 60):
        rows.writerows([f"What is {a}+{b}?", a + b, "sums"] for b in range(20, 52))
PY
python sums.py
cat > judge.py <<'PY'
from torchrl_llm.rewards import JudgeReward


def teacher(conversations):
    asked = [messages[-1]["content"].split(": ") for messages in conversations]
    assert all(topic == "sums" for topic, _, _ in asked)
    return [f"Score: {10 if right == said else 0}" for _, right, said in asked]


def away(conversations):
    raise ConnectionError("the judge is away")


judge = JudgeReward(teacher, "{topic}: {answer}: {response}")
broken = JudgeReward(away, "{response}")
PY
torchrl-llm train grpo data=qa.csv reward=judge.py:judge train.max_steps=20 eval.num_prompts=64 \
    hydra.run.dir=run
python "$HERE/metric.py" run train/reward last '>' 0.5
torchrl-llm evaluate tasks=[rows] data=qa.csv reward=judge.py:judge eval.num_prompts=64 \
    model.name=run hydra.run.dir=answers
if torchrl-llm train grpo data=qa.csv reward=judge.py:broken train.max_steps=2 \
    eval.num_prompts=8 hydra.run.dir=broken 2> said.txt; then exit 1; fi
cat said.txt
grep -q 'the judge is away' said.txt
