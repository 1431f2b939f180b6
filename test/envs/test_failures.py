"""What fails in a reward, a tool or a world is shown: the first of its kind, with its row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rewards import scorers
from tools.process_worker import Worker

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data import failures
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.data.row_text import row_text
from torchrl_llm.data.wire import pack_rows, unpack_row_list
from torchrl_llm.envs import DatasetChatEnv, TicTacToeEnv
from torchrl_llm.modules import FakeWrapper, load_tokenizer
from torchrl_llm.rewards import Component, CompositeReward, JudgeReward, RewardParser
from torchrl_llm.tools import HermesParser, ProcessTool, ToolTransform
from torchrl_llm.trainers import rollout_metrics

MOVE = "<move>5</move>"


class Reads(RewardParser):
    """A reward that trusts the model, and fails in a library."""

    def score(self, response, answer):
        return json.loads(response)


class Fancy(RewardParser):
    """Each failure is a type of its own."""

    def score(self, response, answer):
        raise type(f"Error{response}", (Exception,), {})(response)


class Silent(RewardParser):
    def score(self, response, answer):
        return None


class Chained(RewardParser):
    def score(self, response, answer):
        try:
            return 1 / 0
        except ZeroDivisionError as error:
            raise ValueError("no ratio") from error


def lookup(word: str) -> str:
    """Look up a word.

    Args:
        word: what to look up.
    """
    return {"a": "b"}[word]


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(failures, "_said", set())
    monkeypatch.setattr(failures.logger, "warning", lines.append)
    return lines


def answer(td, responses):
    chats = zip(td["history"].prompt.chats, responses, strict=True)
    chats = [chat + [{"role": "assistant", "content": text}] for chat, text in chats]
    td["history"].full = type(td["history"].prompt).of(chats)


def stepped(transform, responses):
    rows = [{"query": f"{n}?", "answer": f"{n}!"} for n in range(len(responses))]
    env = DatasetChatEnv(dataset=rows, num_envs=len(rows), shuffle=False)
    env = env.append_transform(transform)
    td = env.reset()
    answer(td, responses)
    out = env.step(td)["next"]
    transform.close()
    return out


def place(text, name="score", file=__file__):
    """Where a text stands in a file."""
    lines = Path(file).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if text in line)
    return f"{file}:{number}, in {name}"


def printed(where):
    """A place as tracebacks have it."""
    file, _, rest = where.rpartition(":")
    line, _, name = rest.partition(", in ")
    return f'  File "{file}", line {line}, in {name}'


@pytest.mark.parametrize("num_threads", [0, 3])
def test_the_first_exception_of_a_kind_is_shown_as_python_prints_it_with_its_row(said, num_threads):
    where = place("json.loads(")
    out = stepped(Reads(num_threads=num_threads), ["1", "no\nidea", "neither"])
    assert list(out["error", "place"]) == ["", where, where]
    assert list(out["error", "source"]) == ["", "reward", "reward"]
    [text] = said
    assert text.startswith("reward failed 2 times in a batch of 3 rows.")
    _, *lines, query, response, expected = text.splitlines()
    assert lines[:3] == [
        "Traceback (most recent call last):",
        printed(where),
        "    return json.loads(response)",
    ]
    assert lines[-1] == "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    assert str(Path(failures.__file__).parents[1]) not in text
    rows = ["  query:    1?", r"  response: no\nidea", "  answer:   1!"]
    assert [query, response, expected] == rows
    stepped(Reads(num_threads=num_threads), ["no"])
    assert len(said) == 1


@pytest.mark.parametrize("run", ["inline", "threads", "processes"])
def test_a_component_is_named_wherever_it_runs_and_also_where_it_is_optional(said, run):
    # Whether it is optional is nothing to the processes, which take seconds to start.
    for optional in (False, True)[: 1 if run == "processes" else 2]:
        failures._said.clear()
        failing = Component(scorers.Scripted(), run=run, num_workers=1, optional=optional)
        parts = {"first": Component(scorers.Constant(1.0)), "share": failing}
        out = stepped(CompositeReward(parts), ["raise", "1"])
        where = place("raise ZeroDivisionError", file=scorers.__file__)
        assert out["reward_valid"].tolist() == [optional, True]
        assert list(out["error", "place"]) == ["" if optional else where, ""]
        [text] = said
        assert text.startswith("component 'share' failed 1 time in a batch of 2 rows.")
        assert printed(where) in text
        assert 'raise ZeroDivisionError("by zero")\nZeroDivisionError: by zero\n  query:' in text
        said.clear()


def test_a_judge_that_raises_is_shown_with_the_row_that_it_was_to_judge(said):
    def ask(conversations):
        raise ConnectionError("the judge is down")

    parts = {"first": Component(scorers.Constant(1.0)), "judge": Component(JudgeReward(ask))}
    stepped(CompositeReward(parts), ["a", "b"])
    [text] = said
    assert text.startswith("component 'judge' failed 2 times in a batch of 2 rows.")
    assert printed(place("raise ConnectionError", "ask")) in text
    assert "ConnectionError: the judge is down\n  query:    0?\n  response: a" in text


def test_a_message_without_end_hides_neither_its_type_nor_its_place(said):
    class Endless(RewardParser):
        def score(self, response, answer):
            try:
                return 1 / 0
            except ZeroDivisionError as error:
                raise ValueError("x" * 100_000) from error

    out = stepped(Endless(), ["a"])
    where = place('ValueError("x"')
    assert list(out["error", "place"]) == [where]
    [text] = said
    assert f"{printed(where)}\n" in text
    assert "\nValueError: xxx" in text
    assert "ZeroDivisionError: division by zero\n\nThe above" in text
    assert len(text) < 5000


def test_what_failed_in_an_evaluation_is_not_said_to_be_counted_in_training(said):
    stepped(Silent(), ["a"])
    assert "train/reward_errors counts them, or eval/invalid in an evaluation" in said[0]


def test_causes_are_shown_too(said):
    stepped(Chained(), ["a"])
    assert "ZeroDivisionError: division by zero\n\nThe above exception was the direct" in said[0]


def test_what_a_reward_returned_has_no_place_and_endless_kinds_do_not_fill_the_log(said):
    out = stepped(Silent(), ["a"])
    assert list(out["error", "place"]) == [""]
    assert said[0].splitlines()[1] == (
        "torchrl_llm.errors.RewardError: a reward must be one number, got None"
    )
    stepped(Fancy(), [str(number) for number in range(300)])
    assert len(said) == 100
    assert said[-1].endswith("100 kinds of errors were shown; others are counted only.")


def test_a_world_that_fails_is_shown(said, monkeypatch):
    env = TicTacToeEnv(num_envs=2, player="X")

    def bug(state, action):
        raise KeyError("board")

    monkeypatch.setattr(env.game, "step", bug)
    td = env.reset()
    answer(td, [MOVE] * 2)
    out = env.step(td)["next"]
    where = place("raise KeyError", "bug")
    assert list(out["error", "place"]) == [where] * 2
    assert list(out["error", "source"]) == ["environment"] * 2
    [text] = said
    assert text.startswith("environment failed 2 times in a batch of 2 rows.")
    assert f"{printed(where)}\n    raise KeyError" in text
    assert f"\n  response: {MOVE}" in text


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"reward": None}, "a reward must be one number, got None"),
        ({"reward": "1"}, "a reward must be one number, got '1'"),
        ({"reward": [1.0, 2.0]}, "a reward must be one number, got list"),
        ({"reward": float("nan")}, "a reward must be finite in float32, got nan"),
        ({"reward": 10**400}, "a reward must be finite in float32, got inf"),
        ({"terminated": None}, "terminated must be True or False, got None"),
    ],
)
def test_what_a_world_returns_and_no_world_may_is_shown_and_ends_its_episode_only(
    said, monkeypatch, told, message
):
    env = TicTacToeEnv(num_envs=2, player="X")
    step = env.game.step
    monkeypatch.setattr(env.game, "step", lambda *given: step(*given)._replace(**told))
    td = env.reset()
    answer(td, [MOVE] * 2)
    out = env.step(td)["next"]
    assert not out["reward_valid"].any()
    assert out["done"].all()
    assert list(out["error", "message"]) == [message] * 2
    [text] = said
    assert text.startswith("environment failed 2 times in a batch of 2 rows.")


def hermes(tool, **arguments):
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def test_a_tool_that_raises_is_shown_and_what_the_model_does_wrong_is_not(said):
    responses = [hermes("lookup", word=word) for word in "xay"]
    wrong = [hermes("nope"), hermes("lookup", word=3, more=4), "<tool_call>{"]
    out = stepped(ToolTransform([lookup], HermesParser()), responses + wrong)
    assert out["tools", "num_failed"].tolist() == [1, 0, 1, 1, 1, 1]
    failed = [
        [call.get("failure") for call in calls] for calls in out["tools"].get("calls").tolist()
    ]
    assert [bool(calls[0]) for calls in failed] == [True, False, True, False, False, False]
    [text] = said
    assert text.startswith("tool 'lookup' failed 2 times in a batch of 6 rows.")
    where = place('return {"a": "b"}[word]', "lookup")
    assert f'{printed(where)}\n    return {{"a": "b"}}[word]\n' in text
    assert "\nKeyError: 'x'\n  query:    0?\n  response: <tool_call>" in text


@pytest.mark.parametrize(
    ("do", "kind"),
    [({"do": "raise", "value": "no"}, "ValueError"), ({"do": "spin"}, "ToolTimeout")],
)
def test_a_tool_in_another_process_is_shown_with_what_is_known_of_it(said, do, kind):
    tool = ProcessTool(Worker(), num_processes=1, limit_s=60.0 if kind == "ValueError" else 0.5)
    stepped(ToolTransform([tool], HermesParser()), [hermes("work", **do)])
    [text] = said
    assert text.startswith("tool 'work' failed 1 time in a batch of 1 rows.")
    assert f"\n{kind}: " in text
    assert ("raise ValueError(value)" in text) == (kind == "ValueError")


def collected(*transforms, responses):
    """Rows of one step as a collector elsewhere delivers them."""
    rows = [{"query": f"{n}?", "answer": f"{n}!"} for n in range(len(responses))]
    env = DatasetChatEnv(dataset=rows, num_envs=len(rows), shuffle=False)
    for transform in transforms:
        env = env.append_transform(transform)
    collector = LLMCollector(
        env,
        policy=FakeWrapper(responses, tokenizer=load_tokenizer()),
        dialog_turns_per_batch=len(rows),
        flatten_data=True,
    )
    batch = next(iter(collector))
    collector.shutdown()
    return lazy_rows(unpack_row_list(pack_rows(batch)))


def test_what_failed_in_a_collector_elsewhere_is_shown_here_in_the_same_words(said):
    parts = {
        "task": Component(Reads()),
        "optional": Component(scorers.Fails(), optional=True),
        "weightless": Component(lambda sample: sample.nothing, weight=0.0),
    }
    responses = ["1", "fail", hermes("lookup", word="x"), "2"]
    transforms = (ToolTransform([lookup], HermesParser()), CompositeReward(parts))
    rows = collected(*transforms, responses=responses)
    there = list(said)
    assert [text.partition(" failed")[0] for text in there] == [
        "tool 'lookup'",
        "component 'task'",
        "component 'optional'",
        "component 'weightless'",
    ]
    said.clear()
    failures._said.clear()
    failures.tell_failures_of(row_list(rows))
    assert sorted(said) == sorted(there)


def test_rows_are_counted_by_what_failed_in_them(said):
    responses = ["1", "no", hermes("lookup", word="x"), "2"]
    rows = collected(ToolTransform([lookup], HermesParser()), Reads(), responses=responses)
    metrics = rollout_metrics(rows)
    # The call took no step of the environment, so its turn was not scored.
    assert (metrics["train/reward_errors"], metrics["train/tool_errors"]) == (1, 1)
    assert "train/env_errors" not in metrics


def test_a_row_that_cannot_be_shown_does_not_end_the_run(said):
    failures.tell_failures([failures.Failure("KeyError", "'x'")], {}.__getitem__, 1)
    assert said[0].endswith("  (the row cannot be shown: KeyError: 0)")


def test_a_row_as_text_has_what_the_model_read_last_where_that_is_not_the_query():
    env = TicTacToeEnv(num_envs=1, player="X", shuffle=False)
    td = env.reset()
    answer(td, ["hm"])
    td = env.step_mdp(env.step(td))
    answer(td, ["x" * 1000])
    query, prompt, response = row_text(td[0]).splitlines()
    assert query.startswith("  query:    1 2 3")
    assert prompt.startswith("  prompt:   No <move>...</move> in your answer.")
    assert response == f"  response: {'x' * 200} ... {'x' * 100}"
