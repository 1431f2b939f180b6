"""LLMHashingEnv: one token a step, equal prefixes have equal hashes."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import step_mdp

from torchrl_llm.envs import LLMHashingEnv
from torchrl_llm.errors import ConfigError


class Letters:
    vocab_size = 26

    def __call__(self, text):
        return [self(t) for t in text] if isinstance(text, list) else [ord(c) - 97 for c in text]

    def decode(self, ids):
        return "".join(chr(97 + int(i)) for i in ids)

    def batch_decode(self, ids):
        return [self.decode(row) for row in ids]


def test_a_prompt_gets_a_hash_and_a_text_and_a_token_makes_both_longer():
    env = LLMHashingEnv(tokenizer=Letters())
    td = env.make_tensordict(["abc", "abd"])
    assert td["observation"].tolist() == [[0, 1, 2], [0, 1, 3]]
    assert list(td["text"]) == ["abc", "abd"]
    assert td["hashing"].shape == (2, 1)
    assert td["hashing"][0] != td["hashing"][1]
    after = env.step(td.set("action", torch.tensor([[4], [4]])))["next"]
    assert list(after["text"]) == ["abce", "abde"]
    assert after["hashing"][0] != after["hashing"][1]
    assert not after["done"].any()
    assert "reward" not in after.keys()


def test_equal_prefixes_have_equal_hashes_alone_and_in_a_batch():
    env = LLMHashingEnv(tokenizer=Letters())
    one, many = env.make_tensordict("abc"), env.make_tensordict(["abc", "xyz", "abc"])
    for token in (3, 4):
        assert many["hashing"][0] == many["hashing"][2] == one["hashing"]
        one = step_mdp(env.step(one.set("action", torch.tensor([token]))))
        many = step_mdp(env.step(many.set("action", torch.full((3, 1), token))))
    assert one["text"] == many["text"][0] == "abcde"


def test_it_behaves_as_torchrls_own():
    from torchrl.envs import LLMHashingEnv as Theirs

    def walk(env):
        td = env.make_tensordict(["abc", "xyz"])
        seen = [td]
        for token in (1, 2):
            td = step_mdp(env.step(td.set("action", torch.tensor([[token], [token + 1]]))))
            seen.append(td)
        return seen

    ours, theirs = walk(LLMHashingEnv(tokenizer=Letters())), walk(Theirs(tokenizer=Letters()))
    for mine, other in zip(ours, theirs, strict=True):
        for key in ("observation", "hashing", "done", "terminated"):
            assert torch.equal(mine[key], other[key])
        assert list(mine["text"]) == list(other["text"])


def test_a_rollout_with_a_policy_of_tokens():
    env = LLMHashingEnv(vocab_size=26, text_output=False)
    start = env.reset(TensorDict(observation=torch.tensor([[1, 2]]), batch_size=[1]))

    def policy(td):
        return td.set("action", td["observation"][..., -1:] + 1)

    rollout = env.rollout(3, policy, auto_reset=False, tensordict=start, return_contiguous=False)
    assert rollout[..., -1]["next", "observation"].tolist() == [[1, 2, 3, 4, 5]]
    assert "text" not in rollout.keys()


def test_another_hash_and_other_keys():
    env = LLMHashingEnv(
        hashing_module=lambda ids: ids.sum(-1),
        observation_key=("tokens", "full"),
        tokenizer=Letters(),
        text_key=("text", "full"),
    )
    td = env.make_tensordict("bcd")
    assert td["hashing"].tolist() == [6]
    td = env.step(td.set("action", torch.tensor([4])))["next"]
    assert td["tokens", "full"].tolist() == [1, 2, 3, 4]
    assert (td["hashing"].tolist(), td["text", "full"]) == ([10], "bcde")


def test_what_is_missing_is_said():
    with pytest.raises(ConfigError, match="pass vocab_size, or a tokenizer"):
        LLMHashingEnv()
    with pytest.raises(ConfigError, match="text_output=True needs a tokenizer"):
        LLMHashingEnv(vocab_size=5)
    env = LLMHashingEnv(vocab_size=5, text_output=False)
    empty = TensorDict(observation=torch.zeros(2, 0, dtype=torch.int64), batch_size=[2])
    for start in (None, TensorDict(batch_size=[2]), empty):
        with pytest.raises(ConfigError, match="needs the ids of a prompt"):
            env.reset(start)
    with pytest.raises(ConfigError, match="make_tensordict needs a tokenizer"):
        env.make_tensordict("abc")
    with pytest.raises(ConfigError, match=r"one length in tokens, got \[2, 3\]"):
        LLMHashingEnv(tokenizer=Letters()).make_tensordict(["ab", "abc"])
