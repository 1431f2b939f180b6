"""RewardParser: one score a row, from the response only; a failing score is data."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from envs.fake_policy import AnsweringPolicy
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import Compose, Transform
from torchrl.envs.utils import check_env_specs

from torchrl_llm.data.column import Column
from torchrl_llm.data.ragged import lazy_rows, ragged_rows
from torchrl_llm.envs import ChatEnv, DatasetChatEnv, RewardParser, RewardScore
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.rewards import reward_runner
from torchrl_llm.rewards.reward_parser import extract_block, extract_tags

MODES = ("history", "text", "tokens")


class Scripted(RewardParser):
    """Scores by what the response asks for."""

    def score(self, response, answer):
        if "raise" in response:
            raise ZeroDivisionError("the judge fell over")
        results = {
            "nan": math.nan,
            "inf": math.inf,
            "shape": torch.ones(2),
            "none": None,
            "words": "good",
            "tensor": torch.tensor([[0.25]]),
            "score": RewardScore(0.5, success=True, has_answer=True, has_think=True),
            "quiet": RewardScore(0.0),
        }
        for word, result in results.items():
            if word in response:
                return result
        return float(response == answer)


def make_env(answers, parser=None, mode="history", tokenizer=None):
    rows = [{"query": "q", "answer": answer} for answer in answers]
    env = DatasetChatEnv(
        dataset=rows, shuffle=False, num_envs=len(rows), input_mode=mode, tokenizer=tokenizer
    )
    return env.append_transform(Scripted() if parser is None else parser)


def test_rewards_have_the_documented_keys_shapes_and_types(answer):
    env = make_env(["a", "b"])
    td = env.step(answer(env.reset(), "a", "score"))["next"]
    for key in ("reward", "reward_answer", "reward_think", "reward_right"):
        assert td[key].shape == (2, 1, 1)
        assert td[key].dtype == torch.float32
    assert td["reward"].flatten().tolist() == [1.0, 0.5]
    assert td["reward_answer"].flatten().tolist() == [1, 1]
    assert td["reward_think"].flatten().tolist() == [0, 1]
    assert td["reward_right"].flatten().tolist() == [1, 1]
    assert td["success"].shape == (2, 1, 1)
    assert td["success"].dtype == torch.bool
    assert td["reward_valid"].tolist() == [True, True]
    assert list(td["error", "type"]) == ["", ""]
    check_env_specs(env)


@pytest.mark.parametrize(
    ("response", "kind", "message"),
    [
        ("raise", "ZeroDivisionError", "the judge fell over"),
        ("nan", "RewardError", "finite"),
        ("inf", "RewardError", "finite"),
        ("shape", "RewardError", "one number, got a tensor"),
        ("none", "RewardError", "None"),
        ("words", "RewardError", "'good'"),
    ],
)
def test_a_failing_score_invalidates_its_row_and_no_other(answer, response, kind, message):
    env = make_env(["a", "b", "c"])
    td = env.step(answer(env.reset(), "a", response, "c"))["next"]
    assert td["reward"].flatten()[[0, 2]].tolist() == [1.0, 1.0]
    assert td["reward"].flatten()[1].isnan()
    assert td["reward_valid"].tolist() == [True, False, True]
    assert not td["success"].flatten()[1]
    assert list(td["error", "type"]) == ["", kind, ""]
    assert message in list(td["error", "message"])[1]
    assert td["done"].flatten().tolist() == [True, False, True]


def test_a_tensor_of_one_element_is_a_number(answer):
    env = make_env(["a"])
    assert env.step(answer(env.reset(), "tensor"))["next", "reward"].item() == 0.25


def test_an_answer_ends_the_episode_unless_told_otherwise(answer):
    for ends in (True, False):
        env = make_env(["a", "b"], Scripted(set_done_if_answer=ends))
        td = env.step(answer(env.reset(), "score", "quiet"))["next"]
        assert td["done"].flatten().tolist() == [ends, False]
        assert td["terminated"].flatten().tolist() == [ends, False]
        assert not td["truncated"].any()


@pytest.mark.parametrize("mode", MODES)
def test_defect_09_the_score_never_sees_the_prompt(mode, tokenizer):
    seen = []

    class Spy(RewardParser):
        def score(self, response, answer):
            seen.append(response)
            return float(extract_block(response, "answer") == answer)

    rows = [{"query": f"Write <answer>no {n}</answer>.", "answer": str(n)} for n in range(3)]
    env = DatasetChatEnv(
        dataset=rows,
        shuffle=False,
        num_envs=3,
        input_mode=mode,
        tokenizer=tokenizer,
        system_prompt="Write <answer>wrong</answer>.",
    ).append_transform(Spy())

    def reply(prompt):
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        number = text.rpartition("no ")[2][0]
        return f"so <answer>{number if number != '1' else 'x'}</answer>"

    td = env.step(AnsweringPolicy(mode, reply, tokenizer)(env.reset()))["next"]
    assert td["success"].flatten().tolist() == [True, False, True]
    assert [text.removesuffix("<|im_end|>") for text in seen] == [
        "so <answer>0</answer>",
        "so <answer>x</answer>",
        "so <answer>2</answer>",
    ]


def test_defect_09_padded_rows_of_tokens_mode_are_scored_one_by_one(tokenizer):
    env = make_env(["yes", "a longer yes"], mode="tokens", tokenizer=tokenizer)
    td = env.reset()
    texts = ["yes", "no, a longer no"]
    ids = [torch.tensor(tokenizer(text).input_ids) for text in texts]
    pad = tokenizer.pad_token_id
    response = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad)
    prompt = torch.nn.utils.rnn.pad_sequence(
        td["tokens"].get("prompt", as_list=True), batch_first=True, padding_value=pad
    )
    full = torch.cat([prompt, response], 1)
    td["tokens"] = TensorDict(prompt=prompt, response=response, full=full, batch_size=[2])
    td = env.step(td)["next"]
    assert td["success"].flatten().tolist() == [False, False]  # "yes<pad>..." is not "yes"

    class Starts(RewardParser):
        def score(self, response, answer):
            return float(response.startswith(answer))

    env = make_env(["yes", "a longer yes"], Starts(), mode="tokens", tokenizer=tokenizer)
    td = env.reset()
    td["tokens"] = TensorDict(prompt=prompt, response=response, full=full, batch_size=[2])
    assert env.step(td)["next", "success"].flatten().tolist() == [True, False]


@pytest.mark.parametrize("mode", MODES)
def test_the_input_mode_is_the_environments_unless_given(mode, tokenizer):
    env = DatasetChatEnv(dataset=[{"query": "q"}], input_mode=mode, tokenizer=tokenizer)
    assert Scripted().input_mode is None
    assert Scripted(in_keys=[("tokens", "full"), "answer"]).input_mode == "tokens"
    assert env.append_transform(Scripted()).transform[-1].input_mode == mode


@pytest.mark.parametrize("mode", MODES)
def test_the_three_input_modes_agree(mode, tokenizer):
    texts = iter(["a", "score", "raise", "nope"])
    env = make_env(["a", "b", "c", "d"], mode=mode, tokenizer=tokenizer)
    td = env.step(AnsweringPolicy(mode, lambda prompt: next(texts), tokenizer)(env.reset()))["next"]
    assert td["reward"].flatten()[[0, 1, 3]].tolist() == [1.0, 0.5, 0.0]
    assert td["reward_valid"].tolist() == [True, True, False, True]


def test_the_end_of_turn_token_is_not_part_of_the_response(answer):
    env = make_env(["a"], Scripted(eos_token="<|im_end|>"))
    assert env.step(answer(env.reset(), "a<|im_end|>"))["next", "reward"].item() == 1.0


def test_a_conversation_without_an_answer_of_the_model_is_invalid():
    env = make_env(["a"])
    td = env.reset()
    td["history"].full = td["history"].prompt
    td = env.step(td)["next"]
    assert td["reward_valid"].tolist() == [False]
    assert "assistant" in next(iter(td["error", "message"]))


def test_text_that_does_not_continue_its_prompt_is_invalid(tokenizer):
    env = make_env(["a"], mode="text", tokenizer=tokenizer)
    td = env.reset()
    td["text"]._tensordict["full"] = Column.of(["something else"])
    td = env.step(td)["next"]
    assert list(td["error", "type"]) == ["DataError"]


def test_rows_that_are_not_stepped_are_not_scored(answer):
    env = make_env(["a", "b"])
    td = answer(env.reset(), "a", "raise")
    td["_step"] = torch.tensor([True, False])
    td = env.step(td)["next"]
    assert td["reward"].flatten().tolist() == [1.0, 0.0]
    assert td["reward_valid"].tolist() == [True, True]
    assert td["done"].flatten().tolist() == [True, False]


class FakeTools(Transform):
    """Says of each row whether its turn only called tools to think."""

    def __init__(self, *auxiliary):
        super().__init__()
        self.auxiliary = torch.tensor(auxiliary).unsqueeze(-1)

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set(("tools", "auxiliary"), self.auxiliary)


def test_turns_that_only_called_tools_to_think_are_not_scored_and_go_on(answer):
    rows = [{"query": "q", "answer": answer} for answer in "abc"]
    env = DatasetChatEnv(dataset=rows, shuffle=False, num_envs=3)
    env = env.append_transform(FakeTools(False, True, True)).append_transform(Scripted())
    td = env.step(answer(env.reset(), "a", "raise", "c"))["next"]
    assert td["reward"].flatten().tolist() == [1.0, 0.0, 0.0]
    assert td["success"].flatten().tolist() == [True, False, False]
    assert td["reward_valid"].tolist() == [True, True, True]
    assert list(td["error", "type"]) == ["", "", ""]
    assert td["done"].flatten().tolist() == [True, False, False]


def test_turns_that_only_called_tools_are_not_scored_outside_an_environment_either():
    td = TensorDict(
        text=TensorDict(response=Column.of(["a", "raise"]), batch_size=[2]),
        answer=Column.of(["a", "b"]),
        next=TensorDict(
            tools=TensorDict(
                auxiliary=torch.tensor([[False], [True]]),
                num_calls=torch.tensor([0, 2]),
                batch_size=[2],
            ),
            batch_size=[2],
        ),
        batch_size=[2],
    )
    td = Scripted(input_mode="text")(td)
    assert td["next", "reward"].flatten().tolist() == [1.0, 0.0]
    assert td["next", "reward_valid"].all()
    assert td["next", "tools", "auxiliary"].flatten().tolist() == [False, True]
    assert td["next", "tools", "num_calls"].tolist() == [0, 2]


def test_scores_can_run_in_threads_in_row_order(answer):
    barrier = threading.Barrier(3, timeout=20)

    class Meeting(RewardParser):
        def score(self, response, answer):
            barrier.wait()  # passes only if three rows are scored at the same time
            return float(response)

    env = make_env(["", "", ""], Meeting(num_threads=3))
    td = env.step(answer(env.reset(), "1", "2", "3"))["next"]
    assert td["reward"].flatten().tolist() == [1, 2, 3]


def test_a_score_that_takes_too_long_is_invalid_and_the_others_are_not(answer):
    never = threading.Event()

    class Sometimes(RewardParser):
        def score(self, response, answer):
            if response == "wait":
                never.wait()
            return 1.0

    env = make_env(["", "", ""], Sometimes(num_threads=1, timeout=0.3))
    td = env.step(answer(env.reset(), "a", "wait", "b"))["next"]
    never.set()
    assert td["reward_valid"].tolist() == [True, False, True]
    assert list(td["error", "type"]) == ["", "RewardTimeoutError", ""]
    assert td["reward_seconds"][1] >= 0.3
    with pytest.raises(ConfigError, match="needs threads"):
        Scripted(timeout=1.0)


def test_seconds_are_those_of_each_row(answer, monkeypatch):
    clock = SimpleNamespace(now=5.0, perf_counter=lambda: clock.now, monotonic=time.monotonic)
    monkeypatch.setattr(reward_runner, "time", clock)

    class Slow(RewardParser):
        def score(self, response, answer):
            clock.now += float(response)
            return 1.0

    env = make_env(["", ""], Slow())
    seconds = env.step(answer(env.reset(), "0.25", "2"))["next", "reward_seconds"]
    assert seconds.dtype == torch.float32
    assert seconds.tolist() == [0.25, 2.0]


def test_keys_can_be_renamed(answer):
    parser = Scripted(
        in_keys=[("history", "full"), "gold"], out_keys=["ra", "rt", "rr", "r", "won"]
    )
    rows = [{"query": "q", "gold": "a"}]
    env = DatasetChatEnv(dataset=rows).append_transform(parser)
    td = env.step(answer(env.reset(), "a"))["next"]
    assert td["r"].item() == 1.0
    assert td["won"].item()
    check_env_specs(env)


def test_rows_outside_an_environment_are_scored_into_next():
    td = TensorDict(
        text=TensorDict(response=Column.of(["a", "x"]), batch_size=[2]),
        answer=Column.of(["a", "b"]),
        batch_size=[2],
    )
    td = Scripted(input_mode="text")(td)
    assert td["next", "reward"].flatten().tolist() == [1.0, 0.0]
    assert td["next", "reward_valid"].all()
    with pytest.raises(ConfigError, match="input_mode"):
        Scripted()(TensorDict(batch_size=[1]))
    with pytest.raises(ConfigError, match="tokenizer"):
        Scripted(input_mode="tokens")(TensorDict(batch_size=[1]))


def test_tokens_outside_an_environment_are_decoded(tokenizer):
    ids = [torch.tensor(tokenizer(text).input_ids) for text in ("a", "x")]
    td = TensorDict(
        tokens=ragged_rows({"response": ids}), answer=Column.of(["a", "b"]), batch_size=[2]
    )
    td = Scripted(tokenizer, input_mode="tokens")(td)
    assert td["next", "reward"].flatten().tolist() == [1.0, 0.0]
    assert ("next", "done") not in td.keys(True)


def test_what_is_missing_or_contradictory_is_named(queries, answer):
    env = ChatEnv(batch_size=(1,)).append_transform(Scripted())
    with pytest.raises(DataError, match="lack 'answer'"):
        env.step(answer(env.reset(queries("q")), "a"))
    with pytest.raises(ConfigError, match="in_keys"):
        Scripted(in_keys=["text"])
    with pytest.raises(ConfigError, match="contradicts"):
        Scripted(in_keys=[("text", "full"), "answer"], input_mode="history")
    for wrong in ({"input_mode": "chat"}, {"in_keys": [("full", "text"), "answer"]}):
        with pytest.raises(ConfigError, match=r"input_mode must be one of .*'history'"):
            Scripted(**wrong)
    with pytest.raises(ConfigError, match="out_keys"):
        Scripted(out_keys=["reward"])


def test_defect_31_a_batch_is_written_at_once(monkeypatch, answer):
    env = make_env(["a"] * 64)
    td = answer(env.reset(), *["a"] * 64)
    made = []
    original = TensorDict.__init__
    monkeypatch.setattr(
        TensorDict, "__init__", lambda self, *a, **k: (made.append(1), original(self, *a, **k))[1]
    )
    env.step(td)
    assert len(made) < 30  # one tensordict a sample would be 64 and more


def test_blocks_and_tags_are_found_in_linear_time():
    assert extract_block("<answer>1", "answer") is None
    assert extract_block("1</answer>", "answer") is None
    assert extract_block("</answer><answer>", "answer") is None
    assert extract_block("<answer> 1\n</answer>", "answer") == "1"
    assert extract_block("<answer>1</answer><answer>2", "answer") == "1"
    assert extract_tags("<think>a<answer>1</answer></think>") == ("a<answer>1</answer>", None)
    assert extract_tags("so</think><answer>1</answer>") == ("so", "1")
    assert extract_tags("<answer>1</answer>") == (None, "1")
    # half a megabyte of opened tags: quadratic search would take minutes
    assert extract_tags("<answer>" * 60_000) == (None, None)


class Constant(RewardParser):
    """The number that it is made with; fails where it is NaN."""

    def __init__(self, value, **kwargs):
        super().__init__(**kwargs)
        self.value = value

    def score(self, response, answer):
        return RewardScore(self.value, success=self.value > 1, has_answer=True)


class TestSeveral:
    @pytest.mark.parametrize("values", [(2.0,), (2.0, 0.5), (0.5, 0.25, 2.0)])
    def test_rewards_of_one_step_add_up(self, answer, values):
        env = make_env(["a", "b"], Constant(values[0]))
        for value in values[1:]:
            env = env.append_transform(Constant(value))
        for _ in range(2):  # nothing is carried to the next step
            td = env.step(answer(env.reset(), "a", "b"))["next"]
            assert td["reward"].flatten().tolist() == [sum(values)] * 2
        assert td["reward_answer"].flatten().tolist() == [len(values)] * 2
        assert td["success"].all()
        assert td["success"].dtype == torch.bool

    @pytest.mark.parametrize("order", [(math.nan, 2.0), (2.0, math.nan)])
    def test_a_row_is_valid_where_all_are_and_says_what_failed(self, answer, order):
        env = make_env(["a"], Constant(order[0])).append_transform(Constant(order[1]))
        td = env.step(answer(env.reset(), "a"))["next"]
        assert math.isnan(td["reward"].item())
        assert not td["reward_valid"].item()
        assert list(td["error", "type"]) == ["RewardError"]

    def test_in_a_replay_buffer_they_add_up_at_every_sample_and_do_not_pile_up(self):
        rows = lazy_rows([TensorDict(text={"response": "a"}, answer="a") for _ in range(2)])
        transforms = [Constant(value, input_mode="text") for value in (2.0, 0.5)]
        buffer = ReplayBuffer(
            storage=LazyStackStorage(2), transform=Compose(*transforms), batch_size=2
        )
        buffer.extend(rows)
        for _ in range(2):
            assert buffer.sample()["next", "reward"].flatten().tolist() == [2.5, 2.5]

    def test_rollouts_of_two_dimensions_are_scored(self):
        text = TensorDict(response=Column.of(["a", "b", "raise", "a"]), batch_size=[4])
        td = TensorDict(text=text, answer=Column.of("abab"), batch_size=[4]).reshape(2, 2)
        td = Scripted(input_mode="text")(td)["next"]
        assert td.batch_size == (2, 2)
        assert td["reward"][:, :, 0, 0].nan_to_num(-1).tolist() == [[1, 1], [-1, 0]]
        assert td["reward_valid"].tolist() == [[True, True], [False, True]]
        assert td["error", "type"][1][0] == "ZeroDivisionError"

    def test_a_reward_of_tokens_is_not_added_to_one_of_the_response(self):
        td, following = TensorDict(batch_size=[1]), TensorDict(batch_size=[1])
        td["text"] = TensorDict(response=Column.of(["a"]), batch_size=[1])
        td["answer"] = Column.of(["a"])
        following["reward"] = torch.zeros(1, 3, 1)
        with pytest.raises(DataError, match="CompositeReward"):
            Constant(1.0, input_mode="text")._step(td, following)
