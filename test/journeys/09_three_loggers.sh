# The same run in three loggers: a table, TensorBoard, and Weights & Biases without a network.
WANDB_MODE=offline torchrl-llm train grpo logging.backend=[csv,tensorboard,wandb] \
    logging.project=journeys train.max_steps=6 eval.num_prompts=32 hydra.run.dir=run

python - <<'PY'
import csv
import glob
import json

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2
from wandb.sdk.internal.datastore import DataStore

with open("run/metrics.csv", newline="") as file:
    rows = [row for row in csv.DictReader(file) if row["train/reward"]]
expected = {int(row["train/step"]): float(row["train/reward"]) for row in rows}
assert len(expected) == 6

(events,) = glob.glob("run/**/events.out.tfevents*", recursive=True)
board = EventAccumulator(events).Reload()
found = {event.step: event.value for event in board.Scalars("train/reward")}
assert found.keys() == expected.keys(), found
assert all(abs(found[step] - expected[step]) < 1e-6 for step in expected), found

(records,) = glob.glob("run/**/run-*.wandb", recursive=True)
store, found, config = DataStore(), [], {}
store.open_for_scan(records)
while (data := store.scan_data()) is not None:
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
    found += [json.loads(items["train/reward"])] if "train/reward" in items else []
    for update in (*record.run.config.update, *record.config.update):
        config[update.key or "/".join(update.nested_key)] = json.loads(update.value_json)
assert found == list(expected.values()), (found, expected)
print("W&B knows", len(config), "keys")
assert config["loss.type"] == "grpo" and config["train.max_steps"] == 6, config
PY
