# The same run in five loggers: a table, TensorBoard, Weights & Biases without a network, MLflow, Trackio.
WANDB_MODE=offline TRACKIO_DIR=$PWD/trackio \
    torchrl-llm train grpo logging.backend=[csv,tensorboard,wandb,mlflow,trackio] \
    logging.project=journeys train.max_steps=6 eval.num_prompts=32 hydra.run.dir=run

python - <<'PY'
import csv
import glob
import json
import re
import sqlite3

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

query = "select step, value from metrics where key = 'train/reward'"
found = dict(sqlite3.connect("run/mlflow.db").execute(query).fetchall())
assert found == expected, found

query = "select step, metrics from metrics"
found = [(n, json.loads(row)) for n, row in sqlite3.connect("trackio/journeys.db").execute(query)]
found = {step: row["train/reward"] for step, row in found if "train/reward" in row}
assert found == expected, found
PY
