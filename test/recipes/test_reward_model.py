"""Reward models of pairs: they rank, are calibrated, are opened by others, and train a policy."""

import json
from pathlib import Path

import pytest
import torch
from recipes.calculator_pairs import write_pairs
from recipes.grpo_helper import SCRIPT as GRPO
from recipes.grpo_helper import column, rows, weights
from recipes.kill_helper import run_ranks
from recipes.script import run_main
from transformers import AutoModelForSequenceClassification

from torchrl_llm.data import History
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.modules import load_tokenizer
from torchrl_llm.rewards import ModelReward

SCRIPT = Path(__file__).parents[2] / "sota-implementations" / "preference" / "reward-model.py"
QUIET = "logging.progress=false"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", 700)


@pytest.fixture(scope="module")
def trained(pairs, tmp_path_factory):
    """The folder of a run, whose held-out pairs are the last 70, and its metrics."""
    folder = tmp_path_factory.mktemp("trained")
    settings = [f"data={pairs}", "train.max_steps=32", "train.batch_size=16", QUIET]
    with pytest.MonkeyPatch.context() as patch:
        run_main(patch, SCRIPT, folder, *settings)
    return folder, rows(folder)


def test_held_out_answers_are_ranked_and_the_scores_mean_it(trained):
    _, metrics = trained
    accuracy, error = (column(metrics, f"eval/{n}") for n in ("accuracy", "calibration_error"))
    assert accuracy[0] < 0.8
    assert accuracy[-1] > 0.95
    assert error[-1] < 0.05 < error[0]
    assert column(metrics, "train/loss_reward")[-1] < 0.2
    assert column(metrics, "eval/margin")[-1] > 3


def test_transformers_and_the_component_open_the_same_model(trained, pairs):
    path = trained[0] / "checkpoints" / "step_000032"
    row = json.loads(pairs.read_text().splitlines()[-1])
    chats = [[*row["prompt"], *row[side]] for side in ("chosen", "rejected")]
    got = ModelReward(str(path)).score_chats(chats)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    assert model.config.num_labels == 1
    formatter = ChatFormatter(load_tokenizer(path))
    with torch.no_grad():
        for score, chat in zip(got, chats, strict=True):
            ids = formatter.encode_demonstration(chat).token_ids
            assert score == pytest.approx(float(model(input_ids=ids[None]).logits), abs=1e-4)
            text = History.from_chats(chat).apply_chat_template(
                tokenizer=load_tokenizer(path), add_generation_prompt=False, return_tensors="pt",
                return_dict=False, tokenize=True,
            )  # fmt: skip
            assert torch.equal(text.flatten(), ids)
    assert got[0] > got[1] + 1


def test_grpo_against_it_alone_raises_the_accuracy_of_the_task(trained, tmp_path, monkeypatch):
    path = trained[0] / "checkpoints" / "step_000032"
    settings = ["env=calculator", "reward.components.task.weight=0", "train.max_steps=3"]
    settings += [f"reward.components.model.name={path}", "eval.num_prompts=64", QUIET]
    run_main(monkeypatch, GRPO, tmp_path, *settings)
    metrics = rows(tmp_path)
    before, after = (column(metrics, "eval/accuracy")[at] for at in (0, -1))
    assert before < 0.5
    assert after > before + 0.25
    reward = column(metrics, "train/reward_model")
    assert reward[-1] > reward[0] + 1
    assert reward == pytest.approx(column(metrics, "train/reward"))


def test_a_run_goes_on_bit_for_bit(pairs, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    settings = [f"data={pairs}", "train.batch_size=4", "eval.num_prompts=8", QUIET]
    settings += ["train_model.lora.enabled=true", "train_model.lora.dropout=0.1"]
    settings += ["loss.centering=0.01", "optimizer.scheduler=constant", "eval.interval=2"]

    def run(name, *more):
        run_main(monkeypatch, SCRIPT, tmp_path / name, *settings, *more)
        return rows(tmp_path / name)

    whole = run("whole", "train.max_steps=4")
    run("cut", "train.max_steps=2")
    assert run("cut", "train.max_steps=4", "checkpoint.resume=auto") == whole
    first, second = weights(tmp_path / "whole", 4), weights(tmp_path / "cut", 4)
    assert all(torch.equal(first[name], second[name]) for name in first)
    # Adapters are merged, and the head is the trained one.
    path = tmp_path / "whole" / "checkpoints" / "step_000004"
    model = AutoModelForSequenceClassification.from_pretrained(path)
    assert torch.equal(model.score.weight, first["score.weight"])
    assert not any("lora" in name for name in first)
    began = weights(tmp_path / "cut", 2)
    assert not torch.equal(began["score.weight"], first["score.weight"])
    assert (path / "adapter").is_dir()


def test_a_trained_reward_model_is_trained_further(trained, pairs, tmp_path, monkeypatch):
    path = trained[0] / "checkpoints" / "step_000032"
    settings = [f"data={pairs}", f"model.name={path}", "train.max_steps=1", "optimizer.lr=0", QUIET]
    run_main(monkeypatch, SCRIPT, tmp_path, *settings)
    accuracy = column(rows(tmp_path), "eval/accuracy")
    assert accuracy[0] == column(trained[1], "eval/accuracy")[-1]


def test_margins_of_a_column_are_asked_for(tmp_path, monkeypatch):
    lines = [
        json.dumps({"prompt": f"{n}?", "chosen": "yes", "rejected": "no", "stars": 5.0})
        for n in range(8)
    ]
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(lines))
    settings = [f"data={data}", "train.max_steps=1", "eval.num_prompts=0", "optimizer.lr=0", QUIET]
    run_main(monkeypatch, SCRIPT, tmp_path / "a", *settings)
    run_main(monkeypatch, SCRIPT, tmp_path / "b", *settings, "data.margin=stars")
    losses = [column(rows(tmp_path / name), "train/loss_reward")[0] for name in "ab"]
    assert losses[1] > losses[0] + 4


def test_what_has_no_effect_or_no_pairs_is_refused(tmp_path, pairs, monkeypatch):
    def refused(message, *settings, error=ConfigError):
        with pytest.raises(error, match=message):
            run_main(monkeypatch, SCRIPT, tmp_path / "a", f"data={pairs}", *settings)

    refused("unknown key 'train_model.logprob_chunk_size'", "train_model.logprob_chunk_size=8")
    refused("data.margin=stars: there is no such column", "data.margin=stars", error=DataError)
    single = tmp_path / "single.csv"
    single.write_text("prompt,completion,label\nHi,Hello,true\n")
    refused("learns from two", f"data={single}")


@pytest.mark.full
def test_two_ranks_train_what_one_process_does(pairs, tmp_path, monkeypatch):
    settings = [f"data={pairs}", "train.batch_size=5", "train.max_steps=2", "eval.num_prompts=4"]
    run_main(monkeypatch, SCRIPT, tmp_path / "one", *settings, QUIET)
    for how in ("ddp", "fsdp2"):
        options = [*settings, QUIET, f"train.parallel={how}"]
        run_ranks(tmp_path / how, options, 2, path="preference/reward-model.py")
        one, two = (weights(tmp_path / name, 2) for name in ("one", how))
        for name, weight in one.items():
            torch.testing.assert_close(two[name], weight, atol=1e-4, rtol=1e-3)
        for name in ("train/loss_reward", "eval/loss"):
            losses = [column(rows(tmp_path / each), name) for each in ("one", how)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
