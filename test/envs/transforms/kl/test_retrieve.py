"""RetrieveKL and KLRewardTransform: references that score rows, in environments and buffers."""

from __future__ import annotations

import pytest
import torch
from envs.fake_policy import AnsweringPolicy
from envs.transforms.kl.kl_helper import Scorer, divergences, make_row, rewards
from tensordict import NonTensorData, TensorDict

from torchrl_llm.data.ragged import lazy_rows, read_rows
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.envs import DatasetChatEnv
from torchrl_llm.envs.transforms import KLRewardTransform, RetrieveKL, RetrieveLogProb
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.modules import AdapterDisabled, FakeWrapper, TransformersBackend, load_model
from torchrl_llm.objectives import GRPOLoss
from torchrl_llm.rewards import RewardParser


def test_against_what_was_recorded():
    # Tokens 0, 1, 2 with recorded -0.5: reference -1 and -2, so kl = 0.5 and 1.5.
    rows = RetrieveKL(ref_model=Scorer(), coeff=0.1)(lazy_rows([make_row([0.0, -0.5, -0.5])]))
    assert divergences(rows) == [[0, 0.5, 1.5]]
    assert rewards(rows) == [pytest.approx([0.8])]
    assert rows[0]["next", "ref_log_probs", "full"].tolist() == [0, -1, -2]


def test_against_a_policy_that_scores_again():
    rows = RetrieveKL(Scorer(0.5), Scorer(), add_to_reward=False)(
        lazy_rows([make_row([0.0, -9.0, -9.0])])
    )
    assert divergences(rows) == [[0, 0.5, 1]]
    assert rows[0]["next", "gen_log_probs", "full"].tolist() == [0, -0.5, -1]
    assert rewards(rows) == [[1.0]]


def test_factories_make_the_models():
    transform = RetrieveKL(
        gen_model_factory=lambda: Scorer(0.5), ref_model_factory=Scorer, add_to_reward=False
    )
    assert divergences(transform(lazy_rows([make_row([0.0, 0.0])]))) == [[0, 0.5]]


def test_torchrls_older_name_does_the_same():
    made = [make_row([0.0, -0.5, -0.5]), make_row([0.0, -0.25])]
    one = RetrieveKL(ref_model=Scorer(), coeff=0.1)(lazy_rows(made).clone())
    two = KLRewardTransform(Scorer(), coef=0.1)(lazy_rows(made).clone())
    other = KLRewardTransform(Scorer(), coeff=0.1)(lazy_rows(made).clone())
    assert [row["next", "reward"] for row in other] == [row["next", "reward"] for row in two]
    with pytest.raises(ConfigError, match="give one"):
        KLRewardTransform(Scorer(), coef=0.2, coeff=0.1)
    assert rewards(one) == rewards(two)
    assert divergences(one) == divergences(two)


def test_the_older_name_can_rename_what_it_writes():
    transform = KLRewardTransform(
        ref_model_factory=Scorer, coef=0.1, out_keys=["reward_kl", "kl", "reference"]
    )
    row = transform(lazy_rows([make_row([0.0, -0.5])]))[0]["next"]
    assert row["reward"].item() == 1.0
    assert row["reward_kl"].item() == pytest.approx(0.95)
    assert row["kl", "full"].tolist() == [0, 0.5]
    assert row["reference", "full"].tolist() == [0, -1]


def test_a_buffer_scores_once_with_the_rows_and_the_loss_finds_the_reference():
    buffer = ReplayBuffer()
    buffer.append_transform(RetrieveKL(ref_model=Scorer(), coeff=0.1))
    buffer.extend([make_row([0.0, -0.5, -0.5])])
    assert rewards(buffer[:]) == [pytest.approx([0.8])]
    key = GRPOLoss.default_keys().ref_log_probs
    assert buffer[0].get(key).tolist() == [0, -1, -2]


def test_called_by_hand_it_scores_again_and_a_buffer_does_not():
    rows = lazy_rows([make_row([0.0, -0.5, -0.5], [0.0, -9.0, -9.0])])
    score = RetrieveLogProb(Scorer(0.25), assistant_only=False)
    key = ("next", "ref_log_probs", "full")
    buffer = ReplayBuffer(transform=RetrieveLogProb(Scorer(0.25), assistant_only=False))
    buffer.extend(rows)
    assert buffer[0][key].tolist() == [0.0, -9.0, -9.0]
    assert score(rows)[0][key].tolist() != [0.0, -9.0, -9.0]


def test_the_policy_without_its_adapters_is_at_no_distance_before_training():
    policy = TransformersBackend(load_model(lora={"target_modules": "all-linear"}))
    row = make_row([0.0] * 5, source=[1, 1, 3, 3, 3], response=3)
    transform = RetrieveKL(policy, AdapterDisabled(policy))
    assert divergences(transform(lazy_rows([row])), "sum") == [[pytest.approx(0.0, abs=1e-5)]]


# -- in an environment ----------------------------------------------------------------------------


class Constant(RewardParser):
    def score(self, response, answer):
        return 1.0


def make_env(*transforms):
    data = [{"query": "a", "answer": ""}, {"query": "bcd", "answer": ""}]
    env = DatasetChatEnv(dataset=data, num_envs=2, shuffle=False)
    for transform in transforms:
        env.append_transform(transform)
    return env


