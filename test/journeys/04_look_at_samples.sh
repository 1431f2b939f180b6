# What does the model write while it learns, and why is an answer worth what it is worth?
cat > rewards.py <<'PY'
def near(response, answer):
    return 1.0 - min(abs(int(response) - int(answer)), 100) / 100
PY
torchrl-llm train grpo reward=rewards.py:near logging.samples=3 train.max_steps=9 \
    eval.num_prompts=32 hydra.run.dir=run > results.txt 2> progress.txt

# Every three steps the best and the worst answer to a prompt, on the terminal and in the log.
for file in progress.txt run/run.log; do
    for step in 3 6 9; do
        grep -A 8 "step $step, two answers" $file
    done
    test "$(grep -c 'best answer of a prompt: reward' $file)" -ge 3
    test "$(grep -c 'worst: reward' $file)" -ge 3
    grep -q 'query: .*What is' $file
done
# Conversations before and after, with the results.
grep -A 2 "before training" results.txt
grep -A 2 "after training" results.txt
