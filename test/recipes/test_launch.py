"""A recipe's command line: wrong keys are refused at once, in the words of whoever typed them."""

import errno
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from recipes.script import run_alone

from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes import GRPOConfig, launch
from torchrl_llm.recipes.command_keys import KeyTable, check_overrides, refusal
from torchrl_llm.recipes.other_names import OTHER_NAMES

GRPO = launch.PAGES / "grpo" / "config"
HEAVY = ("torch", "transformers", "tensordict", "torchrl", "hydra")


@pytest.fixture(scope="module")
def table():
    return KeyTable.read(GRPO, "grpo")


# What somebody types who comes from elsewhere, or mistypes, and the key that is to be named.
MEANT = {
    "learning_rate": "'optimizer.lr'",
    "lr": "'optimizer.lr'",
    "num_generations": "'env.repeats'",
    "max_steps": "'train.max_steps'",
    "use_vllm": "'inference_model.backend=vllm'",
    "beta": "'train.kl_to_ref_coeff'",
    "loss_type": "'loss'",
    "max_completion_length": "'inference_model.max_tokens'",
    "actor_rollout_ref.rollout.n": "'env.repeats'",
    "actor_rollout_ref.actor.optim.lr": "'optimizer.lr'",
    "data.train_batch_size": "'train.prompts_per_batch'",
    "trainer.total_epochs": "a run is so many steps: train.max_steps",
    "algorithm.adv_estimator": "'advantage'",
    "orchestrator.max_off_policy_steps": "--help",
    "trian.max_steps": "'train.max_steps'",
    "optimizer.lrr": "'optimizer.lr'",
    "eval.batchsize": "'eval.batch_size'",
    "loss.clip": "'loss.clip_epsilon'",
    "loss.gamma": "'advantage.gamma'",
    "load_in_4bit": "train_model.lora.enabled=true",
    "banana": "--help",
    "optimizer.foo": "--help",
    "optimizer.model": "optimizer has name, lr, weight_decay",
    # the same name in another group is another thing
    "reward_model.enable": "--help",
    "algorithm.filter_groups.enabled": "--help",
    "algorithm.kl_ctrl.type": "--help",
    "custom_reward_function.name": "--help",
    "reward.name": "reward has components, function",
    "log.level": "--help",
    "data.gen_batch_size": "data has source",
    "micro_rollout_batch_size": "--help",
    "cache_implementation": "--help",
    "lora.enable": "'train_model.lora.enabled'",
    "trainer.model.name": "'model.name'?",
    "orchestrator.eval.interval": "'eval.interval'?",
    "trainer.device": "'train.device'",
    # a group is no key
    "load_checkpoint": "--help",
    "sync_ref_model": "--help",
    "do_train": "--help",
    # what evaluation does is no key of training
    "eval.top_p": "eval has interval",
    "eval_n_samples_per_prompt": "--help",
    "eval.num_examples": "eval has interval",
    "actor_rollout_ref.rollout.val_kwargs.n": "--help",
    "eval.dataset": "eval has interval",
    "val.batch_size": "'eval.batch_size'?",
}


@pytest.mark.parametrize("key", MEANT)
def test_a_refusal_names_what_was_meant_or_nothing(key, table):
    said = refusal(key, table.keys)
    assert said.startswith(f"unknown key {key!r}; ")
    assert MEANT[key] in said
    assert ("did you mean" in said or "here it is" in said) == MEANT[key].startswith("'")


def test_what_another_recipe_has_is_not_named_where_it_is_not():
    sft = KeyTable.read(launch.PAGES / "sft" / "config", "sft")
    assert "here it is" not in refusal("loss_type", sft.keys)
    assert "here it is 'loss'" in refusal("loss_type", KeyTable.read(GRPO, "grpo").keys)


def test_a_group_that_is_given_a_value_names_each_of_its_keys_once():
    imitate = KeyTable.read(launch.PAGES / "sft" / "config", "imitate")
    with pytest.raises(ConfigError) as refused:
        check_overrides(["loss=grpo"], imitate)
    assert str(refused.value).count("loss.reduction") == 1


def test_what_other_libraries_call_a_key_leads_to_a_key_of_a_recipe_or_a_sentence():
    known = set()
    for folder in ("grpo", "sft"):
        for file in (launch.PAGES / folder / "config").glob("*.yaml"):
            if file.stem != "common":
                known |= set(KeyTable.read(file.parent, file.stem).keys)
    for name, target in OTHER_NAMES.items():
        named = {each.partition("=")[0] for each in target.split(" and ")}
        assert named <= known or " " in target, name