def expected_reward(td, row):
    source = read_rows(td, ("trace", "source"))[row]
    ids = read_rows(td, ("tokens", "full"))[row]
    start = ids.shape[0] - read_rows(td, ("tokens", "response"))[row].shape[0]
    mask = (source == 3) & (torch.arange(ids.shape[0]) >= start)
    # The policy records -0.5 everywhere, the reference says -id / 1000.
    return 1.0 - 0.1 * float((-0.5 + ids[mask].float() / 1000).sum())


@pytest.mark.parametrize(
    "make",
    [
        lambda: RetrieveKL(ref_model=Scorer(1e-3), coeff=0.1, assistant_only=False),
        lambda: KLRewardTransform(Scorer(1e-3), coef=0.1, assistant_only=False),
    ],
)
def test_the_reward_of_each_turn_pays_for_its_own_tokens(tokenizer, make):
    env = make_env(Constant(set_done_if_answer=False), make())
    td = env.rollout(2, AnsweringPolicy(tokenizer=tokenizer))
    for turn in range(2):
        for row in range(2):
            got = td["next", "reward"][row, turn].item()
            assert got == pytest.approx(expected_reward(td[:, turn], row), abs=1e-4)


def test_before_the_reward_is_written_there_is_nothing_to_penalise(tokenizer):
    env = make_env(RetrieveKL(ref_model=Scorer(), assistant_only=False), Constant())
    with pytest.raises(DataError, match="after the transform that writes it"):
        env.rollout(1, AnsweringPolicy(tokenizer=tokenizer))


def test_rewards_per_token_are_for_buffers(tokenizer):
    transform = RetrieveKL(ref_model=Scorer(), assistant_only=False, reduction="token")
    env = make_env(Constant(), transform)
    with pytest.raises(ConfigError, match="replay buffer"):
        env.rollout(1, AnsweringPolicy(tokenizer=tokenizer))


# -- errors ---------------------------------------------------------------------------------------


def test_exactly_one_reference_and_one_policy():
    with pytest.raises(ConfigError, match="reference"):
        RetrieveKL()
    with pytest.raises(ConfigError, match="not both"):
        RetrieveKL(ref_model=Scorer(), ref_model_factory=Scorer)
    with pytest.raises(ConfigError, match="not both"):
        RetrieveKL(Scorer(), Scorer(), gen_model_factory=Scorer)
    with pytest.raises(ConfigError, match="from_collector"):
        RetrieveKL("the collector's", Scorer())
    with pytest.raises(ConfigError, match="out_keys"):
        KLRewardTransform(Scorer(), out_keys=["a", "b"])


@pytest.mark.parametrize("kind", ["ids", "masked", "text"])
def test_recorded_rows_without_a_response_are_compared_where_they_are_scored(kind, tokenizer):
    # Gen -id / 2, reference -id: each scored token costs id / 2; the first has no prefix.
    policy = FakeWrapper(input_mode="text", tokenizer=tokenizer)
    gen, reference = (Scorer(0.5), Scorer())
    for scorer in (gen, reference):
        scorer.reader = policy.reader
    text = "What is 2+3?"
    ids = torch.tensor(tokenizer(text)["input_ids"])
    row = TensorDict(tokens={"full": ids}, next={"reward": torch.ones(1, 1)})
    cost = ids[1:].sum().item() / 2
    if kind == "masked":
        row["masks"] = {"all_assistant_mask": torch.arange(len(ids)) >= len(ids) - 2}
        cost = ids[-2:].sum().item() / 2
    if kind == "text":
        row = TensorDict(text=TensorDict(full=NonTensorData(text)), next=row["next"])
    transform = RetrieveKL(gen, reference, coeff=0.1, assistant_only=False)
    found = transform(row)["next"]
    assert found["kl_penalty", "sum"].item() == pytest.approx(cost)
    assert found["reward"].item() == pytest.approx(1 - 0.1 * cost)
    count = 2 if kind == "masked" else len(ids) - 1
    assert found["kl_penalty", "mean"].item() == pytest.approx(cost / count)


def test_a_recorded_conversation_without_a_reward_is_measured():
    row = TensorDict(tokens={"full": torch.arange(3)})
    found = RetrieveKL(Scorer(0.5), Scorer(), assistant_only=False)(row)["next"]
    assert found["kl_penalty", "sum"].item() == 1.5
    assert found["kl_penalty", "coeff"].item() == 0
    assert "reward" not in found.keys()
    sampled = make_row([0.0, -0.5, -0.5])
    del sampled["next", "reward"]
    with pytest.raises(DataError, match="the transform that writes it"):
        RetrieveKL(ref_model=Scorer())(sampled)


def test_text_alone_tells_no_assistant_and_needs_a_policy_that_encodes_it(tokenizer):
    row = TensorDict(text=TensorDict(full=NonTensorData("Hi")))
    with pytest.raises(DataError, match="by a policy that has a tokenizer"):
        RetrieveKL(Scorer(), Scorer(0.5))(row.clone())
    scorer = Scorer()
    scorer.reader = FakeWrapper(input_mode="text", tokenizer=tokenizer).reader
    with pytest.raises(DataError, match="assistant_only=False for ids or text alone"):
        RetrieveLogProb(scorer)(row)
