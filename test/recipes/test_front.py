"""GRPO as an object: the same run as the command's, a step at a time."""

import gc
import re
import shlex
import signal
import sys
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from recipes.grpo_helper import SCRIPT, rows, weights
from recipes.script import run_alone
from torchrl._utils import logger

from torchrl_llm import GRPO, SFT
from torchrl_llm.data import table_files
from torchrl_llm.envs import DatasetChatEnv
from torchrl_llm.errors import ConfigError, DataError, RewardError
from torchrl_llm.recipes import builders, front, given, launch
from torchrl_llm.recipes.front import Command
from torchrl_llm.recipes.reward_config import check_function

SMALL = {
    "train": {"max_steps": 3, "prompts_per_batch": 4},
    "eval": {"num_prompts": 8},
    "logging": {"progress": False},
}
REWARDS = "def exactly(response, answer):\n    return response.strip() == answer\n"


@pytest.fixture
def table(tmp_path):
    """A CSV file of sums."""
    path = tmp_path / "qa.csv"
    sums = [(a, b) for a in range(20, 30) for b in range(30, 40)]
    lines = [f"What is {a}+{b}?,{a + b}" for a, b in sums]
    path.write_text("\n".join(["question,answer", *lines]) + "\n")
    return path


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    """A module of the user's."""
    (tmp_path / "front_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    import front_rewards

    yield front_rewards
    sys.modules.pop("front_rewards")


def test_three_lines_are_the_command_bit_for_bit(table, rewards, tmp_path, monkeypatch):
    run = GRPO(
        data=table,
        prompt="question",
        answer="answer",
        reward=rewards.exactly,
        loss="gspo",
        tools=["calculator"],
        folder=tmp_path / "object",
        **SMALL,
    )
    run.train()
    words = shlex.split(repr(run.config))
    assert words[:3] == ["torchrl-llm", "train", "grpo"]
    assert f"data={table}" in words
    assert f"reward={tmp_path}/front_rewards.py:exactly" in words
    assert "env=rows" not in words  # data says it
    run_alone(monkeypatch, SCRIPT, tmp_path / "command", *words[3:])
    assert rows(tmp_path / "object") == rows(tmp_path / "command")
    ours, theirs = (weights(tmp_path / name, 3) for name in ("object", "command"))
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs)


def test_fine_tuning_in_python_is_the_command_bit_for_bit(table, tmp_path, monkeypatch):
    run = SFT(
        data=table,
        prompt="question",
        completion="answer",
        reward="exact",
        train={"max_steps": 3, "batch_size": 8},
        train_model={"lora": {"enabled": True}},
        logging={"progress": False},
        folder=tmp_path / "object",
    )
    losses = [metrics["train/loss_sft"] for metrics in run.steps()]
    assert len(losses) == 3
    assert run.evaluate().accuracy == float(rows(tmp_path / "object")[-1]["eval/accuracy"])
    assert run.chat("What is 20+30?").isdigit()
    run.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000
    words = shlex.split(repr(run.config))
    assert words[:4] == ["torchrl-llm", "train", "sft", f"data={table}"]
    page = launch.PAGES.resolve() / "sft" / "sft.py"
    run_alone(monkeypatch, page, tmp_path / "command", *words[3:])
    assert rows(tmp_path / "object") == rows(tmp_path / "command")
    ours, theirs = (weights(tmp_path / name, 3) for name in ("object", "command"))
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs)

    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(run.save(tmp_path / "saved"))
    assert not any("lora" in name for name, _ in saved.named_parameters())


def test_steps_may_be_left_and_gone_on_with_and_signals_are_ours_only_inside(tmp_path, capsys):
    def right(response, answer):
        return response.strip() == answer

    sums = [{"q": f"What is {n}+{n}?", "sum": str(2 * n)} for n in range(20, 60)]
    handler = signal.getsignal(signal.SIGINT)
    run = GRPO(data=sums, prompt="q", answer="sum", reward=right, folder=tmp_path / "a", **SMALL)
    for metrics in run.steps():
        assert metrics["train/reward"] >= 0.0
        assert signal.getsignal(signal.SIGINT) is handler
        break
    before = run.evaluate().accuracy
    assert run.run.step == 1
    assert [round(m["train/reward"], 3) >= 0 for m in run.steps()] == [True, True]
    assert list(run.steps()) == []
    capsys.readouterr()
    assert run.train() is run  # nothing is left to do
    assert "this run is over, after step 3 of 3; another goes on with more steps" in (
        capsys.readouterr().err
    )
    assert 0.0 <= before <= 1.0

    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(run.save(tmp_path / "saved"))
    run.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000
    whole = GRPO(data=sums, prompt="q", answer="sum", reward=right, folder=tmp_path / "b", **SMALL)
    whole.train()
    assert rows(tmp_path / "a") == rows(tmp_path / "b")