REFUSED = {
    "enable_thinking=false": r"here it is 'model\.template_kwargs=\{enable_thinking: false\}'",
    "chat_template_kwargs.enable_thinking=false": r"here it is 'model\.template_kwargs'",
    "data.apply_chat_template_kwargs.x=1": r"here it is 'model\.template_kwargs'",
    "loss=gsop": r"did you mean 'gspo'\?",
    "loss=DAPO": r"did you mean 'dapo'\?",
    "loss=reinforce++": r"did you mean 'reinforce_plus_plus'\?",
    "env=gsmk8": r"did you mean 'gsm8k'\?.*env=FILE.py:CLASS",
    "advantage=banana": "There are batch, best_worst, constant",
    "loss=grpo,gsop": r"did you mean 'gspo'\?",
    "model=Qwen/Qwen3-0.6B": "'model' is a group of keys, model.name",
    "loss.type=gspo": "choose it with its settings, loss=gspo",
    "loss.tau_pos=2": "has no effect with loss=grpo; it is a key of sapo",
    "ray.num_collectors=2": "a key of grpo-async.py",
    "foo": "'foo': settings are written KEY=VALUE, .*; unknown key 'foo'",
    "train.max_steps": "without dashes or spaces; train.max_steps=VALUE is meant",
    "=5": "KEY=VALUE is meant",
    "--max_steps": "without dashes.*here it is 'train.max_steps'",
    "--optimizer.lr=1": "without dashes.*; optimizer.lr=VALUE is meant",
    "env.tools=[calculator": r"cannot be read.*quoted: \"env\.tools='\.\.\.'\"",
    "logging.backend=csv,wandb": r"'logging\.backend=\[csv,wandb\]'.*needs the flag -m",
}


@pytest.mark.parametrize("argument", REFUSED)
def test_values_of_groups_and_keys_without_effect_are_refused(argument):
    with pytest.raises(ConfigError, match=REFUSED[argument]):
        launch.check_arguments([argument], GRPO, "grpo", siblings={"grpo-async": "grpo-async.py"})


def test_a_run_in_a_file_is_refused_with_its_key(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"hydra\.run\.dir=.*file is no folder"):
            launch.check_arguments([f"hydra.run.dir={path}"], GRPO, "grpo")
    assert launch.check_arguments([f"hydra.run.dir={tmp_path}/a/b"], GRPO, "grpo")


def test_a_loss_of_the_users_own_folder_is_known_by_its_name(tmp_path):
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "mine.yaml").write_text("type: mine:Loss\nstrength: 2\n")
    given = [f"hydra.searchpath=[file://{tmp_path}]", "loss=mine", "loss.strength=3"]
    assert launch.check_arguments(given, GRPO, "grpo") == given
    assert launch.check_arguments(["--config-dir", str(tmp_path), "loss=mine"], GRPO, "grpo")
    with pytest.raises(ConfigError, match="no effect with loss=mine"):
        launch.check_arguments([*given, "loss.clip_epsilon=1"], GRPO, "grpo")
    # what another package brings cannot be listed
    assert launch.check_arguments(["hydra.searchpath=[pkg://other]", "loss=theirs"], GRPO, "grpo")


def test_hydras_own_words_pass_and_names_of_the_user_are_marked_as_new(table):
    own = ["-m", "--cfg", "job", "hydra.run.dir=x", "hydra/job_logging=none", "~logging.project"]
    assert check_overrides(own, table) == own
    sweep = ["--multirun", "loss=grpo,gspo", "--config-dir", "mine"]
    assert launch.check_arguments(sweep, GRPO, "grpo") == sweep
    assert check_overrides(["env.options.size=3"], table) == ["++env.options.size=3"]
    assert check_overrides(["+env.options.size=3"], table) == ["+env.options.size=3"]


def test_a_wrong_key_and_help_are_answered_without_a_heavy_import():
    watch = (
        "import runpy, sys\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        f"finally: print([name for name in {HEAVY} if name in sys.modules])\n"
    )
    pages = sorted(launch.PAGES.glob("*/*.py"))
    pages = [page for page in pages if "launch.begin(" in page.read_text()]
    assert len(pages) >= 8
    page = launch.PAGES / "grpo" / "grpo-sync.py"
    for argument, code in (("optimizer.lrr=1", 1), ("--help", 0)):
        program = f"import sys; sys.argv = [{str(page)!r}, {argument!r}]\n{watch}"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == "[]"
        assert done.returncode == code
        assert "Traceback" not in done.stderr
    for page in pages:  # and none of them imports anything heavy in front of the check
        before = page.read_text().partition("launch.begin(")[0]
        assert not any(f"import {name}" in before for name in HEAVY), page


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], ["train", "grpo", "--help"], ["memory", "--help"]], ids=" ".join
)
def test_the_package_and_the_help_of_its_commands_import_nothing_heavy(arguments):
    program = (
        "import sys, torchrl_llm\n"
        f"arguments = {arguments}\n"
        "if arguments:\n"
        "    from torchrl_llm.cli import main\n"
        "    try: main(arguments)\n"
        "    except SystemExit as ended: assert not ended.code\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_error_of_ours_is_a_paragraph_unless_a_traceback_is_asked_for(monkeypatch, capsys):
    @launch.tells_errors
    def fail():
        raise ConfigError("train.max_steps must be at least 1, got 0")

    monkeypatch.delenv(launch.TRACEBACK_VARIABLE, raising=False)
    with pytest.raises(SystemExit) as ended:
        fail()
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == (
        "",
        "ConfigError: train.max_steps must be at least 1, got 0\n",
    )
    monkeypatch.setenv(launch.TRACEBACK_VARIABLE, "1")
    with pytest.raises(ConfigError):
        fail()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG])
