"""Pushing to a hub: a real client in a process of its own, and a server that shows what arrives."""

import os
import subprocess
import sys

import pytest
import yaml
from trainers.fake_hub import TOKEN, environment, serve

from torchrl_llm.errors import CheckpointError, ConfigError
from torchrl_llm.trainers import CheckpointConfig
from torchrl_llm.trainers.hub import check_repository, model_card, push_to_hub

PUSHED = {
    "config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights" * 100,
    "tokenizer.json": b'{"version": "1.0"}',
    "adapter/adapter_config.json": b"{}",
    "adapter/adapter_model.safetensors": b"adapter",
}
KEPT = {
    "trainer_state/state.safetensors": b"optimizer",
    "trainer_state/state.json": b"{}",
    "metrics.csv": b"train/step\n1\n",
    "notes.md": b"mine",
    ".env": b"KEY=1",
    "adapter/notes.md": b"mine",
    "more/config.json": b"{}",
}


@pytest.fixture
def run(tmp_path):
    """A run with a checkpoint, and what else may lie there."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000003"
    for name, content in (PUSHED | KEPT).items():
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_bytes(content)
    folder = tmp_path / "run"
    (folder / "metrics.csv").write_text("train/step,train/reward\n1,0.5\n")
    config = {"model": {"name": "Qwen/Qwen2.5-0.5B"}, "redis": {"url": "redis://u:hidden@host"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def push(run, *arguments, address, token=TOKEN):
    """``torchrl-llm push`` as somebody types it."""
    return subprocess.run(
        [sys.executable, "-m", "torchrl_llm", "push", str(run), *arguments],
        env={**os.environ, **environment(address, token)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_model_and_a_card_arrive_and_nothing_else(run):
    with serve() as hub:
        done = push(run, "ann/adder", address=hub.address)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{hub.address}/ann/adder\n"
    assert [(made["name"], made["visibility"]) for made in hub.created] == [("adder", "private")]
    (commit,) = hub.commits
    card = commit.pop("README.md").decode()
    assert commit == PUSHED
    facts, text = yaml.safe_load(card.split("---")[1]), card.split("---", 2)[2]
    assert facts["library_name"] == "transformers"
    assert facts["base_model"] == "Qwen/Qwen2.5-0.5B"
    assert "redis://u:***@host" in text
    assert "hidden" not in text
    assert TOKEN not in done.stdout + done.stderr + card


def test_a_revision_is_a_branch_that_is_made_once(run):
    with serve() as hub:
        for _ in range(2):
            done = push(run, "ann/adder", "--revision", "step-3", address=hub.address)
            assert done.returncode == 0, done.stderr
            assert done.stdout == f"{hub.address}/ann/adder/tree/step-3\n"
        assert push(run, "ann/adder", address=hub.address).returncode == 0
    assert hub.committed_to == ["step-3", "step-3", "main"]
    assert hub.branches == {"main", "step-3"}
    assert set(hub.commits[0]) == {*PUSHED, "README.md"}
    failed = push(run, "ann/adder", "--revision", "step-3", address=hub.address)
    assert failed.stderr.endswith("ann/adder --revision step-3\n")


@pytest.mark.parametrize("name", ["", "a b", "-x", "a..b", "a.lock", "a/", "x;y", "a//b", None])
def test_a_revision_that_no_branch_can_have_is_refused(run, name):
    with pytest.raises(ConfigError, match="a revision is the name of a branch"):
        push_to_hub(run, "ann/adder", revision=name)


def test_a_wrong_token_and_a_foreign_owner_are_one_paragraph_that_says_what_to_do(run):
    with serve() as hub:
        wrong = push(run, "ann/adder", address=hub.address, token="hf_wrongwrongwrongwrong")
        foreign = push(run, "bob/adder", "--public", address=hub.address)
    assert (wrong.returncode, wrong.stdout, hub.commits) == (1, "", [])
    assert "the hub does not know the token (401); log in with `hf auth login`" in wrong.stderr
    assert wrong.stderr.endswith("step_000003 ann/adder\n")
    assert "hf_wrong" not in wrong.stderr
    assert "the token may not write to bob/adder (403)" in foreign.stderr
    assert "Traceback" not in wrong.stderr + foreign.stderr


def test_a_hub_that_cannot_be_reached_is_named(run):
    with serve() as hub:
        address = hub.address
    done = push(run, "ann/adder", address=address)
    assert done.returncode == 1
    assert f"{address} cannot be reached (ConnectError" in done.stderr
    assert "torchrl-llm push" in done.stderr
    assert "Traceback" not in done.stderr


def test_offline_nothing_is_tried(run):
    # The tests' own environment forbids the hub.
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        push_to_hub(run, "ann/adder")


@pytest.mark.parametrize("name", ["adder", "ann/", "/adder", "ann/adder/x", "", "a b/c", None, 3])
def test_a_name_without_owner_is_refused_before_a_run_begins(name):
    with pytest.raises(ConfigError, match="OWNER/NAME"):
        check_repository(name)
    if name is not None:
        with pytest.raises(ConfigError, match=r"checkpoint\.push_to_hub: a repository is"):
            CheckpointConfig(push_to_hub=name)


def test_the_card_names_the_command_and_a_folder_is_no_base_model(tmp_path):
    card = model_card({"model": {"name": str(tmp_path)}}, name="ann/adder", command="torchrl-llm x")
    assert "# adder" in card
    assert "torchrl-llm x" in card
    assert "base_model" not in card
    assert "Configuration" not in model_card({}, name="ann/adder")


def test_the_card_of_a_reward_model_says_what_opens_it():
    card = model_card({}, name="ann/scores", is_classifier=True)
    assert "pipeline_tag: text-classification" in card
    assert "AutoModelForSequenceClassification.from_pretrained" in card
