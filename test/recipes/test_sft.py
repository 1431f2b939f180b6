"""Fine-tuning on conversations of one's own: it learns, goes on, and says what it cannot use."""

from __future__ import annotations

import importlib
import json
import random
import textwrap
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from recipes.grpo_helper import column, rows, weights
from recipes.script import run_main, run_typed
from torchrl._utils import logger
from transformers import AutoModelForCausalLM

from torchrl_llm import SFT
from torchrl_llm.data.demonstrations import DemonstrationColumns, Demonstrations, learned_rows
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.modules import TransformersBackend, load_model, load_tokenizer
from torchrl_llm.objectives import SFTLoss
from torchrl_llm.recipes.chat_settings import make_conversation
from torchrl_llm.trainers import optimize

SCRIPT = Path(__file__).parents[2] / "sota-implementations" / "sft" / "sft.py"
NONE_HELD_OUT = ["eval.num_prompts=0", "logging.progress=false"]


@pytest.fixture
def run(monkeypatch):
    """Run the script; the rows of metrics.csv without what a clock says."""

    def run(folder, *overrides):
        run_main(monkeypatch, SCRIPT, folder, *overrides)
        return rows(folder)

    return run


@pytest.fixture
def utils(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("sft_utils")


@pytest.fixture
def table(tmp_path):
    """A CSV file of 300 sums, of which the last tenth is held out."""
    draw = random.Random(0)
    sums = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(300)]
    lines = [f"What is {a}+{b}?,{a + b}" for a, b in sums]
    path = tmp_path / "sums.csv"
    path.write_text("\n".join(["question,answer", *lines]) + "\n")
    return path


def write(path, chats):
    """A JSON-lines file with a conversation in each line."""
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


def chat(*contents):
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": c} for role, c in zip(roles, contents, strict=False)]


