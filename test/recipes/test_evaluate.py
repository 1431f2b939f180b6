"""The evaluation script: real files, figures that can be counted again, and settings that fail."""

import gzip
import importlib
import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from recipes.grpo_helper import run_script
from recipes.script import run_alone

import torchrl_llm
from torchrl_llm.data.row_files import load_rows
from torchrl_llm.errors import ConfigError, DataError, MissingExtraError, OverlongError, RewardError
from torchrl_llm.modules import FakeWrapper

SCRIPT = Path(__file__).parents[2] / "sota-implementations" / "evaluate" / "evaluate.py"
EMBEDDED = Path(torchrl_llm.__file__).parent / "assets" / "embedded"
IFEVAL = Path(__file__).parents[3] / "shared" / "data" / "ifeval" / "input_data.jsonl"


@pytest.fixture
def run(monkeypatch):
    def main(folder, *overrides):
        run_alone(monkeypatch, SCRIPT, folder, *overrides)
        return json.loads((folder / "metrics.json").read_text())

    return main


@pytest.fixture
def recipe(monkeypatch):
    """The module beside the script."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("evaluate_utils")


def config_of(values):
    return importlib.import_module("evaluate_config").load_config(values)


def answers(folder, task):
    return [json.loads(line) for line in (folder / f"answers_{task}.jsonl").open()]


# The whole script


def test_the_embedded_model_has_the_accuracy_that_training_reports(tmp_path, run, monkeypatch):
    result = run(tmp_path / "a", "tasks=[arithmetic]", "eval.num_prompts=50")["arithmetic"]
    table = run_script(
        monkeypatch, tmp_path / "b", "train.max_steps=1", "eval.num_prompts=50", "optimizer.lr=0"
    )
    assert result["accuracy"] == pytest.approx(float(table[0]["eval/accuracy"]))
    assert result["response_length"] == pytest.approx(float(table[0]["eval/response_length"]))
    assert result["num_prompts"] == 50
    assert 0.2 < result["accuracy"] < 1.0
    records = answers(tmp_path / "a", "arithmetic")
    assert sum(record["success"] for record in records) == round(50 * result["accuracy"])
    for record in records:  # what the file says can be counted again
        numbers = re.findall(r"-?\d+", record["messages"][-1]["content"])
        assert record["success"] == (numbers[-1:] == [record["answer"]])


def test_a_text_ends_answers_of_a_model_that_does_not_end_its_turns(tmp_path, run):
    base = shutil.copytree(EMBEDDED, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    asked = ["tasks=[arithmetic]", f"model.name={base}", "model.chat_template_name=falcon"]
    asked += ["inference_model.max_tokens=8", "eval.num_prompts=16"]
    run(tmp_path / "a", *asked)
    run(tmp_path / "b", *asked, "inference_model.stop=['1']")
    shortened = 0
    whole, stopped = (answers(tmp_path / name, "arithmetic") for name in "ab")
    for long, short in zip(whole, stopped, strict=True):
        text, mark, rest = long["messages"][-1]["content"].partition("1")
        assert short["messages"][-1]["content"] == text + mark
        assert not (mark and short["cut"])
        shortened += bool(rest)
    assert shortened > 0


def test_all_three_files_are_scored_in_one_run(tmp_path, run, gsm8k_dir, humaneval_file, capfd):
    if not IFEVAL.exists():
        pytest.skip(f"no IFEval file {IFEVAL}")
    results = run(
        tmp_path,
        f"data_files.gsm8k={gsm8k_dir / 'test.jsonl'}",
        f"data_files.ifeval={IFEVAL}",
        f"data_files.humaneval={humaneval_file}",
        "inference_model.max_tokens=4",
        "eval.num_prompts=6",
        "eval.batch_size=4",
        "eval.on_overlong=truncate",
    )
    assert list(results) == ["gsm8k", "ifeval", "humaneval"]
    for task, result in results.items():
        records = answers(tmp_path, task)
        assert len(records) == result["num_prompts"] == 6
        assert len({record["query"] for record in records}) == 6
        assert result["invalid"] == 0.0
        assert all(record["length"] <= 4 for record in records)
    assert {"inst_level_loose_acc", "prompt_level_strict_acc"} <= set(results["ifeval"])
    assert capfd.readouterr().out.split()[:3] == ["gsm8k", "ifeval", "humaneval"]


def test_samples_of_a_prompt_give_pass_at_k(tmp_path, run, recipe):
    result = run(
        tmp_path,
        "tasks=[arithmetic]",
        "eval.num_prompts=12",
        "eval.repeats=4",
        "eval.batch_size=10",
        "inference_model.temperature=1.0",
        "inference_model.max_tokens=6",
    )["arithmetic"]
    records = answers(tmp_path, "arithmetic")
    assert [record["prompt"] for record in records] == [n for n in range(12) for _ in range(4)]
    right = torch.tensor([record["success"] for record in records]).view(12, 4).float()
    assert result["accuracy"] == pytest.approx(right.mean().item())
    assert result["pass@4"] == pytest.approx(right.any(1).float().mean().item())
    assert recipe.figures(records) == pytest.approx(result)


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_answers_as_the_model_does_with_a_tool_and_without(tmp_path, run):
    pytest.importorskip("vllm")
    tasks = ["arithmetic", "calculator"]
    settings = [
        f"tasks=[{','.join(tasks)}]",
        "eval.num_prompts=24",
        "inference_model.max_tokens=40",
    ]
    model = run(tmp_path / "a", *settings)
    engine = ["inference_model.backend=vllm", "inference_model.max_model_len=256"]
    results = run(tmp_path / "b", *settings, *engine)
    for task in tasks:
        ours, theirs = answers(tmp_path / "a", task), answers(tmp_path / "b", task)
        assert [r["query"] for r in theirs] == [r["query"] for r in ours]
        # Where two tokens are all but equally probable, one of two kernels may choose the other.
        assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 1
        assert results[task]["accuracy"] == pytest.approx(model[task]["accuracy"], abs=1.01 / 24)
    turns = [record["messages"] for record in answers(tmp_path / "b", "calculator")]
    assert sum(any(m["role"] == "tool" for m in messages) for messages in turns) > 6


# A model that knows the answers


def knowing(recipe, tokenizer, task, rows, reply, path, **settings):
    """The figures of a model that answers by ``reply(row)``."""
    values = {"tasks": [task], "data_files": {task: str(path)}, "eval": {"batch_size": 8}}
    config = config_of({**values, **settings})
    column = {"gsm8k": "question", "humaneval": "prompt"}[task]

    def answer(prompt):
        # The longest problem in the prompt, for one may begin as another.
        found = [row for row in rows if row[column].strip() in prompt]
        return reply(max(found, key=lambda row: len(row[column])))

    policy = FakeWrapper(answer, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4096})
    folder = Path(path).parent
    return recipe.figures(recipe.answer_task(config, task, policy, folder / "answers.jsonl"))


def test_right_and_wrong_answers_to_real_problems_are_told_apart(
    recipe, tokenizer, tmp_path, gsm8k_dir
):
    rows = load_rows(gsm8k_dir / "test.jsonl")[:20]
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))

    def reply(row):
        gold = row["answer"].rpartition("####")[2].strip()
        return f"<answer>{gold if rows.index(row) % 4 else '-1'}</answer>"

    result = knowing(recipe, tokenizer, "gsm8k", rows, reply, path)
    assert result["accuracy"] == pytest.approx(15 / 20)
    assert result["num_prompts"] == 20


@pytest.mark.sandbox
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap on this machine")
def test_canonical_solutions_of_real_problems_are_right(
    recipe, tokenizer, tmp_path, humaneval_file
):
    rows = load_rows(humaneval_file)[:16]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    canonical = partial(knowing, recipe, tokenizer, "humaneval", rows)
    assert canonical(lambda row: row["canonical_solution"], path)["accuracy"] == 1.0
    assert canonical(lambda row: "    pass\n", path)["accuracy"] == 0.0


# Figures


def record(prompt, success, valid=True, reward=None, **more):
    reward = float(success) if reward is None else reward
    facts = {"prompt": prompt, "success": success, "valid": valid, "cut": False, "length": 3}
    facts["text"] = f"#### {int(success)}"
    return {**facts, "reward": reward if valid else None, **more}


def test_an_invalid_answer_is_not_right_and_no_zero_in_the_reward(recipe):
    result = recipe.figures([record(0, True), record(1, False, valid=False)])
    assert (result["accuracy"], result["reward"], result["invalid"]) == (0.5, 1.0, 0.5)
    nothing = recipe.figures([record(0, False, valid=False)])
    assert nothing["accuracy"] == 0.0
    assert nothing["reward"] != nothing["reward"]


def test_a_task_without_any_valid_reward_does_not_end_like_one_that_was_scored(
    tmp_path, run, monkeypatch
):
    (tmp_path / "broken_task.py").write_text(
        "from torchrl_llm.envs.datasets import ArithmeticEnv\n"
        "def fail(*_):\n"
        "    raise KeyError('answr')\n"
        "class Broken(ArithmeticEnv):\n"
        "    def make_reward(self):\n"
        "        reward = super().make_reward()\n"
        "        reward.score = fail\n"
        "        return reward\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    expected = r"broken_task:Broken: none of the 3 answers.*KeyError: .*answr"
    with pytest.raises(RewardError, match=expected):
        run(tmp_path, "tasks=[arithmetic,'broken_task:Broken']", "eval.num_prompts=3")
    results = json.loads((tmp_path / "metrics.json").read_text())
    assert [results[task]["invalid"] for task in results] == [0.0, 1.0]


def test_instruction_level_accuracy_counts_instructions_and_not_prompts(recipe):
    scores = ({"prompt": [True], "inst": [True]}, {"prompt": [False], "inst": [True, False, False]})
    rows = [record(n, False, scores=each) for n, each in enumerate(scores)]
    result = recipe.figures(rows)
    assert (result["prompt"], result["inst"]) == (0.5, 0.5)


def test_the_folder_of_a_run_is_its_newest_checkpoint(tmp_path, recipe):
    for step in (5, 10):
        checkpoint = tmp_path / "run" / "checkpoints" / f"step_{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text("{}")
    config = config_of({"model": {"name": str(tmp_path / "run")}})
    assert config.model.name == str(checkpoint)
    with pytest.raises(ConfigError, match="holds no model"):
        config_of({"model": {"name": str(tmp_path)}})


def test_the_table_names_every_figure_and_its_interval(recipe):
    result = recipe.figures([record(0, True)])
    lines = [line.split(maxsplit=1) for line in recipe.table({"gsm8k": result}).splitlines()]
    # Wilson of 1 of 1: 1 / (1 + 3.8415)
    assert lines[:2] == [["gsm8k"], ["accuracy", "1.0000 (0.2065 to 1.0000)"]]
    assert lines[2] == ["reward", "1.0000"]  # of one prompt no spread is known
    assert "truncated" in dict(map(tuple, lines[1:]))
    assert not any("_low" in name or "_high" in name for name, *_ in lines)


# Confidence intervals


def ends(result, name):
    return result[f"{name}_low"], result[f"{name}_high"]


def test_an_accuracy_has_wilsons_interval_and_a_failed_reward_counts_as_not_right(recipe):
    rows = [record(n, n < 9) for n in range(9)] + [record(9, True, valid=False)]
    result = recipe.figures(rows)
    # 9 of 10, worked by hand in test_intervals.py
    assert ends(result, "accuracy") == pytest.approx((0.59585, 0.98213), abs=1e-4)
    # All nine valid rewards are equal: nothing is known of their spread.
    assert ends(result, "reward") == pytest.approx((float("nan"),) * 2, nan_ok=True)


def test_samples_of_a_prompt_are_drawn_together(recipe):
    # Half of the prompts are always right: 200 answers say no more than 50 prompts do.
    rows = [record(n, n % 2 == 0) for n in range(50) for _ in range(4)]
    result = recipe.figures(rows)
    low, high = ends(result, "accuracy")
    assert high - low == pytest.approx(2 * 1.96 * (0.25 / 50) ** 0.5, rel=0.1)
    assert ends(result, "pass@4") == ends(result, "reward") == (low, high)


def test_a_rate_without_spread_still_has_a_width(recipe):
    for right, expected in [(True, (0.72246, 1.0)), (False, (0.0, 0.27754))]:
        result = recipe.figures([record(n, right) for n in range(10) for _ in range(2)])
        for name in ("accuracy", "pass@2"):
            assert ends(result, name) == pytest.approx(expected, abs=1e-5)


def test_the_instructions_of_a_prompt_are_drawn_together(recipe):
    scores = [{"prompt": [n % 2 == 0], "inst": [n % 2 == 0] * 3} for n in range(40)]
    result = recipe.figures([record(n, False, scores=each) for n, each in enumerate(scores)])
    low, high = ends(result, "inst")
    assert high - low == pytest.approx(2 * 1.96 * (0.25 / 40) ** 0.5, rel=0.1)
    # (20 + 1.9207 -+ 1.96 sqrt(10 + 0.9604)) / 43.8415
    assert ends(result, "prompt") == pytest.approx((0.35200, 0.64800), abs=1e-4)


def test_without_files_the_hub_is_asked_for_the_split_that_it_has(recipe, monkeypatch):
    hub = {
        "openai/gsm8k": {"train": [], "test": [{"question": "?", "answer": "#### 1"}]},
        "google/IFEval": {
            "train": [
                {
                    "key": 1,
                    "prompt": "Hi",
                    "instruction_id_list": ["punctuation:no_comma"],
                    "kwargs": [{}],
                }
            ]
        },
        "openai/openai_humaneval": {
            "test": [{"prompt": "def f():\n", "entry_point": "f", "test": "assert f()"}]
        },
    }
    fake = SimpleNamespace(load_dataset=lambda source, name: hub[source])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    config = config_of({})
    for task in config.tasks:
        assert recipe.make_env(config, task, None).primer.num_rows == 1


def test_a_format_of_answers_and_a_prompt_of_the_users_own_are_used(recipe, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "9 * 2?", "answer": "#### 18"}))
    options = {"answer_format": "strict-match", "system_prompt": "Q: 1?\nA: #### 1"}
    values = {"options": {"gsm8k": options}, "data_files": {"gsm8k": str(path)}}
    values["eval"] = {"num_prompts": 1}
    env = recipe.make_env(config_of(values), "gsm8k", None)
    td = env.reset()
    assert td["history"].prompt.content == [[options["system_prompt"], "9 * 2?"]]
    said = [{"role": "assistant", "content": "#### 18, not 2"}]
    td["history"].full = type(td["history"].prompt).of([td["history"].prompt.chats[0] + said])
    assert env.step(td)["next", "success"].item()


# Bad input


def test_missing_data_models_and_packages_are_named(tmp_path, run, monkeypatch):
    with pytest.raises(DataError, match=r"cannot read the data file .*missing\.jsonl"):
        run(tmp_path / "a", "tasks=[gsm8k]", "data_files.gsm8k=missing.jsonl")
    with pytest.raises(ConfigError, match="there is no tokenizer 'nobody/nothing'"):
        run(tmp_path / "b", "model.name=nobody/nothing")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtraError, match="vllm"):
        run(tmp_path / "c", "inference_model.backend=vllm", "tasks=[arithmetic]")


@pytest.mark.full
def test_two_evaluations_do_not_write_into_one_folder(tmp_path):
    arguments = ["tasks=[arithmetic]", f"hydra.run.dir={tmp_path}"]
    hold = "import sys; from pathlib import Path\n"
    hold += "from torchrl_llm.trainers.checkpoint import lock_folder\n"
    hold += "lock = lock_folder(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    process = partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process([sys.executable, "-c", hold, str(tmp_path)], cwd=SCRIPT.parents[2]) as other:
        assert other.stdout.readline() == "held\n"
        second = subprocess.run(
            [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
        )
        other.stdin.close()
    assert second.returncode == 1
    assert "CheckpointError: another run is at work in" in second.stderr
    assert not list(tmp_path.glob("answers*"))


def test_a_prompt_that_is_too_long_is_an_error_unless_it_is_dropped(tmp_path, run):
    path = tmp_path / "rows.jsonl"
    rows = [{"question": "why? " * 1000, "answer": "#### 1"}, {"question": "?", "answer": "#### 2"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    settings = ["tasks=[gsm8k]", f"data_files.gsm8k={path}", "inference_model.max_tokens=4"]
    with pytest.raises(OverlongError, match="on_overlong"):
        run(tmp_path / "a", *settings)
    result = run(tmp_path / "b", *settings, "eval.on_overlong=drop")["gsm8k"]
    assert result["num_prompts"] == 2
    assert answers(tmp_path / "b", "gsm8k")[0]["length"] == 0


def test_more_prompts_than_there_are_ask_each_of_them_once(tmp_path, run, warned):
    path = tmp_path / "rows.jsonl"
    rows = [{"query": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    result = run(
        tmp_path / "run",
        "tasks=[arithmetic]",
        f"data_files.arithmetic={path}",
        "eval.num_prompts=10",
        "inference_model.max_tokens=4",
    )["arithmetic"]
    assert result["num_prompts"] == len(answers(tmp_path / "run", "arithmetic")) == 3
    assert "num_prompts=10 is more than the data has: its 3 prompts" in warned[0]


def test_settings_of_a_task_of_a_file_are_named_by_its_class(recipe, tmp_path):
    (tmp_path / "tasks.py").write_text(
        "from torchrl_llm.envs import GSM8KEnv\nclass Mine(GSM8KEnv):\n    pass\n"
    )
    task = f"{tmp_path}/tasks.py:Mine"
    config = config_of({"tasks": [task], "options": {"Mine": {"system_prompt": "Go."}}})
    assert config.options[task] == {"system_prompt": "Go."}
    assert "Mine" not in config.options
    with pytest.raises(ConfigError, match="Other"):
        config_of({"tasks": [task], "options": {"Other": {"system_prompt": "Go."}}})
