"""IFEvalEnv: the 540 real prompts, and responses made to follow or break their instructions."""

from __future__ import annotations

import json
import sys
from collections import Counter

import pytest
import torch
from cases import cases
from envs.fake_policy import AnsweringPolicy
from torchrl.envs.utils import check_env_specs

from torchrl_llm.data.history import History
from torchrl_llm.envs.datasets.hub_tasks import IFEvalEnv
from torchrl_llm.errors import DataError
from torchrl_llm.rewards.ifeval import INSTRUCTIONS, IFEvalData, IFEvalScoreData, check

CASES = cases(__file__)

ROW = {
    "key": 7,
    "prompt": "Say hi in three words. Do not use any commas.",
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{}, {"relation": "at least", "num_words": 3}],
}
HELLO = CASES["hello"]
ENGLISH = "this is how we spend a quiet evening by the river"


def counted(unit, number, relation, apart=" "):
    """A response with just enough of something, and one with one too many or too few."""
    enough, less = ("x " + apart.join([unit] * n) for n in (number, number - 1))
    return (enough, less) if relation == "at least" else (less, enough)


def examples(name, a):
    """A response that follows an instruction with the given arguments, and one that does not."""
    kind = name.partition(":")[2]
    if kind == "existence":
        return " ".join(a["keywords"]).upper(), " ".join(a["keywords"][1:]) + "."
    if kind == "forbidden_words":
        words = a["forbidden_words"]
        return " ".join(f"x{word} {word}x" for word in words), f"So: {words[-1].title()}!"
    if kind == "frequency":
        return counted(a["keyword"], a["frequency"], a["relation"])
    if kind == "letter_frequency":
        return counted(a["letter"].upper(), a["let_frequency"], a["let_relation"])
    if kind == "capital_word_frequency":
        return counted("BIG", a["capital_frequency"], a["capital_relation"])
    if kind == "number_words":
        # "x" is the first word
        return counted("word", a["num_words"] - 1, a["relation"])
    if kind == "number_sentences":
        enough, less = (
            " ".join(["It is so."] * n) for n in (a["num_sentences"], a["num_sentences"] - 1)
        )
        return (enough, less) if a["relation"] == "at least" else (less, enough)
    if kind == "number_paragraphs":
        n = a["num_paragraphs"]
        return "\n***\n".join("a" * n), "\n***\n".join("a" * (n + 1))
    if kind == "nth_paragraph_first_word":
        parts = ["some text"] * a["num_paragraphs"]
        no = "\n\n".join(parts)
        parts[a["nth_paragraph"] - 1] = f"{a['first_word'].title()}, more"
        return "\n\n".join(parts), no
    if kind == "number_placeholders":
        n = a["num_placeholders"]
        return "[name] " * n, "x" + "[name] " * (n - 1)
    if kind == "number_bullet_lists":
        n = a["num_bullets"]
        return "* point\n" * n, "* point\n" * (n + 1)
    if kind == "number_highlighted_sections":
        n = a["num_highlights"]
        return "*part* " * n, "x" + "*part* " * (n - 1)
    if kind == "multiple_sections":
        parts = [f"{a['section_spliter']} {i + 1}\ntext" for i in range(a["num_sections"])]
        return "\n".join(parts), "\n".join(parts[1:])
    if kind == "postscript":
        return f"Bye.\n\n{a['postscript_marker']} more", "Bye.\n\nMore"
    if kind == "response_language":
        return HELLO[a["language"]], ENGLISH
    if kind == "end_checker":
        return f"Well. {a['end_phrase']}", f"{a['end_phrase']} Well."
    if kind == "repeat_prompt":
        return f"{a['prompt_to_repeat']}\n\nWell.", f"Well. {a['prompt_to_repeat']}"
    fixed = {
        "english_capital": (ENGLISH.upper(), ENGLISH.title()),
        "english_lowercase": (ENGLISH, ENGLISH.title()),
        "constrained_response": ("My answer is maybe.", "Maybe."),
        "json_format": ('```json\n{"a": 1}\n```', "a: 1"),
        "title": ("<<a>>", "<a>"),
        "quotation": ('"a"', '"a'),
        "no_comma": ("a b", "a, b"),
        "two_responses": ("a\n******\nb", "a\n******\na"),
    }
    return fixed[kind]


@pytest.fixture(scope="module")
def real_file(gsm8k_dir):
    path = gsm8k_dir.parent / "ifeval" / "input_data.jsonl"
    if not path.is_file():
        pytest.skip(f"no IFEval prompts at {path}")
    return path


@pytest.fixture(scope="module")
def real_rows(real_file):
    return [json.loads(line) for line in real_file.open("rb")]


def test_rows_become_query_key_names_and_arguments():
    td = IFEvalEnv(dataset=[ROW], num_envs=2, repeats=2).reset()
    assert list(td["query"]) == [ROW["prompt"]] * 2
    assert td["key"].tolist() == [7, 7]
    assert td["key"].dtype == torch.int64
    assert list(td["instruction_id_list"]) == [tuple(ROW["instruction_id_list"])] * 2
    assert list(td["kwargs"]) == [tuple(ROW["kwargs"])] * 2
    assert td["history"].prompt.role == [["system", "user"]] * 2