def test_a_run_that_failed_says_so_when_it_is_trained_again(tmp_path, capsys):
    def broken(response, answer):
        raise ValueError("broken")

    sums = [{"q": f"What is {n}+{n}?", "sum": str(2 * n)} for n in range(20, 60)]
    run = GRPO(data=sums, answer="sum", prompt="q", reward=broken, folder=tmp_path, **SMALL)
    with pytest.raises(RewardError, match="broken"):
        run.train()
    capsys.readouterr()
    run.train()
    assert "this run is over, after step 1 of 3; another goes on from" in capsys.readouterr().err


def test_a_run_whose_rewards_are_large_is_a_run(tmp_path):
    def large(response, answer):
        return 3e38 if len(response) % 2 else -3e38

    sums = [{"q": f"What is {n}+{n}?", "sum": str(2 * n)} for n in range(20, 60)]
    run = GRPO(data=sums, answer="sum", prompt="q", reward=large, folder=tmp_path, **SMALL)
    run.train()  # "none of the 3 steps had a valid reward: the weights have not changed"
    for row in rows(tmp_path)[1:]:
        assert abs(float(row["train/reward"])) <= 3.1e38
        assert 0 <= float(row["train/reward_std"]) <= 3.1e38
        assert float(row["train/invalid"]) == 0


def test_each_run_has_a_folder_of_its_own_wherever_the_program_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [GRPO() for _ in range(3)]
    assert len({run.folder for run in runs}) == 3
    (tmp_path / "elsewhere").mkdir()
    run = GRPO(folder="own", **SMALL)
    monkeypatch.chdir(tmp_path / "elsewhere")
    run.train()
    assert (tmp_path / "own" / "metrics.csv").is_file()


def test_hydra_is_as_it_was(tmp_path):
    GRPO(**SMALL)
    assert not GlobalHydra.instance().is_initialized()
    with initialize_config_dir(str(launch.PAGES.resolve() / "grpo" / "config"), version_base="1.3"):
        GRPO(loss="gspo", **SMALL)
        assert compose("grpo").loss.type == "grpo"


def test_settings_are_the_keys_of_the_recipe_and_their_files():
    run = GRPO(
        "folder/of a model",
        env="countdown",
        loss={"type": "dapo", "clip_epsilon": [0.1, 0.3]},
        advantage="leave_one_out",
        reward={"right": "exact", "short": (len, 0.5)},
        train={"max_steps": 7},
        train_model={"lora": {"enabled": True, "r": 4}},
        seed=3,
        **{"env.options": {"num_count": 3}, "optimizer.lr": None},
    )
    made = run._config
    assert (made.model.name, made.seed, made.train.max_steps) == ("folder/of a model", 3, 7)
    assert (made.loss.type, made.loss.clip_epsilon) == ("dapo", (0.1, 0.3))
    assert (made.advantage.type, made.train_model.lora.r) == ("leave_one_out", 4)
    assert made.env.options["num_count"] == 3
    assert made.env.dataset == "countdown"
    assert made.optimizer.lr == 1e-5  # by LoRA's default, as null was given
    assert list(made.reward.components) == ["right", "short"]
    shown = repr(run.config)
    assert "'model.name='\"'\"'folder/of a model'" in shown
    assert "'env.options={num_count:3}'" in shown


