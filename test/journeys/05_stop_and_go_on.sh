# Ctrl-C saves after the step and prints the command that goes on; nothing is lost or changed.
settings=(
    train.max_steps=60 train.prompts_per_batch=8 eval.num_prompts=64 optimizer.scheduler=constant
)
torchrl-llm train grpo "${settings[@]}" hydra.run.dir=whole > /dev/null 2>&1
(
    trap - INT  # a background process of a script ignores Ctrl-C otherwise
    exec torchrl-llm train grpo "${settings[@]}" hydra.run.dir=cut
) > said.txt 2>&1 &
pid=$!
while kill -0 "$pid" && ! grep -q "^3," cut/metrics.csv 2> /dev/null; do
    sleep 0.05
done
kill -INT "$pid"
code=0
wait "$pid" || code=$?
tail -n 4 said.txt
test "$code" -eq 130
command=$(grep -A1 "to go on:" said.txt | tail -n 1)
echo "$command"
bash -c "$command" > /dev/null 2>&1
python - <<'PY'
import csv

def rows(folder):
    with open(f"{folder}/metrics.csv", newline="") as file:
        kept = lambda row: {k: v for k, v in row.items() if not k.startswith("perf/")}
        return [kept(row) for row in csv.DictReader(file)]

assert rows("cut") == rows("whole"), "the run that was stopped is another one"
PY