def test_a_model_learns_the_answers_of_a_table_and_gives_them(tmp_path, table, monkeypatch):
    overrides = [f"data={table}", "reward=exact", "train.max_epochs=2"]
    result = run_typed(monkeypatch, SCRIPT, tmp_path / "a", *overrides)
    losses, held_out = column(result, "train/loss_sft"), column(result, "eval/loss")
    accuracy = column(result, "eval/accuracy")
    assert len(losses) == 2 * -(-270 // 32)
    assert column(result, "train/epoch")[-1] == 2.0
    assert held_out[0] > 0.35  # it has imitated those who forget to carry
    assert held_out[-1] < 0.1
    assert losses[-1] < 0.1
    assert accuracy[0] < 0.5
    assert accuracy[-1] > 0.9
    assert (tmp_path / "a" / "loss.png").read_bytes().startswith(b"\x89PNG")
    said = (tmp_path / "a" / "run.log").read_text()
    assert said.index("sums.csv, line 2,") < said.index("<|im_end|>]]")  # what is learned is shown
    assert "held-out greedy accuracy" in said
    saved = tmp_path / "a" / "checkpoints" / "step_000018"
    AutoModelForCausalLM.from_pretrained(saved)


def test_every_turn_of_a_conversation_is_learned_and_nothing_else(tmp_path, run):
    chats = [chat(f"Say {n}", f"It is {n}.", "Again", f"{n} it is.") for n in range(12)]
    data = write(tmp_path / "chats.jsonl", chats)
    result = run(tmp_path / "a", f"data={data}", "train.batch_size=12", *NONE_HELD_OUT)
    tokenizer = load_tokenizer()
    said = [turn["content"] for each in chats for turn in each if turn["role"] == "assistant"]
    ends = len(said)  # of each turn its end is learned too
    assert column(result, "train/tokens_trained") == [
        sum(len(tokenizer(text)["input_ids"]) for text in said) + ends
    ]


def test_a_run_that_goes_on_is_the_run_that_was_left_alone(tmp_path, table, run):
    settings = [f"data={table}", "eval.num_prompts=16", "eval.interval=4", "seed=3"]
    settings += ["optimizer.scheduler=constant", "optimizer.warmup_steps=0"]
    settings += ["train_model.lora.enabled=true", "train_model.lora.dropout=0.1"]
    settings += ["logging.progress=false"]
    # Nine steps are an epoch: what goes on begins in the first and ends in the second.
    whole = run(tmp_path / "whole", *settings, "train.max_steps=13")
    run(tmp_path / "cut", *settings, "train.max_steps=4")
    resumed = run(tmp_path / "cut", *settings, "train.max_steps=13", "checkpoint.resume=auto")
    assert resumed == whole
    first, second = weights(tmp_path / "whole", 13), weights(tmp_path / "cut", 13)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_adapters_of_a_local_qwen2_learn_and_are_saved_whole(tmp_path, run, make_tiny_model):
    tokenizer = load_tokenizer()
    local = tmp_path / "qwen2"
    make_tiny_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(
        local
    )
    tokenizer.save_pretrained(local)
    data = write(tmp_path / "chats.jsonl", [chat("Hi", "Hello there.")] * 20)
    result = run(
        tmp_path / "a",
        f"data={data}",
        f"model.name={local}",
        "train_model.lora.enabled=true",
        "train_model.lora.r=4",
        "optimizer.lr=0.01",
        "train.max_epochs=20",
        "train.batch_size=9",
        "reward=exact",
        "eval.max_tokens=16",
    )
    losses, accuracy = column(result, "train/loss_sft"), column(result, "eval/accuracy")
    assert losses[0] > 4
    assert losses[-1] < 0.05
    assert accuracy == [0.0, 1.0]
    saved = tmp_path / "a" / "checkpoints" / "step_000040"
    assert (saved / "adapter").is_dir()
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert not any("lora" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_layout_and_memory_change_nothing_but_rounding(tmp_path, run, layout):
    chats = [chat("a" * n, "b" * (20 - n)) for n in range(1, 17)]
    settings = [f"data={write(tmp_path / 'chats.jsonl', chats)}", "train.batch_size=8"]
    settings += ["train.max_steps=4", *NONE_HELD_OUT]
    usual = column(run(tmp_path / "a", *settings), "train/loss_sft")
    small = [f"train.packing={layout}", "train.micro_token_budget=64"]
    other = column(run(tmp_path / layout, *settings, *small), "train/loss_sft")
    assert other == pytest.approx(usual, rel=1e-4)
    assert len(set(usual)) == 4


PROBLEMS = [  # of the shape of GSM8K's, 100 to 500 tokens
    {"question": f"Ann sold {n} clips. " + "And how many did she sell then? " * (n % 4 + 1),
     "answer": f"She sold {n}/2 = <<{n}/2={n // 2}>>{n // 2}.\n" * (n % 5 + 1) + f"#### {n // 2}"}
    for n in range(20, 44, 2)
]  # fmt: skip


def test_rows_that_are_padded_bucketed_or_packed_have_one_loss_and_gradient():
    formatter = ChatFormatter(load_tokenizer())
    columns = DemonstrationColumns.find(PROBLEMS[0])
    rows = learned_rows(Demonstrations(PROBLEMS, formatter, columns))
    found = {}
    for layout, budget in product(("padded", "bucketed", "packed", "auto"), (None, 700)):
        model = load_model().train()
        backend = TransformersBackend(model, layout=layout)
        steps = torch.optim.SGD(model.parameters(), lr=1e-3)
        metrics = optimize(SFTLoss(backend), [rows], steps, budget=budget, layout=layout)
        found[layout, budget] = metrics["train/loss_sft"], metrics["train/grad_norm"]
    loss, norm = found["padded", None]
    assert loss > 5
    assert norm > 5
    for values in found.values():
        assert values == pytest.approx((loss, norm), rel=1e-6)


@pytest.mark.full
def test_a_reference_holds_the_model_back(tmp_path, run, table):
    settings = [f"data={table}", "train.max_steps=6", "logging.progress=false"]
    free = column(run(tmp_path / "free", *settings), "eval/loss")
    held = run(tmp_path / "held", *settings, "train.kl_to_ref_coeff=5")
    assert column(held, "eval/loss")[-1] > free[-1] + 0.02
    minor = ["loss.function=minor_sft", "loss.reduction=mean"]
    assert len(run(tmp_path / "minor", *settings, *minor)) == 7


def test_long_rows_are_refused_dropped_or_cut_as_asked(tmp_path, run):
    chats = [chat("Hi", "yes"), chat("Hi", "no, " * 30)] * 6
    settings = [f"data={write(tmp_path / 'chats.jsonl', chats)}", "train.batch_size=12"]
    settings += ["train.max_seq_len=32", *NONE_HELD_OUT]
    with pytest.raises(DataError, match=r"chats\.jsonl, line 2 has \d+ tokens, .* may have 32"):
        run(tmp_path / "a", *settings)
    (dropped,) = run(tmp_path / "b", *settings, "train.on_overlong=drop")
    (cut,) = run(tmp_path / "c", *settings, "train.on_overlong=truncate")
    assert int(dropped["train/overlong"]) == int(cut["train/overlong"]) == 6
    assert int(cut["train/tokens"]) - int(dropped["train/tokens"]) == 6 * 32
    assert int(cut["train/tokens_trained"]) > int(dropped["train/tokens_trained"]) > 0


def test_held_out_rows_that_are_too_long_are_said_to_be_held_out(tmp_path, run, monkeypatch):
    said = []
    monkeypatch.setattr(logger, "warning", said.append)
    chats = [chat("Hi", "yes")] * 8 + [chat("Hi", "no, " * 30)] * 2 + [chat("Hi", "yes")]
    settings = [f"data={write(tmp_path / 'chats.jsonl', chats)}", "train.batch_size=8"]
    settings += ["train.max_seq_len=32", "eval.num_prompts=3", "logging.progress=false"]
    with pytest.raises(DataError, match=r"chats\.jsonl, line 9 \(held out\) has \d+ tokens"):
        run(tmp_path / "a", *settings)
    run(tmp_path / "b", *settings, "train.on_overlong=drop")
    (told,) = [text for text in said if "held-out rows" in text]
    assert told.startswith("2 of the 3 held-out rows have more than 32 tokens")
    assert told.endswith("eval/loss is without them")


def test_numbers_of_numpy_and_missing_cells_are_read_as_they_were_meant(utils):
    answers = [np.int64(3), 4.0, float("nan")]
    rows = [{"question": f"{n}?", "answer": answer} for n, answer in enumerate(answers)]

    def learned(rows):
        (shown, _) = utils.load_data(SFT(data=rows, eval={"num_prompts": 1})._config, tokenizer)
        return [shown.show(at).rpartition("[[")[2] for at in range(len(shown))]

    tokenizer = load_tokenizer()
    assert learned(rows[:2]) == ["3<|im_end|>]]"]
    with pytest.raises(DataError, match="'answer' is empty"):
        learned(rows[1:])


def test_training_rows_that_are_also_held_out_are_said(utils, monkeypatch):
    said = []
    monkeypatch.setattr(logger, "warning", said.append)
    tokenizer = load_tokenizer()
    pairs = [{"question": f"{n}?", "answer": "x"} for n in (0, 1, 2, 3, 1)]
    talks = [{"messages": chat(f"{n}?", "x")} for n in (0, 1, 2, 3, 1)]
    for data in (pairs, talks):
        utils.load_data(SFT(data=data, eval={"num_prompts": 2})._config, tokenizer)
        (told,) = said
        assert told.startswith("data.source: 1 of 2 held-out prompts are trained on too")
        said.clear()
        utils.load_data(SFT(data=data[:4], eval={"num_prompts": 2})._config, tokenizer)
        assert not said


def test_variables_of_the_template_are_those_of_the_key(utils, monkeypatch):
    tokenizer = load_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
        "{% if enable_thinking is false %}{{ '<think></think>' }}{% endif %}{% endif %}"
    )
    for kwargs, end in (({}, "assistant\n"), ({"enable_thinking": False}, "<think></think>")):
        config = utils.load_config({**DATA, "model": {"template_kwargs": kwargs}})
        policy = utils.make_policy(config, tokenizer)
        assert policy.formatter.render(chat("Hi")[:1]).endswith(end)
    config = {"model": {"template_kwargs": {"enable_thinking": False}}}
    talk = make_conversation(load_model(), tokenizer, config, max_tokens=1)
    assert talk.policy.formatter.render(chat("Hi")[:1]).endswith("<think></think>")


def test_the_example_of_the_how_to_learns(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "source" / "howto" / "fine_tune_on_your_chats.rst"
    block = page.read_text().split("five seconds on a CPU\n\n")[1].split("\nThe data\n")[0]
    monkeypatch.chdir(tmp_path)
    names = {"print": lambda *values: None}
    exec(textwrap.dedent(block), names)
    losses = names["run"].run.curves()["train/loss_sft"][1]
    assert len(losses) == 18
    assert losses[-1] < 0.1
    assert names["run"].evaluate().accuracy > 0.8


QA = {"question": "1+1?", "answer": "2"}
BAD_DATA = {
    "no such column": ([QA], ["data.prompt=questoin"], r"\['answer', 'question'\]"),
    "no answer by its name": (
        [{"prompt": "1", "b": "2"}],
        [],
        r"\['b', 'prompt'\].*completion",
    ),
    "no prompt by its name": ([{"a": "1", "answer": "2"}], [], r"\['a', 'answer'\].*a prompt"),
    "an empty answer": (
        [QA, {**QA, "answer": ""}],
        [],
        r"rows\.json, element 2: .*'answer' is empty",
    ),
    "no messages": ([{"messages": "hello"}], [], "element 1: .*a list of messages, got 'hello'"),
    "no assistant": ([{"messages": chat("Hi")}], [], "no turn of the assistant.*only user"),
    "an empty turn": (
        [{"messages": chat("Hi", " ")}],
        [],
        "message 1 is .* and empty",
    ),
    "two of the assistant": (
        [{"messages": chat("Hi", "a") + chat("Hi", "b")[1:]}],
        [],
        "message 2 is the assistant's, as the one before",
    ),
    "one row": ([QA], [], "leaves none of the 1 problems"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_data_that_cannot_be_learned_from_is_told_before_a_model_is_read(
    case, tmp_path, run, monkeypatch
):
    data, settings, message = BAD_DATA[case]
    monkeypatch.setattr("torchrl_llm.modules.load_model", None)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(data * (1 if case == "one row" else 10)))
    with pytest.raises((DataError, ConfigError), match=message):
        run(tmp_path / "run", f"data={path}", *settings)


DATA = {"data": {"source": "rows.csv"}}
