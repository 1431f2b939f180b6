"""AddThinkingPrompt: which rows, what is kept of a turn, and what of it is trained."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_llm.data import FinishReason, Source, TokenRecord
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.data.text.codec import Codec
from torchrl_llm.envs import DatasetChatEnv
from torchrl_llm.envs.transforms import AddThinkingPrompt, StepCounter
from torchrl_llm.envs.transforms.thinking import _reopened, edit_turn
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import FakeWrapper
from torchrl_llm.modules.backends.fake import Answer
from torchrl_llm.rewards import RewardParser
from torchrl_llm.rewards.reward_parser import extract_block
from torchrl_llm.rewards.reward_scorer import RewardScore

ROWS = [{"query": "3 * 4?", "answer": "12"}]


class Exact(RewardParser):
    def score(self, response, answer):
        if "boom" in response:
            raise ValueError("boom")
        said = extract_block(response, "answer")
        return RewardScore(float(said == answer), said == answer, has_answer=said is not None)


def wrong(row):
    return not bool(row["success"])


def make_env(transform, *, rows=ROWS, num_envs=1, max_steps=5, **options):
    env = DatasetChatEnv(dataset=rows, shuffle=False, num_envs=num_envs, **options)
    for part in (Exact(), StepCounter(max_steps=max_steps), transform):
        env = env.append_transform(part)
    return env


def policy_of(tokenizer, *answers):
    return FakeWrapper(list(answers), tokenizer=tokenizer)


WRONG = "I think <answer>13</answer> so"
RIGHT = " no: <answer>12</answer>"


# -- the text


def test_a_turn_without_an_answer_gets_a_new_paragraph():
    assert edit_turn("It is 12.\n", "Wait,") == "It is 12.\n\nWait,"
    assert edit_turn("", "Wait,") == "Wait,"


def test_only_the_last_answer_goes_and_what_stands_behind_it():
    text = "<answer>1</answer> no, <answer>2</answer> done"
    assert edit_turn(text, "Wait,") == "<answer>1</answer> no, Wait,"


def test_an_open_or_a_lonely_closing_tag_is_no_answer():
    assert edit_turn("<answer>1", "Wait,") == "<answer>1\n\nWait,"
    assert edit_turn("1</answer>", "Wait,") == "1</answer>\n\nWait,"


# -- the record


def _record(tokenizer, text, ending=(), reason=FinishReason.STOP):
    prompt = TokenRecord.from_prompt(torch.tensor([1, 5]), torch.tensor([0, 0]), 1)
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], *ending]
    return prompt.respond(torch.tensor(ids), -torch.rand(len(ids)), 4, reason)


_TEXTS = st.text(alphabet="ab é🙂<>/\n =", max_size=12)


@settings(deadline=None, max_examples=60)
@given(_TEXTS, _TEXTS, st.sampled_from(["Wait,", " é?", "<|im_end|>"]))
def test_a_reopened_record_spells_the_edited_turn(before, after, prompt):
    tokenizer = _tokenizer()
    text = f"{before}<answer>1</answer>{after}"
    old = _record(tokenizer, text, [2])
    new = _reopened(old, Codec(tokenizer), prompt)
    assert tokenizer.decode(new.token_ids[2:]) == edit_turn(text, prompt)
    forced = new.source == Source.FORCED
    kept = int((~forced).sum())
    assert forced.tolist() == sorted(forced.tolist())
    for column in ("token_ids", "source", "turn", "policy_version", "log_probs"):
        assert torch.equal(getattr(new, column)[:kept], getattr(old, column)[:kept])
    assert not (new.token_ids[kept:] < 3).any()  # no special token, whatever the prompt spells


@pytest.fixture(scope="module", autouse=True)
def _shared(make_tokenizer):
    global _tokenizer
    made = make_tokenizer()
    _tokenizer = lambda: made  # noqa: E731


def test_a_token_on_both_sides_of_the_cut_is_forced_on_this_side(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["=<"])
    old = _record(tokenizer, "x =<answer>1</answer>")
    new = _reopened(old, Codec(tokenizer), "Wait,")
    assert tokenizer.decode(new.token_ids[2:]) == "x =Wait,"
    kept = new.token_ids[new.source == Source.SAMPLED]
    assert tokenizer.decode(kept) == "x "


# -- in an environment


@pytest.mark.parametrize("tokenized", [False, True])
def test_the_model_continues_its_opened_turn_token_for_token(tokenized, tokenizer):
    env = make_env(
        AddThinkingPrompt(wrong, "Wait,", tokenizer=None if tokenized else tokenizer),
        tokenizer=tokenizer if tokenized else None,
    )
    steps = env.rollout(4, policy_of(tokenizer, WRONG, RIGHT))
    assert steps.shape == (1, 2)
    first, second = steps[0, 0], steps[0, 1]
    [chat] = second["history"].full.chats
    assert [m["role"] for m in chat] == ["user", "assistant"]
    assert chat[-1]["content"] == "I think Wait, no: <answer>12</answer>"
    assert second["next", "reward"].item() == 1.0
    assert first["next", "reward"].item() == 0.0
    assert second["next", "done"].item()

    said = first["tokens", "response"]
    prompt = second["tokens", "prompt"]
    asked = first["tokens", "prompt"]
    kept = len(tokenizer("I think ", add_special_tokens=False)["input_ids"])
    assert torch.equal(prompt[: len(asked)], asked)
    assert torch.equal(prompt[len(asked) : len(asked) + kept], said[:kept])
    record = chat.record
    sources = record.source[len(asked) :].tolist()
    forced = len(prompt) - len(asked) - kept
    sampled = len(record.source) - len(prompt)
    assert sources == [3] * kept + [4] * forced + [3] * sampled
    assert record.fork_cause == "turn_edited"
    assert set(record.turn[record.source == Source.SAMPLED].tolist()) == {0}


def test_each_sampled_token_is_trained_once_and_no_forced_one(tokenizer):
    env = make_env(AddThinkingPrompt(wrong, "Wait,"), tokenizer=tokenizer)
    steps = env.rollout(4, policy_of(tokenizer, WRONG, "", RIGHT))
    buffer = ReplayBuffer(transform=JoinTurns())
    buffer.extend([steps[0, i] for i in range(steps.shape[1])])
    # the second turn was empty but for its end: nothing of it but that end is taken out
    trained = [
        row["tokens", "full"][row["trace", "mask_reason"] == 0].tolist()
        for row in (buffer[i] for i in range(len(buffer)))
    ]
    sampled = [ids.tolist() for i in range(3) for ids in [steps[0, i]["tokens", "response"]]]
    assert trained == sampled
    joined = buffer[1]
    assert not joined["masks", "all_assistant_mask"][
        joined["trace", "source"] == Source.FORCED
    ].any()


def test_a_turn_that_was_cut_before_an_answer_only_grows_and_is_no_fork(tokenizer):
    env = make_env(AddThinkingPrompt(wrong, "Wait,"), tokenizer=tokenizer)
    cut = Answer("I think", FinishReason.LENGTH)
    steps = env.rollout(4, policy_of(tokenizer, cut, RIGHT))
    full, prompt = steps[0, 0]["tokens", "full"], steps[0, 1]["tokens", "prompt"]
    assert torch.equal(prompt[: len(full)], full)
    assert tokenizer.decode(prompt[len(full) :]) == "\n\nWait,"
    [chat] = steps[0, 1]["history"].full.chats
    assert chat.record.fork_cause is None
    buffer = ReplayBuffer(transform=JoinTurns())
    assert len(buffer.extend([steps[0, 0], steps[0, 1]])) == 1


def test_without_a_tokenizer_the_turn_is_encoded_anew_and_still_continued(tokenizer):
    env = make_env(AddThinkingPrompt(wrong, "Wait,"))
    steps = env.rollout(4, policy_of(tokenizer, WRONG, RIGHT))
    [chat] = steps[0, 1]["history"].full.chats
    assert chat[-1]["content"] == "I think Wait, no: <answer>12</answer>"
    assert len(chat) == 2
    record = chat.record
    assert record.fork_cause == "turn_edited"
    start = len(steps[0, 1]["tokens", "prompt"])
    assert not (record.source[:start] == Source.SAMPLED).any()
    opened = record.source[record.response_start : start]
    assert set(opened.tolist()) == {int(Source.FORCED)}
    assert set(record.turn[start:].tolist()) == {0}


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_message_of_its_own_keeps_every_id(role, tokenizer):
    transform = AddThinkingPrompt(wrong, "Again.", role=role, edit_last_turn=False)
    env = make_env(transform, tokenizer=tokenizer)
    steps = env.rollout(4, policy_of(tokenizer, WRONG, RIGHT))
    full, prompt = steps[0, 0]["tokens", "full"], steps[0, 1]["tokens", "prompt"]
    assert torch.equal(prompt[: len(full)], full)
    [chat] = steps[0, 1]["history"].full.chats
    assert [m["role"] for m in chat] == ["user", "assistant", role, "assistant"]
    assert chat.record.fork_cause is None
    assert set(chat.record.turn.tolist()) == {-1, 0, 1}
    assert steps[0, 0]["next", "reward_answer"].item() == 1.0  # zero_reward is off without editing


def test_only_the_rows_of_the_condition_change(tokenizer):
    rows = [{"query": "a", "answer": a} for a in ("13", "12", "0")]
    env = make_env(AddThinkingPrompt(wrong, "Wait,"), rows=rows, num_envs=3, tokenizer=tokenizer)
    td = policy_of(tokenizer, WRONG, WRONG, "boom")(env.reset())
    after = env.step(td)["next"]
    assert after["done"].flatten().tolist() == [True, False, False]
    assert after["terminated"].flatten().tolist() == [True, False, False]
    contents = [chat[-1]["content"] for chat in after["history"].prompt.chats]
    assert contents == [WRONG, "I think Wait,", "boom\n\nWait,"]
    assert after["success"].flatten().tolist() == [True, False, False]
    assert after["reward"].flatten()[:2].tolist() == [1.0, 0.0]
    assert after["reward_answer"].flatten()[:2].tolist() == [1.0, 0.0]
    # an invalid reward is no zero
    assert after["reward"].flatten()[2].isnan()
    assert after["reward_valid"].tolist() == [True, True, False]


def test_done_and_reward_can_stay(tokenizer):
    transform = AddThinkingPrompt(wrong, "Wait,", zero_reward=False, undo_done=False)
    env = make_env(transform, tokenizer=tokenizer)
    after = env.step(policy_of(tokenizer, WRONG)(env.reset()))["next"]
    assert after["done"].item()
    assert after["reward_answer"].item() == 1.0


@pytest.mark.parametrize("answer", [WRONG, "no answer"])
def test_a_row_at_its_limit_of_turns_is_over(answer, tokenizer):
    env = make_env(AddThinkingPrompt(wrong, "Wait,"), max_steps=2, tokenizer=tokenizer)
    steps = env.rollout(10, policy_of(tokenizer, answer))
    assert steps.shape == (1, 2)
    assert steps[0, -1]["next", "history"].prompt.chats[0][-1]["content"].endswith(answer)


def test_rows_that_are_not_stepped_are_left_alone(tokenizer):
    rows = [{"query": q, "answer": "0"} for q in "ab"]
    env = make_env(AddThinkingPrompt(wrong, "Wait,"), rows=rows, num_envs=2, tokenizer=tokenizer)
    td = policy_of(tokenizer, WRONG)(env.reset())
    td["_step"] = torch.tensor([True, False])
    chats = env.step(td)["next", "history"].prompt.chats
    assert [len(chat) for chat in chats] == [2, 1]


def test_random_prompts_are_the_same_for_the_same_trajectory_and_turn(tokenizer):
    def said(worker):
        transform = AddThinkingPrompt(wrong, random_prompt=True)
        env = make_env(transform, num_envs=8, rows=ROWS * 8, tokenizer=tokenizer, worker_id=worker)
        chats = env.step(policy_of(tokenizer, WRONG)(env.reset()))["next", "history"].prompt.chats
        return [chat[-1]["content"].removeprefix("I think ") for chat in chats]

    assert said(3) == said(3)
    assert said(3) != said(4)
    assert len(set(said(3))) > 1
    assert set(said(3)) <= set(AddThinkingPrompt.DEFAULT_PROMPTS_EG)


def test_the_tokens_of_the_environment_are_those_of_the_opened_turn(tokenizer):
    from torchrl_llm.envs import ChatEnv

    env = ChatEnv(batch_size=(1,), tokenizer=tokenizer, with_tokenizer=True)
    env = env.append_transform(AddThinkingPrompt(lambda row: True, "Wait,", tokenizer=tokenizer))
    from tensordict import TensorDict

    td = env.reset(TensorDict(query=["a"], batch_size=[1]))
    after = env.step(policy_of(tokenizer, WRONG)(td))["next"]
    [ids] = read_rows(after, ("tokens", "prompt"))
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\nI think Wait,")


@pytest.mark.parametrize(
    "arguments",
    [
        {"role": "user"},
        {"prompt": "x", "random_prompt": True},
        {"prompt": " "},
        {"edit_last_turn": False, "tokenizer": object()},
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments):
    with pytest.raises(ConfigError):
        AddThinkingPrompt(wrong, **arguments)


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_a_turn_can_be_edited_in_history_mode_only(mode, tokenizer):
    with pytest.raises(ConfigError, match="edit_last_turn=False"):
        make_env(AddThinkingPrompt(wrong, "Wait,"), tokenizer=tokenizer, input_mode=mode)


@pytest.mark.parametrize("mode", ["text", "tokens"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_message_of_its_own_works_in_every_input_mode(mode, role, tokenizer):
    def walk(mode):
        transform = AddThinkingPrompt(wrong, "Again.", role=role, edit_last_turn=False)
        rows = [{"query": "a", "answer": "13"}, {"query": "b", "answer": "12"}]
        env = make_env(transform, rows=rows, num_envs=2, tokenizer=tokenizer, input_mode=mode)
        policy = FakeWrapper([WRONG, WRONG, RIGHT, RIGHT], tokenizer=tokenizer, input_mode=mode)
        first = env.step(policy(env.reset()))
        return first, policy(env.step_mdp(first))

    first, second = walk(mode)
    assert first["next", "done"].flatten().tolist() == [True, False]
    ids = [read_rows(td, ("tokens", "full"))[1] for td in (first, second)]
    assert torch.equal(ids[1][: len(ids[0])], ids[0])
    told = tokenizer.decode(read_rows(second, ("tokens", "prompt"))[1])
    assert told.count("Again.") == 1
    [_, expected] = read_rows(walk("history")[1], ("tokens", "full"))
    assert torch.equal(ids[1], expected)
