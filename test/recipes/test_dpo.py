"""Preference optimization: pairs are told apart, a run goes on, and what cannot be honoured."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from recipes.grpo_helper import column, rows, weights
from recipes.kill_helper import run_ranks
from recipes.script import run_main, run_typed

from torchrl_llm import DPO
from torchrl_llm.assets import PAIRS_OF_SUMS
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.modules import load_tokenizer

SCRIPT = Path(__file__).parents[2] / "sota-implementations" / "preference" / "dpo.py"
QUIET = ["logging.progress=false"]


@pytest.fixture
def run(monkeypatch):
    """Run the script; the rows of metrics.csv without what a clock says."""

    def run(folder, *overrides):
        run_main(monkeypatch, SCRIPT, folder, *QUIET, *overrides)
        return rows(folder)

    return run


@pytest.fixture
def utils(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("preference_utils")


def test_the_pairs_of_the_package_are_told_apart(tmp_path, monkeypatch):
    settings = ["train.max_steps=12", "optimizer.scheduler=constant"]
    result = run_typed(monkeypatch, SCRIPT, tmp_path / "a", *settings)
    assert column(result, "train/loss_preference")[0] == pytest.approx(0.6931, abs=1e-3)
    margins, accuracies = column(result, "eval/margin"), column(result, "eval/accuracy")
    assert margins[0] == pytest.approx(0.0, abs=1e-4)
    assert margins[-1] > 0.3
    assert accuracies[-1] > 0.8
    assert column(result, "eval/loss")[-1] < 0.6
    assert (tmp_path / "a" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    said = (tmp_path / "a" / "run.log").read_text()
    assert said.index("chosen: ") < said.index("[[122<|im_end|>]]") < said.index("rejected: ")


@pytest.mark.parametrize("loss", ["dpo", "kto", "orpo"])
def test_a_run_that_goes_on_is_the_run_that_was_left_alone(tmp_path, run, loss):
    lines = PAIRS_OF_SUMS.read_text().splitlines()[:40]
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(lines))
    settings = [f"data={data}", f"loss={loss}", "train.batch_size=8", "eval.num_prompts=8"]
    settings += ["eval.interval=3", "optimizer.scheduler=constant", "optimizer.warmup_steps=0"]
    settings += ["train_model.lora.enabled=true", "train_model.lora.dropout=0.1", "seed=3"]
    # Four steps are an epoch: what goes on begins in the first and ends in the second.
    whole = run(tmp_path / "whole", *settings, "train.max_steps=6")
    run(tmp_path / "cut", *settings, "train.max_steps=3")
    resumed = run(tmp_path / "cut", *settings, "train.max_steps=6", "checkpoint.resume=auto")
    assert resumed == whole
    first, second = weights(tmp_path / "whole", 6), weights(tmp_path / "cut", 6)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_reference_scores_each_answer_once(tmp_path, utils, monkeypatch):
    asked = []
    real = utils.answer_log_probs

    def counted(scorer, sequences, answers, **options):
        asked.append(len(sequences))
        return real(scorer, sequences, answers, **options)

    monkeypatch.setattr(utils, "answer_log_probs", counted)
    data = [json.loads(line) for line in PAIRS_OF_SUMS.read_text().splitlines()[:12]]
    DPO(
        data=data,
        folder=tmp_path / "a",
        train={"batch_size": 4, "max_epochs": 3},
        eval={"num_prompts": 2, "interval": 1},
        logging={"progress": False},
    ).train()
    assert sum(asked) == 2 * 12


def test_the_reference_of_data_that_was_mended_is_computed_anew(tmp_path, run):
    data = tmp_path / "pairs.jsonl"
    settings = [f"data={data}", "train.batch_size=4", "eval.num_prompts=0", "optimizer.lr=0"]

    def write(good):
        pairs = ({"prompt": f"{n}?", "chosen": good * n, "rejected": "no"} for n in range(1, 9))
        data.write_text("\n".join(map(json.dumps, pairs)))

    write("a")
    run(tmp_path / "a", *settings, "train.max_steps=2")
    write("other words")
    result = run(tmp_path / "a", *settings, "train.max_steps=4", "checkpoint.resume=auto")
    # The weights are those of the reference in all steps.
    assert column(result, "train/margin") == pytest.approx([0.0] * 4, abs=1e-4)


def test_a_run_holds_one_reference(tmp_path, utils, monkeypatch):
    made = []
    real = utils.make_reference
    monkeypatch.setattr(utils, "make_reference", lambda *a: made.append(real(*a)) or made[-1])
    data = [json.loads(line) for line in PAIRS_OF_SUMS.read_text().splitlines()[:6]]
    quiet = {"eval": {"num_prompts": 2}, "logging": {"progress": False}}
    DPO(data=data, folder=tmp_path / "a", **quiet).train()
    assert len(made) == 1


def test_whole_conversations_that_are_trained_on_too_are_told_of(tmp_path, utils):
    def pair(good):
        talk = [{"role": "user", "content": "2+2?"}]
        said = [[*talk, {"role": "assistant", "content": each}] for each in (good, "no")]
        return json.dumps(dict(zip(("chosen", "rejected"), said, strict=True)))

    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(map(pair, ("four", "4"))))
    config = utils.load_config({"data": {"source": str(data)}})
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrl_llm.recipes.supervised.tell_overlap", lambda *a: told.append(a))
        utils.load_data(config, load_tokenizer())
    first, second = told[0][0], told[0][1]
    assert list(first) == second == [[{"role": "user", "content": "2+2?"}]]


def test_good_answers_of_a_table_become_likelier_and_bad_ones_do_not(tmp_path, run):
    data = tmp_path / "thumbs.csv"
    lines = [f"Is it {n}?,{said},{said == 'yes'}" for n in range(40) for said in ("yes", "no")]
    data.write_text("\n".join(["question,said,liked", *lines]))
    named = ["data.completion=said", "data.label=liked", "loss=kto"]
    steps = ["train.max_steps=25", "eval.num_prompts=8", "optimizer.lr=2e-3"]
    result = run(tmp_path / "a", f"data={data}", *named, *steps)
    assert column(result, "eval/accuracy")[-1] > 0.8
    assert all(kl >= 0 for kl in column(result, "train/kl")[:1])
    with pytest.raises(DataError, match=r"data\.chosen and data\.rejected"):
        run(tmp_path / "b", f"data={data}")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.kl_to_ref_coeff=0.1"], "unknown key"),
        (["loss=simpo", "ref_model.name=x"], "ref_model has no effect with loss=simpo"),
        (["loss=kto", "train.batch_size=1"], "must be at least 2"),
        (["loss=simpo", "loss.form=ipo"], "loss.form has no effect with loss=simpo"),
        (["loss=grpo"], "grpo"),
        (["loss.beta=0"], "beta"),
        (["eval.batch_size=4"], "unknown key"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path, run, overrides, expected):
    with pytest.raises((ConfigError, SystemExit)) as error:
        run(tmp_path / "a", *overrides)
    assert expected in str(error.value) or isinstance(error.value, SystemExit)


def test_a_reference_of_another_vocabulary_is_refused(tmp_path, run, make_tiny_model):
    make_tiny_model(vocab_size=500).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"ref_model\.name: .* must have one vocabulary"):
        run(tmp_path / "a", f"ref_model.name={tmp_path / 'other'}", "train.max_steps=1")


def test_a_label_is_for_kto(tmp_path, run):
    data = tmp_path / "thumbs.csv"
    data.write_text("prompt,completion,label\n2+2?,4,true\n2+2?,5,false\n")
    with pytest.raises(ConfigError, match="loss=kto"):
        run(tmp_path / "a", f"data={data}")


@pytest.mark.full
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_ranks_train_what_one_process_does(tmp_path, monkeypatch, loss):
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(PAIRS_OF_SUMS.read_text().splitlines()[:26]))
    settings = [f"data={data}", f"loss={loss}", "train.batch_size=6", "train.max_steps=4"]
    settings += ["eval.num_prompts=4", "train.micro_token_budget=60", *QUIET]
    run_main(monkeypatch, SCRIPT, tmp_path / "one", *settings)
    for how in ("ddp", "fsdp2"):
        run_ranks(tmp_path / how, [*settings, f"train.parallel={how}"], 2, path="preference/dpo.py")
        one, two = (weights(tmp_path / name, 4) for name in ("one", how))
        for name, weight in one.items():
            torch.testing.assert_close(two[name], weight, atol=1e-4, rtol=1e-3)
        both = [rows(tmp_path / name) for name in ("one", how)]
        for name in ("train/loss_preference", "train/accuracy", "eval/loss"):
            found = [column(each, name) for each in both]
            assert found[0] == pytest.approx(found[1], rel=1e-3, abs=1e-5), name
