# How good is my model, on what it trained and on rows of mine? And what does it say to me?
torchrl-llm train grpo train.max_steps=40 eval.num_prompts=64 hydra.run.dir=run > /dev/null
torchrl-llm evaluate tasks=[arithmetic] eval.num_prompts=64 hydra.run.dir=before
torchrl-llm evaluate tasks=[arithmetic] eval.num_prompts=64 hydra.run.dir=after \
    model.name=run/checkpoints/step_000040

cat > mine.csv <<'CSV'
question,answer
What is 21+34?,55
What is 40+52?,92
What is 63+15?,78
What is 11+22?,a hundred
CSV
torchrl-llm evaluate data=mine.csv reward=exact hydra.run.dir=mine \
    model.name=run/checkpoints/step_000040
printf 'What is 21+34?\n/reset\nWhat is 40+52?\n' | torchrl-llm chat run > said.txt
cat said.txt

python - <<'PY'
import json

before, after = (
    json.load(open(f"{folder}/metrics.json"))["arithmetic"]["accuracy"]
    for folder in ("before", "after")
)
assert before < 0.4 and after > before + 0.3, (before, after)

# The table can be computed again from the lines, and chat says what the evaluation heard.
answers = [json.loads(line) for line in open("after/answers_arithmetic.jsonl")]
assert sum(each["success"] for each in answers) / len(answers) == after
mine = [json.loads(line) for line in open("mine/answers_rows.jsonl")]
assert [each["answer"] for each in mine] == ["55", "92", "78", "a hundred"]
assert not mine[3]["success"]
heard = [each["messages"][-1]["content"] for each in mine]
assert open("said.txt").read().splitlines() == heard[:2], heard
PY
torchrl-llm view after
torchrl-llm view before after
grep -q '<title>A before and B after</title>' view.html
