"""Fail unless the reward of a run rose: python reward_rises.py METRICS.CSV STEPS."""

import csv
import pathlib
import sys

path, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
rows = [row for row in csv.DictReader(path.open()) if row["train/reward"]]
rewards = [float(row["train/reward"]) for row in rows]
first, last = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
sys.stdout.write(f"mean reward: first ten steps {first:.3f}, last ten {last:.3f}\n")
assert len(rewards) == steps, f"{len(rewards)} steps were recorded instead of {steps}"
assert last > first + 0.05, "the reward did not rise"
