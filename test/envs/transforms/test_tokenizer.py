"""IncrementalTokenizer: ids beside conversations, sampled ids untouched."""

from __future__ import annotations

import pytest
import torch
from torchrl.envs import Transform
from torchrl.envs.utils import check_env_specs

from torchrl_llm.data.enums import Source
from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.envs import ChatEnv
from torchrl_llm.envs.transforms import IncrementalTokenizer
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import FakeWrapper


class ToolAnswers(Transform):
    """Appends a tool message to every conversation."""

    def _step(self, tensordict, next_tensordict):
        chats = next_tensordict["history"].prompt.chats
        told = [chat + [{"role": "user", "content": "the tool says 42"}] for chat in chats]
        next_tensordict["history"].prompt = History.of(told)
        return next_tensordict


@pytest.fixture
def env(tokenizer):
    return ChatEnv(batch_size=(2,), tokenizer=tokenizer, with_tokenizer=True)


@pytest.fixture
def policy(tokenizer):
    # an unusual tokenization of "hi": one byte a token
    ids = [tokenizer.convert_tokens_to_ids(c) for c in "hi"]
    return FakeWrapper([*ids], tokenizer=tokenizer)


def test_specs_name_the_ids(env, queries):
    check_env_specs(env, tensordict=env.reset(queries("a", "bcd")))


def test_sampled_ids_stay_and_only_new_messages_are_encoded(env, policy, queries, tokenizer):
    env = env.append_transform(ToolAnswers())
    td = env.reset(queries("a", "bcd"))
    td, after = env.step_and_maybe_reset(policy(td))
    for row in range(2):
        full = read_rows(td, ("tokens", "full"))[row]
        ids = read_rows(after, ("tokens", "prompt"))[row]
        assert ids[: len(full)].tolist() == full.tolist()
        record = after["history"].prompt.chats[row].record
        assert record.token_ids is ids or torch.equal(record.token_ids, ids)
        assert (record.source == Source.SAMPLED).sum() == 3  # h, i, end of turn


def test_defect_03_the_ids_hold_what_tools_appended(env, policy, queries, tokenizer):
    # appended after the tokenizing transform, and still encoded: that one stays last
    env = env.append_transform(ToolAnswers())
    td = env.step(policy(env.reset(queries("a", "bcd"))))["next"]
    for ids in read_rows(td, ("tokens", "prompt")):
        text = tokenizer.decode(ids)
        assert "the tool says 42" in text
        assert text.endswith("<|im_start|>assistant\n")


def test_a_policy_continues_the_ids_of_the_environment(env, policy, queries):
    td = env.rollout(3, policy, tensordict=env.reset(queries("a", "bcd")), auto_reset=False)
    for turn in range(1, 3):
        for row in range(2):
            before = read_rows(td[:, turn - 1], ("tokens", "full"))[row]
            after = read_rows(td[:, turn], ("tokens", "full"))[row]
            assert after[: len(before)].tolist() == before.tolist()


def test_the_key_of_the_ids_must_be_nested(tokenizer):
    with pytest.raises(ConfigError, match="two parts"):
        IncrementalTokenizer(tokenizer, tokens_key="ids")