def test_a_disk_that_takes_no_more_is_a_paragraph_and_other_errors_of_files_are_not(
    number, capsys, monkeypatch
):
    @launch.tells_errors
    def fail(number):
        raise OSError(number, os.strerror(number), "run/config.yaml")

    monkeypatch.delenv(launch.TRACEBACK_VARIABLE, raising=False)
    with pytest.raises(SystemExit) as ended:
        fail(number)
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{os.strerror(number)}: 'run/config.yaml'. What is written so far stays" in line
    with pytest.raises(FileNotFoundError):
        fail(errno.ENOENT)


def test_a_folder_on_a_full_disk_is_refused_before_hydra_writes_there(tmp_path, monkeypatch):
    launch.check_folder(tmp_path / "run", "hydra.run.dir")
    assert not list(tmp_path.iterdir())
    # What is opened in the folder is a device on which no space is ever left.
    full = partial(open, "/dev/full", "wb")
    monkeypatch.setattr(launch.tempfile, "TemporaryFile", lambda dir: full())
    with pytest.raises(ConfigError, match=r"nothing can be written there \(No space left on dev"):
        launch.check_folder(tmp_path / "run", "hydra.run.dir")


@pytest.mark.parametrize("code", [None, 0, 3])
def test_a_users_code_that_exits_ends_no_run_in_silence(code, capsys):
    @launch.tells_errors
    def run():
        sys.exit(code)

    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == (code or 1)
    said = capsys.readouterr().err
    assert said.startswith(f"SystemExit: {code} at {__file__}:")
    assert said.endswith(", in run: it ended the program before its end\n")


def test_the_pages_of_the_package_are_those_of_the_repository():
    root = Path(__file__).parents[2]
    assert launch.PAGES.resolve() == root / "sota-implementations"


SECRETS = (
    "logging.experiment_name='https://me:hidden@host/x'",
    "+env.options.api_key=hidden",
    "+env.options.token=hidden",
)


@pytest.mark.parametrize("sweeps", [False, True])
def test_hydra_keeps_no_secret_of_a_command(sweeps, tmp_path, monkeypatch, capfd):
    """The run is refused, for there are no such options, after Hydra has written its files."""
    page = launch.PAGES / "grpo" / "grpo-sync.py"
    monkeypatch.setattr(launch, "TRACEBACK_VARIABLE", "")  # as a user runs it
    more = ["hydra.mode=MULTIRUN", f"hydra.sweep.dir={tmp_path}"] if sweeps else []
    with pytest.raises(SystemExit):
        run_alone(monkeypatch, page, tmp_path, *SECRETS, *more)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    names = {"config.yaml", "overrides.yaml", "hydra.yaml", *(["multirun.yaml"] if sweeps else [])}
    assert names <= {file.name for file in files}
    assert not [file for file in files if "hidden" in file.read_text()]
    kept = next(file for file in files if file.name == "overrides.yaml").read_text()
    assert "https://me:***@host/x" in kept
    said = "".join(capfd.readouterr())
    assert "ConfigError: " in said
    assert "hidden" not in said


def test_an_error_that_nobody_foresaw_does_not_show_the_command_with_its_secrets(
    tmp_path, monkeypatch, capfd
):
    page = launch.PAGES / "grpo" / "grpo-sync.py"
    monkeypatch.setattr(launch, "TRACEBACK_VARIABLE", "")
    monkeypatch.setattr(GRPOConfig, "flat", lambda self: 1 / 0)
    with pytest.raises(SystemExit):
        run_alone(monkeypatch, page, tmp_path, SECRETS[0])
    said = "".join(capfd.readouterr())
    assert "ZeroDivisionError: division by zero" in said
    assert "Traceback (most recent call last)" in (tmp_path / "run.log").read_text()
    assert "hidden" not in said + (tmp_path / "run.log").read_text()
