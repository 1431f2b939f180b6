"""The page of a run as it is written: whole, without a byte of what models wrote in its markup."""

import base64
import hashlib
import re

import numpy as np
import pytest
from evaluation.report.pages import HOSTILE, make_row, make_rows, unpacked

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.evaluation.report import rollout_page
from torchrl_llm.evaluation.report.page import LEDGER, Table


def strings_of(header, columns, name):
    return [header["strings"][n] if n >= 0 else None for n in columns[name]]


def tokens_of(header, columns, i):
    start, end = columns["starts"][i : i + 2]
    return [header["strings"][n] for n in columns["token text"][start:end]]


def test_rows_of_a_collector_are_in_it_with_every_number_of_every_token(monkeypatch):
    from torchrl_llm.envs import ArithmeticEnv
    from torchrl_llm.modules import TransformersWrapper, load_model, load_tokenizer

    tokenizer = load_tokenizer()
    policy = TransformersWrapper(
        load_model(),
        tokenizer=tokenizer,
        input_mode="history",
        generate=True,
        generate_kwargs={"max_new_tokens": 6, "temperature": 1.0},
    )
    env = ArithmeticEnv(num_envs=4, seed=0)
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=4, total_dialog_turns=4)
    (rows,) = [batch.reshape(-1) for batch in collector]
    header, columns = unpacked(rollout_page(rows.unbind(0), tokenizer=tokenizer))
    assert header["num_rows"] == 4
    for name, key in {"token_ids": ("tokens", "full"), "source": ("trace", "source")}.items():
        assert np.array_equal(columns[f"token {name}"], np.concatenate(read_rows(rows, key)))
    log_probs, kept = (
        np.concatenate(read_rows(rows, ("log_probs", "full"))),
        columns["token log_probs"],
    )
    assert np.array_equal(kept[~np.isnan(kept)], log_probs[columns["token source"] == 3])
    for i in range(4):
        assert "".join(tokens_of(header, columns, i)) == rows[i]["text", "full"]
    assert strings_of(header, columns, "row prompt") == [row["query"] for row in rows.unbind(0)]
    assert np.isnan(columns["token advantage"]).all()  # nobody has compared them yet


def test_its_markup_holds_nothing_that_a_model_wrote(tokenizer):
    plain = rollout_page([make_row(tokenizer, "a", "b")], tokenizer=tokenizer)
    page = rollout_page(
        [make_row(tokenizer, text, text, label=text[:30]) for text in HOSTILE], tokenizer=tokenizer
    )
    block = re.compile(r'id="data">[A-Za-z0-9+/=]*<')
    assert block.sub("", page) == block.sub("", plain)
    header, columns = unpacked(page)
    for text, shown in zip(HOSTILE, strings_of(header, columns, "row response"), strict=True):
        if text.replace("\n", "").isprintable():
            assert shown == text
        assert shown.replace("\n", "").replace("\t", "").isprintable()
    title = rollout_page([], title="</title><script>{{data}}</script>")
    assert "<title>&lt;/title&gt;&lt;script&gt;{{data}}&lt;/script&gt;</title>" in title


def test_its_policy_allows_its_own_script_and_style_and_nothing_else(tokenizer):
    page = rollout_page(make_rows(tokenizer, 2), tokenizer=tokenizer)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("default-src") == "'none'"
    for kind, tag in (("script", "<script>(.*)</script>"), ("style", "<style>(.*)</style>")):
        (text,) = re.findall(tag, page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules.pop(f"{kind}-src") == f"'sha256-{digest}'"
    assert rules == {
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    # Nothing is fetched: the only address is the name of a language.
    assert set(re.findall(r"\w+://[^\"' ]*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", page)


@pytest.mark.parametrize("name", ["view.js", "curves.js"])
def test_a_script_has_at_most_600_lines(name):
    from importlib.resources import files

    text = (files("torchrl_llm.evaluation.report") / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 600


def test_metrics_are_drawn_together_where_they_belong_together():
    metrics = {
        "train/reward": ([1, 2], [0.5, float("nan")]),
        "eval/reward": ([0], [0.25]),
        "train/tokens_trained": ([1, 2], [10.0, 20.0]),
        "train/tokens_stale": ([1, 2], [0.0, 5.0]),
        "perf/step_s": ([1], [0.1]),
        "train/nothing": ([], []),
    }
    header, columns = unpacked(rollout_page([], metrics=metrics))
    drawn = {panel["title"]: (panel["names"], panel["more"]) for panel in header["panels"]}
    assert drawn == {
        "Reward": (["train/reward", "eval/reward"], False),
        LEDGER: (["train/tokens_trained", "train/tokens_stale"], False),
        "perf/step_s": (["perf/step_s"], True),
    }
    assert columns["train/reward steps"].tolist() == [1, 2]
    assert np.array_equal(columns["train/reward values"], [0.5, np.nan], equal_nan=True)


def test_tables_are_texts_without_control_characters():
    tables = [Table("a\u202e", ["", "x"], [["\x1b[2J", "<b>"]])]
    header, _ = unpacked(rollout_page([], tables=tables))
    assert header["tables"] == [{"title": r"a\u202e", "rows": [["", "x"], [r"\x1b[2J", "<b>"]]}]


def test_labels_that_tell_rows_apart_can_be_chosen_by(tokenizer):
    rows = [
        make_row(tokenizer, "a", "b", agent="pq"[i % 2], same="x", number=str(i)) for i in range(40)
    ]
    header, columns = unpacked(rollout_page(rows, tokenizer=tokenizer))
    assert header["labels"] == ["agent"]
    assert strings_of(header, columns, "label agent")[:3] == ["p", "q", "p"]


def test_the_same_rows_give_the_same_page(tokenizer):
    pages = {rollout_page(make_rows(tokenizer, 5), tokenizer=tokenizer) for _ in range(2)}
    assert len(pages) == 1


@pytest.mark.parametrize("count", [0, 1])
def test_a_page_without_rows_or_metrics_is_a_page(tokenizer, count):
    header, columns = unpacked(rollout_page(make_rows(tokenizer, count)))
    assert (header["num_rows"], header["panels"], header["tokenizer"]) == (count, [], False)
    assert len(columns["starts"]) == count + 1
