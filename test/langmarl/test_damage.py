"""Files of a run that were cut, altered or deleted: refused by name, and no budget grows by it."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest
from langmarl.world import scripted, written

from torchrl_llm.errors import CheckpointError, DamagedCheckpointError
from torchrl_llm.langmarl import load_config, make_trainer
from torchrl_llm.langmarl.calls import CallLog, spent_in
from torchrl_llm.langmarl.store import LocalStore, PolicyCheckpoint

PRICED = {"input_price_per_million": 1.0, "output_price_per_million": 1.0}


def trained(folder, last, **changes):
    """A run with one episode an iteration, up to an iteration, and its trainer."""
    changes = {"trajectories_per_iteration": 1, "num_agents": 2, "log_level": "ERROR", **changes}
    trainer = make_trainer(load_config(written(folder, **changes)))
    try:
        trainer.train(last)
    finally:
        trainer.close()
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of two iterations."""
    folder = tmp_path_factory.mktemp("whole")
    trained(folder, 2)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of it that may be damaged."""
    subprocess.run(["cp", "-r", f"{whole}/.", str(tmp_path)], check=True)
    return tmp_path


def run_of(folder):
    return folder / "experiments" / "runs" / "experiment"


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b.replace(b"e", b"f", 1), lambda b: b""]
)
def test_a_policy_text_that_is_not_the_one_that_was_saved_is_refused(damage, folder):
    text = run_of(folder) / "checkpoints" / "iter_2" / "agent_1.txt"
    text.write_bytes(damage(text.read_bytes()))
    told = r"iter_2/agent_1\.txt is not the text that was saved.*edited_policies=take"
    with pytest.raises(DamagedCheckpointError, match=told):
        trained(folder, 3)


def test_a_text_that_was_edited_by_hand_is_taken_by_a_word_and_then_is_the_saved_one(folder):
    text = run_of(folder) / "checkpoints" / "iter_2" / "agent_1.txt"
    text.write_text("Answer in one word.")
    trainer = trained(folder, 2, edited_policies="take")
    assert trainer.policies["agent_1"] == "Answer in one word."
    assert trained(folder, 2).policies["agent_1"] == "Answer in one word."
    assert trained(folder, 3).files.policies.iterations() == [1, 2, 3]


def test_an_edit_of_a_checkpoint_without_digests_needs_no_word(tmp_path):
    store = LocalStore(tmp_path)
    store.write_text("runs/one/checkpoints/iter_1/agent_1.txt", "of another program")
    store.write_text("runs/one/checkpoints/iter_1/meta.json", '{"num_agents": 1}')
    policies = PolicyCheckpoint(store, "one", 1)
    assert policies.get_policies() == {"agent_1": "of another program"}
    assert policies.take_edits() == []


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("checkpoints/iter_2/meta.json", '"avg_reward": ', '"avg_reward": 1'),
        ("trajectories/iter_1/episode_000.json", '"action": "', '"action": "No. '),
        ("evaluations/iter_1/eval_episode_000.json", '"raw_response": "', '"raw_response": "x'),
    ],
)
def test_a_json_file_that_was_altered_is_refused_by_name(path, before, after, folder):
    run = run_of(folder)
    file = run / path
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after, 1))
    if "iter_2" not in path:  # these are read where the iteration was not completed
        subprocess.run(["rm", "-r", str(run / "checkpoints" / "iter_2")], check=True)
    (run / "metrics" / "training_curve.jsonl").unlink()
    told = f"{re.escape(path)} is damaged: it is not what was written; remove it"
    with pytest.raises(DamagedCheckpointError, match=told):
        trained(folder, 2)


def test_every_flipped_letter_of_the_training_curve_is_refused_by_its_line(folder):
    curve = run_of(folder) / "metrics" / "training_curve.jsonl"
    first, second = curve.read_text().splitlines(keepends=True)
    for place in [*range(1, 60, 7), second.index("avg_reward"), second.index('rewards": [') + 12]:
        changed = chr(ord(second[place]) ^ 1)
        curve.write_text(first + second[:place] + changed + second[place + 1 :])
        with pytest.raises(DamagedCheckpointError, match=r"training_curve\.jsonl, line 2, is dam"):
            trained(folder, 2)


def test_a_line_of_another_program_without_a_reward_is_refused_by_name(folder):
    curve = run_of(folder) / "metrics" / "training_curve.jsonl"
    curve.write_text('{"iteration": 0, "avg_rewbrd": 0.5}\n[1]\n')
    with pytest.raises(DamagedCheckpointError, match="line 1, is damaged: it lacks avg_reward;"):
        trained(folder, 2)


# One episode of two agents, its critic, two gradients: five calls an iteration.
@pytest.mark.parametrize("kept", [None, 0, 4, 8])
def test_calls_that_are_cut_from_the_journal_stay_paid(kept, tmp_path, capfd):
    priced = {f"{role}_llm": scripted(role, **PRICED) for role in ("actor", "critic", "optimizer")}
    first = trained(tmp_path, 1, **priced)
    paid = first.log.total()
    assert paid.calls == 5
    journal = run_of(tmp_path) / "calls.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    assert len(lines) == 10
    journal.unlink() if kept is None else journal.write_text("".join(lines[:kept]))
    spent = spent_in(tmp_path / "experiments")
    assert spent.calls == 5
    assert spent.cost_usd == pytest.approx(paid.cost_usd)
    again = trained(tmp_path, 3, **priced, max_calls=8)
    assert "max_calls=8" in again.ended_by
    assert again.log.total().calls == 8
    again.log.reload()
    assert again.log.total().calls == 8
    usd = trained(tmp_path, 3, **priced, max_cost_usd=paid.cost_usd)
    assert "max_cost_usd" in usd.ended_by


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
@pytest.mark.parametrize("name", ["calls.jsonl", "spent.json", "checkpoints/iter_2/agent_1.txt"])
def test_a_folder_or_a_pipe_in_the_place_of_a_file_is_refused_by_name(make, name, folder):
    place = run_of(folder) / name
    place.unlink()
    make(place)
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} cannot be read: it is no plain"):
        trained(folder, 3)


def test_an_altered_answer_or_price_in_the_journal_is_refused_by_its_line(folder):
    journal = run_of(folder) / "calls.jsonl"
    text = journal.read_text()
    for before, after in (('"cost_usd": 0', '"cost_usd": -9'), ('"text": "', '"text": "x')):
        at = text.index(before)
        journal.write_text(text[:at] + after + text[at + len(before) :])
        number = text[:at].count("\n") + 1
        with pytest.raises(DamagedCheckpointError, match=f"calls.jsonl, line {number} is damaged"):
            CallLog(journal)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"spent": [["actor", "m", {"call": 1}]]}'])
def test_sums_that_are_damaged_are_named(text, folder):
    (run_of(folder) / "spent.json").write_text(text)
    with pytest.raises(DamagedCheckpointError, match=r"spent\.json is damaged.*remove it"):
        trained(folder, 2)


def test_drafts_of_a_killed_process_are_removed_and_nothing_else(folder):
    run = run_of(folder)
    drafts = [
        run / "checkpoints" / "iter_3" / ".agent_1.txt.0123abcd",
        run / "trajectories" / "iter_2" / ".episode_000.json.89abcdef",
        folder / "policies" / ".experiment.json.01234567",
        folder / "policies" / ".experiment_best.json.01234567",
    ]
    kept = [
        run / ".mine",
        run / ".a.txt.0123abcg",
        run / "a.txt.0123abcd",
        folder / "policies" / ".other.json.01234567",
    ]
    for path in (*drafts, *kept):
        path.parent.mkdir(exist_ok=True)
        path.write_text("half")
    trained(folder, 2)
    assert [path for path in drafts if path.exists()] == []
    assert all(path.exists() for path in kept)


def test_the_sums_are_those_of_the_journal(folder):
    log = CallLog(run_of(folder) / "calls.jsonl")
    value = json.loads((run_of(folder) / "spent.json").read_text())
    assert {(role, model): each["calls"] for role, model, each in value["spent"]} == {
        key: spent.calls for key, spent in log.account().items()
    }
