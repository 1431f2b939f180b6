# Is GSPO with truncated importance sampling better than GRPO? Two seeds each, a table, a picture.
torchrl-llm train grpo -m loss=grpo,gspo seed=0,1 correction.type=tis train.max_steps=20 \
    train.prompts_per_batch=8 eval.num_prompts=64 hydra.sweep.dir=sweep > /dev/null
torchrl-llm plot sweep --by loss.type > by_loss.txt
torchrl-llm plot sweep --by loss.type,seed -o each.png > each.txt
cat by_loss.txt each.txt

python - <<'PY'
import csv
import glob
from statistics import fmean

from matplotlib.image import imread

for picture in ("curves.png", "each.png"):
    height, width, _ = imread(picture).shape
    assert width > 300 and height > 200 and imread(picture).std() > 0.05, picture

runs = {}
for file in glob.glob("sweep/*/metrics.csv"):
    with open(file, newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert rows[-1]["train/step"] == "20", file
    runs[file] = float([row["eval/accuracy"] for row in rows if row["eval/accuracy"]][-1])
assert len(runs) == 4, runs

table = open("by_loss.txt").read().splitlines()
assert [line.split()[0] for line in table[1:3]] == ["grpo", "gspo"], table
each = open("each.txt").read().splitlines()
assert [line.split()[:2] for line in each[1:5]] == [
    ["grpo", "0"], ["grpo", "1"], ["gspo", "0"], ["gspo", "1"]
], each
PY