def test_the_whole_response_is_scored_without_a_system_prompt(answer):
    env = IFEvalEnv(dataset=[ROW], scored_part="response")
    td = env.reset()
    assert td["history"].prompt.role == [["user"]]
    after = env.step(answer(td, "<think>Hm, hm.</think>Hi my friend"))["next"]
    assert after["reward"].item() == pytest.approx(1.0)
    assert after["success"].all()
    assert IFEvalEnv.SYSTEM_PROMPT.count("<answer>") == 1
    own = IFEvalEnv(dataset=[ROW], scored_part="response", system_prompt="Be brief.")
    assert own.reset()["history"].prompt.role == [["system", "user"]]


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_an_answer_is_scored_in_every_input_mode(mode, tokenizer):
    env = IFEvalEnv(dataset=[ROW], input_mode=mode, tokenizer=tokenizer, num_envs=2)
    replies = iter(["<answer>Hi my friend</answer>", "<answer>Hi, you</answer>"])
    policy = AnsweringPolicy(mode, lambda prompt: next(replies), tokenizer)
    after = env.step(policy(env.reset()))["next"]
    assert after["reward"].flatten().tolist() == pytest.approx([1.1, 0.1])
    assert after["terminated"].all()


def test_the_specs_hold():
    check_env_specs(IFEvalEnv(dataset=[ROW], num_envs=3))
    check_env_specs(IFEvalEnv(dataset=[ROW], num_envs=3, scored_part="response", max_steps=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": 3}, "prompt must be a string"),
        ({"key": "7"}, "key a whole number"),
        ({"instruction_id_list": "punctuation:no_comma"}, "must be lists of one length"),
        ({"instruction_id_list": []}, "must be lists of one length"),
        ({"kwargs": [{}]}, "prompt 7: instruction_id_list and kwargs must be lists of one length"),
        ({"kwargs": {}}, "must be lists"),
        ({"kwargs": [{}, 3]}, "kwargs must be a list of dicts"),
    ],
)
def test_a_malformed_row_is_refused(change, message):
    with pytest.raises(DataError, match=message):
        IFEvalEnv(dataset=[ROW | change])


def test_a_file_without_a_column_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({k: v for k, v in ROW.items() if k != "kwargs"}))
    with pytest.raises(DataError, match="line 1 lacks the column 'kwargs'"):
        IFEvalEnv(data_files=path)


def test_without_files_the_hub_is_asked_whose_rows_name_every_argument(monkeypatch):
    every = dict.fromkeys(sorted({name for i in INSTRUCTIONS.values() for name in i.arguments}))
    hub_row = ROW | {"kwargs": [every | arguments for arguments in ROW["kwargs"]]}

    class Hub:
        @staticmethod
        def load_dataset(source, name):
            assert source == "google/IFEval"
            return {"train": [hub_row]}

    monkeypatch.setitem(sys.modules, "datasets", Hub)
    assert list(IFEvalEnv().reset()["kwargs"]) == [tuple(ROW["kwargs"])]


def test_data_has_a_spec_and_reads_rows():
    data = IFEvalData.from_rows([ROW, ROW])
    assert data.batch_size == (2,)
    assert data.key.tolist() == [7, 7]
    assert list(data.to_tensordict()["query"]) == [ROW["prompt"]] * 2
    spec = IFEvalData.default_spec((2,))
    assert spec.is_in(spec.zero())
    assert spec["key"].dtype == torch.int64
    with pytest.raises(DataError, match="key a whole number"):
        IFEvalData.from_rows([ROW | {"key": None}])
    with pytest.raises(DataError, match="at least one row"):
        IFEvalData.from_rows([])


def test_all_540_real_prompts_load_and_name_all_25_instructions(real_file, real_rows):
    env = IFEvalEnv(data_files=real_file, shuffle=False, num_envs=540)
    td = env.reset()
    assert len(real_rows) == 540
    assert list(td["query"]) == [row["prompt"] for row in real_rows]
    assert td["key"].tolist() == [row["key"] for row in real_rows]
    counts = Counter(name for names in td["instruction_id_list"] for name in names)
    assert counts.keys() == INSTRUCTIONS.keys()
    assert sum(counts.values()) == 832


def test_every_instruction_of_every_real_prompt_can_be_followed_and_broken(real_rows):
    checked = 0
    for row in real_rows:
        for name, arguments in zip(row["instruction_id_list"], row["kwargs"], strict=True):
            follows, breaks = examples(name, arguments)
            assert check(name, follows, arguments), (row["key"], name, follows)
            assert not check(name, breaks, arguments), (row["key"], name, breaks)
            checked += 1
    assert checked == 832


def test_every_real_prompt_is_scored_by_the_verdicts_on_its_instructions(real_file, real_rows):
    env = IFEvalEnv(data_files=real_file, shuffle=False, num_envs=540, scored_part="response")
    td = env.reset()
    # The response follows the first instruction of its prompt, and maybe others.
    texts = [examples(r["instruction_id_list"][0], r["kwargs"][0])[0] for r in real_rows]
    chats = td["history"].prompt.chats
    turns = [[{"role": "assistant", "content": text}] for text in texts]
    td["history"].full = History.of([a + b for a, b in zip(chats, turns, strict=True)])
    after = env.step(td)["next"]
    assert after["reward_valid"].all()
    verdicts = [
        [
            check(name, text.strip(), a)
            for name, a in zip(r["instruction_id_list"], r["kwargs"], strict=True)
        ]
        for text, r in zip(texts, real_rows, strict=True)
    ]
    scores = IFEvalScoreData.from_tensordict(after["ifeval_score"]).accuracies()
    assert all(verdict[0] for verdict in verdicts)
    assert scores["prompt_level_strict_acc"] == sum(map(all, verdicts)) / 540
    assert scores["inst_level_strict_acc"] == pytest.approx(sum(map(sum, verdicts)) / 832)
    assert scores["prompt_level_loose_acc"] >= scores["prompt_level_strict_acc"]
    assert after["success"].flatten().tolist() == [all(verdict) for verdict in verdicts]
