# The same run in three loggers: a table, TensorBoard, and Weights & Biases without a network.
WANDB_MODE=offline torchrl-llm train grpo logging.backend=[csv,tensorboard,wandb] \
    logging.project=journeys train.max_steps=6 eval.num_prompts=32 hydra.run.dir=run

python - <<'PY'
import csv
import glob
import json
import re

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

with open("run/metrics.csv", newline="") as file:
    rows = [row for row in csv.DictReader(file) if row["train/reward"]]
expected = {int(row["train/step"]): float(row["train/reward"]) for row in rows}
assert len(expected) == 6

board = EventAccumulator("run/grpo").Reload()
found = {event.step: event.value for event in board.Scalars("train/reward")}
assert found.keys() == expected.keys(), found
assert all(abs(found[step] - expected[step]) < 1e-6 for step in expected), found

# W&B writes blocks of 32 KiB that begin with 7 bytes of their own; behind a name stand the number
# of bytes of its value, and the value.
(file,) = glob.glob("run/wandb/offline-run-*/run-*.wandb")
data = open(file, "rb").read()
data = b"".join(data[start + 7 : start + 32768] for start in range(0, len(data), 32768))


def values(name):
    names = re.finditer(re.escape(name.encode()) + rb"\x82\x01(.)", data, re.DOTALL)
    return [json.loads(data[each.end() : each.end() + each[1][0]]) for each in names]


assert set(values("train/reward")) == set(expected.values()), values("train/reward")
for name, value in {"loss.type": "grpo", "train.max_steps": 6, "optimizer.lr": 0.0004}.items():
    assert values(name)[:1] == [value], (name, values(name))
PY
