"""Messages behind a turn: turns without a token, and prompts that somebody has rewritten."""

from __future__ import annotations

import pytest
import torch
from torchrl.envs import Transform

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.envs import ChatEnv
from torchrl_llm.envs.games import TicTacToeEnv
from torchrl_llm.envs.transforms import TruncatedThinking
from torchrl_llm.errors import TemplateError
from torchrl_llm.modules import Answer, FakeWrapper

MODES = ("history", "text", "tokens")
USER = {"role": "user", "content": "Go"}


class Ask(Transform):
    """The user asks again, in every row."""

    def _step(self, tensordict, next_tensordict):
        size = next_tensordict.batch_size.numel()
        self.parent.mode.append(tensordict, next_tensordict, [[USER]] * size)
        return next_tensordict


def _asked_twice(mode, tokenizer, queries, *answers):
    env = ChatEnv(batch_size=(2,), input_mode=mode, tokenizer=tokenizer).append_transform(Ask())
    policy = FakeWrapper(list(answers), tokenizer=tokenizer, input_mode=mode)
    first = env.step(policy(env.reset(queries("a", "b"))))
    second = policy(env.step_mdp(first))
    return [read_rows(td, ("tokens", "full")) for td in (first, second)]


@pytest.mark.parametrize("mode", MODES)
def test_a_turn_without_a_token_is_answered_like_any_other(mode, tokenizer, queries):
    answers = (Answer("", FinishReason.ABORT), Answer("x"), Answer("y"), Answer("z"))
    before, after = _asked_twice(mode, tokenizer, queries, *answers)
    for old, new in zip(before, after, strict=True):
        assert new[: len(old)].tolist() == old.tolist()
    texts = [tokenizer.decode(ids) for ids in after]
    user = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert texts[0].endswith(user.format("a") + "<|im_end|>\n" + user.format("Go") + "y<|im_end|>")
    assert texts[1].endswith(user.format("b") + "x<|im_end|>\n" + user.format("Go") + "z<|im_end|>")


@pytest.mark.parametrize("mode", MODES)
def test_a_game_goes_on_where_one_answer_was_aborted(mode, tokenizer):
    env = TicTacToeEnv(num_envs=2, input_mode=mode, tokenizer=tokenizer)
    answers = [Answer("", FinishReason.ABORT), Answer("<move>5</move>")]
    policy = FakeWrapper(answers, tokenizer=tokenizer, input_mode=mode)
    after = env.step(policy(env.reset()))["next"]
    assert not after["done"].any()
    illegal, legal = after["reward"].flatten().tolist()
    assert illegal < legal


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_messages_cannot_follow_what_was_rewritten_in_the_same_step(mode, tokenizer, queries):
    env = ChatEnv(batch_size=(1,), input_mode=mode, tokenizer=tokenizer)
    env = env.append_transform(TruncatedThinking()).append_transform(Ask())
    policy = FakeWrapper("<think>a</think>b", tokenizer=tokenizer, input_mode=mode)
    with pytest.raises(TemplateError, match="after transforms that add messages"):
        env.step(policy(env.reset(queries("a"))))


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_rows_that_are_not_stepped_take_no_messages(mode, tokenizer, queries):
    env = ChatEnv(batch_size=(2,), input_mode=mode, tokenizer=tokenizer).append_transform(Ask())
    td = FakeWrapper("b", tokenizer=tokenizer, input_mode=mode)(env.reset(queries("a", "c")))
    td["_step"] = torch.tensor([True, False])
    with pytest.raises(TemplateError, match=r"row 1: .*not stepped"):
        env.step(td)