WRONG = [
    ({"learning_rate": 1e-4}, r"'learning_rate'; here it is 'optimizer.lr'"),
    ({"loss": "gsop"}, r"did you mean 'gspo'"),
    ({"train": {"max_stps": 3}}, r"did you mean 'train.max_steps'"),
    ({"train": 3}, "'train' is a group of keys"),
    ({"env": {"repeats": 4}}, "its keys are dotted"),
    ({"data": "qa.csv"}, "need a reward"),
    ({"data": "qa.csv", "reward": "exct"}, r"did you mean 'exact'"),
    ({"data": "qa.csv", "reward": lambda completions, **kwargs: [0.0]}, "one of TRL's"),
    ({"data": "qa.csv", "env": "gsm8k", "reward": "exact"}, "data has no effect with env.dataset"),
    ({"prompt": "question"}, "data.prompt has no effect without data.source"),
    ({"env": "rows", "reward": "exact"}, "needs rows: data=FILE"),
    ({"reward": "length"}, r"write it as a part of the reward: reward\.components\.length"),
    ({"folder": __file__}, "folder=.* cannot be the folder of a run: .*py is no folder"),
    ({"tools": [3]}, "env.tools"),
    ({"tools": "calculator"}, "tools is a list"),
    ({"tools": len}, "tools is a list"),
    ({"reward": [len, len]}, "several rewards have names"),
    ({"reward": {"short": (len, 0.5, 2)}}, "'short' is a function and its weight"),
    ({"model": torch.nn.Linear(1, 1)}, "got Linear; save"),
    ({"logging": {"backend": {"csv"}}}, r"logging\.backend=\{'csv'\} is no setting"),
    ({"model": "m", **{"model.name": "n"}}, "model.name is given twice"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_settings_are_refused_when_the_object_is_made(settings, message):
    with pytest.raises(ConfigError, match=message):
        GRPO(**settings)


WRONG_SFT = [
    ({"data": {"source": "qa.csv", "split": "test"}}, "its keys are dotted"),
    ({}, "nothing to learn from"),
    ({"data": "qa.csv", "learning_rate": 1e-4}, r"'learning_rate'; here it is 'optimizer.lr'"),
    ({"data": "qa.csv", "env": "gsm8k"}, "unknown key 'env'"),
    ({"data": "qa.csv", "answer": "a"}, "data.answer has no effect without reward"),
    ({"data": "qa.csv", "reward": "exct"}, r"did you mean 'exact'"),
    ({"data": "qa.csv", "loss": {"function": "dpo"}}, "loss.function"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG_SFT)
def test_wrong_settings_of_fine_tuning_are_refused_when_the_object_is_made(settings, message):
    with pytest.raises(ConfigError, match=message):
        SFT(**settings)


def test_wrong_data_is_told_before_a_model_is_read(table, monkeypatch):
    monkeypatch.setattr("torchrl_llm.modules.load_model", None)
    run = GRPO(data=table, prompt="questoin", reward="exact")
    with pytest.raises(DataError, match=r"data\.prompt=questoin: .*\['answer', 'question'\]"):
        run.train()


@pytest.mark.parametrize("agent", [None, {"type": "tool", "tools": ["calculator"]}])
def test_a_file_is_read_once_for_one_environment_to_train_and_one_to_evaluate_in(
    table, tmp_path, monkeypatch, agent
):
    read, made = [], []
    read_csv, construct = table_files.read_csv, DatasetChatEnv.__init__

    def counted(self, **arguments):
        made.append(len(arguments["dataset"]))
        construct(self, **arguments)

    monkeypatch.setattr(
        table_files, "read_csv", lambda *a, **k: read.append(a) or read_csv(*a, **k)
    )
    monkeypatch.setattr(DatasetChatEnv, "__init__", counted)
    keys = {"eval.num_prompts": 2, "env.repeats": 2, "train.prompts_per_batch": 2}
    keys |= {"inference_model.max_tokens": 2, "model.show_tools": True}
    run = GRPO(data=table, reward="exact", agent=agent, folder=tmp_path / "run", **keys)
    next(run.steps())
    assert len(read) == 1
    assert made == [len(table.read_text().splitlines()) - 1 - 2, 2]


def test_training_rows_that_are_also_held_out_are_said_before_a_model_is_read(monkeypatch):
    said = []
    monkeypatch.setattr(logger, "warning", said.append)
    asked = [0, 1, 2, 3, 1]
    data = [{"question": f"{n}?", "answer": "x"} for n in asked]
    keys = {"reward": "exact", "eval.num_prompts": 2}
    builders.check_problems(GRPO(data=data[:4], **keys)._config)
    assert not said
    builders.check_problems(GRPO(data=data, **keys)._config)
    (told,) = said
    assert told.startswith("data.source: 1 of 2 held-out prompts are trained on too, '1?'")


def test_objects_have_paths_that_this_process_imports():
    from torchrl_llm._registry import import_named

    some, other = (lambda response, answer: 1.0), (lambda response, answer: 0.0)
    paths = [given.path_of(each) for each in (some, other, some)]
    assert paths[0] == paths[2] != paths[1]
    assert [import_named(path) for path in paths] == [some, other, some]
    assert given.path_of(shlex.quote) == "shlex:quote"
    equal = [given.rows_path([{"a": n}]) for n in (1, 1, 2)]
    assert equal[0] == equal[1] != equal[2]
    assert import_named(equal[2]) == [{"a": 2}]
    odd = [object(), (row for row in "ab"), {"train": [{"a": 1}]}]
    assert [import_named(given.rows_path(each)) for each in odd] == odd
    assert "only" in repr(Command("grpo", {"reward.function": paths[0]}))


def test_values_are_typed_as_hydra_reads_them():
    from hydra.core.override_parser.overrides_parser import OverridesParser

    values = {
        "a": None,
        "b": True,
        "c": [0.1, None, "x y"],
        "d": "it's, {so}",
        "e": {"k": [1, "v"]},
        "f": "",
        "g": 1e-05,
        "h": "module:name",
        "i": "/a/b-c.csv",
        "j": ["null", "true", "12", "1e3", ".5", "~", "a.b/c@d"],
        "k": "Größe <x>! `y`\nline\ttwo",
        "l": [r"it\'s", "end\\", r"\\'"],
    }
    parsed = OverridesParser.create().parse_overrides(Command("grpo", values).overrides)
    assert {each.key_or_group: each.value() for each in parsed} == values


def test_numbers_of_numpy_and_torch_are_numbers():
    run = GRPO(train={"max_steps": torch.tensor(3)}, optimizer={"lr": np.float64(1e-5)})
    assert (run._config.train.max_steps, run._config.optimizer.lr) == (3, 1e-5)
    assert run.config.overrides == ["train.max_steps=3", "optimizer.lr=1e-05"]


class Weighted:
    """A reward with a state."""

    def __call__(self, response, answer):
        return 2.0 * (response == answer)


@pytest.mark.parametrize("reward", [Weighted(), partial(Weighted.__call__, Weighted())])
def test_a_reward_may_be_any_object_that_is_called(reward):
    run = GRPO(data="qa.csv", reward=reward)
    assert check_function(run.config["reward.function"]).score("4", "4") == 2.0


AWKWARD = [
    {"reward": {"right": "exact", "short": (len, 0.5)}},
    {"data": ["qa.csv", "a b.csv", "it's, é.csv"], "reward": "exact"},
    {"data": "Größe.csv", "reward": "exact", "prompt": "12"},
    {"data": "qa.csv", "reward": "exact", "env.system_prompt": "null"},
    {"env": "countdown", "env.options": {"num_count": 3}},
]


@pytest.mark.parametrize("settings", AWKWARD)
def test_the_printed_command_is_accepted_and_means_the_same(settings):
    run = GRPO(**settings)
    folder = (launch.PAGES / run.PAGE).parent / "config"
    typed = shlex.split(repr(run.config).partition("\n#")[0])[3:]
    checked = launch.check_arguments(typed, folder, run.FILE)
    composed = launch.compose_files(folder, run.FILE, checked)
    assert run._page.load_config(composed).flat() == run._config.flat()


def test_the_model_is_talked_to_as_it_is_now_and_a_conversation_may_go_on(tmp_path):
    rows = [{"question": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(20, 60)]
    run = GRPO(data=rows, reward="exact", tools=["calculator"], folder=tmp_path / "a", **SMALL)
    asked = "What is 12+15?"
    model = run.run.model
    before = run.chat(asked)
    assert run.chat(asked) == before  # greedy, and nothing of the first conversation in view
    said = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: said.append(kwargs.get("input_ids", args and args[0])),
        with_kwargs=True,
    )
    run.chat("And 1+1?", go_on=True)
    hook.remove()
    read = run.run.tokenizer.decode(said[0][0])
    assert asked in read
    assert f"{before}<|im_end|>" in read
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert run.chat(asked) != before


def test_the_model_as_it_is_now_is_pushed_with_the_command_that_made_it(tmp_path, monkeypatch):
    pushed = []
    monkeypatch.setattr(
        front, "push_to_hub", lambda *args, **kwargs: pushed.append((args, kwargs)) or "https://hub"
    )
    rows = [{"question": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(20, 60)]
    run = GRPO(data=rows, reward="exact", folder=tmp_path / "a", **SMALL)
    for _ in run.steps():
        break
    with pytest.raises(ConfigError, match="OWNER/NAME"):
        run.push_to_hub("adder")
    assert run.push_to_hub("ann/adder") == "https://hub"
    (folder, name), options = pushed[0]
    assert (folder.name, name, options["private"]) == ("step_000001", "ann/adder", True)
    assert (folder / "model.safetensors").is_file()
    assert options["command"].startswith("torchrl-llm train grpo")


@pytest.mark.parametrize("steps", [3, 1])
def test_a_run_that_is_over_or_was_left_gives_its_memory_back(tmp_path, steps):
    rows = [{"question": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(20, 60)]
    run = GRPO(data=rows, reward="exact", folder=tmp_path / "a", **SMALL)
    for number, _ in enumerate(run.steps(), start=1):
        if number == steps:
            break
    if steps == 3:
        run.train()
    model = weakref.ref(run.run.model)
    del run
    gc.collect()
    assert model() is None


def test_a_run_in_python_introduces_itself_once_before_its_model_is_loaded(tmp_path, capsys):
    sums = [{"q": f"What is {n}+{n}?", "sum": str(2 * n)} for n in range(20, 60)]
    settings = SMALL | {"logging": {"progress": True}}
    run = GRPO(data=sums, prompt="q", answer="sum", reward="exact", folder=tmp_path, **settings)
    assert capsys.readouterr().err == ""
    assert run.run is run.run
    first, size = capsys.readouterr().err.splitlines()[:2]
    assert re.fullmatch(
        "grpo: model of the package, data .*, reward exact, loss grpo, advantage group, "
        f"folder {tmp_path}",
        first,
    )
    assert size == "337.8K parameters, cpu, float32, 32 rows to train on, 8 held out"
