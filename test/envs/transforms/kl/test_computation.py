"""KLComputation: numbers by hand, what counts, the place in a buffer, and the controller."""

from __future__ import annotations

import pytest
import torch
from envs.transforms.kl.kl_helper import divergences, make_row, rewards
from tensordict import TensorDict

from torchrl_llm.data import AdaptiveKLController, ConstantKLController
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.envs.transforms import KLComputation
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.objectives import MCAdvantage

NAN = float("nan")


def two_rows():
    # Row 0: kl = (-1 + 1.5, -2 + 1) = (0.5, -1); sum -0.5, mean -0.25. Row 1: one token, 0.25.
    return lazy_rows(
        [
            make_row([0.0, -1.0, -2.0], [0.0, -1.5, -1.0], reward=2.0),
            make_row([0.0, 0.0, -0.5], [0.0, 0.0, -0.75], response=1),
        ]
    )


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("sum", [[2 - 0.1 * -0.5], [1 - 0.1 * 0.25]]),
        ("mean", [[2 - 0.1 * -0.25], [1 - 0.1 * 0.25]]),
        ("token", [[-0.1 * 0.5, 2 + 0.1 * 1.0], [1 - 0.1 * 0.25]]),
    ],
)
def test_rewards_by_hand(reduction, expected):
    rows = KLComputation(coeff=0.1, reduction=reduction)(two_rows())
    assert divergences(rows) == [[0, 0.5, -1], [0, 0, 0.25]]
    assert divergences(rows, "sum") == [[-0.5], [0.25]]
    assert divergences(rows, "mean") == [[-0.25], [0.25]]
    for got, want in zip(rewards(rows), expected, strict=True):
        assert got == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_rewards_that_are_whole_numbers_are_penalised_like_others(dtype):
    row = make_row([0.0, -1.0, -2.0], [0.0, -1.5, -1.0])
    row["next", "reward"] = torch.ones(1, 1, dtype=dtype)
    assert rewards(KLComputation(coeff=0.1)(lazy_rows([row]))) == [[pytest.approx(1.05)]]


def test_rewards_per_token_stay_so_whatever_the_reduction():
    per_token = make_row([0.0, -1.0, -2.0], [0.0, -1.5, -1.0], reward=[1.0, 2.0])
    rows = lazy_rows([per_token])
    assert rewards(KLComputation(coeff=0.1)(rows.clone())) == [pytest.approx([0.95, 2.1])]
    rows = KLComputation(coeff=0.1, reduction="mean")(rows)
    assert rewards(rows) == [pytest.approx([1 - 0.1 * 0.25, 2 + 0.1 * 0.5])]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # log q - log p = -0.5 and 1: k2 = x^2 / 2, k3 = e^x - 1 - x.
    [("k1", [0.5, -1.0]), ("k2", [0.125, 0.5]), ("k3", [0.10653065971, 0.71828182846])],
)
def test_estimators_by_hand(estimator, expected):
    rows = KLComputation(estimator=estimator)(two_rows())
    assert divergences(rows)[0][1:] == pytest.approx(expected, abs=1e-6)


def test_nothing_but_sampled_tokens_counts_and_anything_may_stand_elsewhere():
    # Sources: template, prompt, sampled, tool, sampled; what the tool and the prompt have is junk.
    gen, ref = [NAN, NAN, -1.0, NAN, -1.0], [7.0, NAN, -2.0, float("inf"), -1.5]
    row = make_row(gen, ref, response=3, source=[0, 1, 3, 2, 3])
    rows = KLComputation()(lazy_rows([row]))
    assert divergences(rows) == [[0, 0, 1, 0, 0.5]]
    assert divergences(rows, "mean") == [[0.75]]
    assert rewards(rows) == [[-0.5]]


def test_a_row_without_sampled_tokens_keeps_its_reward():
    rows = lazy_rows([make_row([NAN, -1.0], [NAN, -3.0], source=[1, 2])])
    controller = AdaptiveKLController(init_kl_coef=1.0, target=1.0, horizon=1)
    rows = KLComputation(coeff=controller)(rows)
    assert rewards(rows) == [[1.0]]
    assert divergences(rows, "mean") == [[0.0]]
    assert controller.coef == 1.0


def test_a_naive_loop_gives_the_same():
    generator = torch.Generator().manual_seed(0)
    made, expected = [], []
    for _ in range(20):
        length = int(torch.randint(2, 9, (), generator=generator))
        gen, ref = (-torch.rand(length, generator=generator) for _ in range(2))
        source = torch.randint(1, 4, (length,), generator=generator)
        source[0] = 1
        made.append(make_row(gen.tolist(), ref.tolist(), source=source.tolist(), reward=0.5))
        total = 0.0
        for t in range(length):
            if source[t] == 3:
                total += float(gen[t] - ref[t])
        expected.append([0.5 - 0.3 * total])
    got = rewards(KLComputation(coeff=0.3)(lazy_rows(made)))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_as_a_reward_the_log_ratio_has_the_gradient_of_the_divergence():
    """REINFORCE over the whole vocabulary: sum p R grad log p = -coeff grad KL(p || q)."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(6, dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    made = [make_row([0.0, log_p[x].item()], [0.0, ref[x].item()], reward=0.0) for x in range(6)]
    penalties = torch.tensor(rewards(KLComputation(coeff=0.5)(lazy_rows(made)))).flatten().double()
    (got,) = torch.autograd.grad((log_p.exp().detach() * penalties * log_p).sum(), logits)
    divergence = (logits.log_softmax(0).exp() * (logits.log_softmax(0) - ref)).sum()
    (expected,) = torch.autograd.grad(-0.5 * divergence, logits)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


def test_the_other_places_of_the_columns_are_found():
    row = make_row([0.0, -1.0])
    row["prox_log_probs"] = TensorDict({"full": torch.tensor([0.0, -2.0])})
    row["teacher"] = TensorDict({"full": torch.tensor([0.0, -4.0])})
    transform = KLComputation(("prox_log_probs", "full"), ("teacher", "full"))
    assert divergences(transform(lazy_rows([row]))) == [[0, 2]]


# -- in a replay buffer ---------------------------------------------------------------------------


def test_credit_that_was_appended_before_sees_the_penalised_reward():
    buffer = ReplayBuffer()
    buffer.append_transform(MCAdvantage(grpo_size=2, normalize="none"))
    buffer.append_transform(KLComputation(coeff=0.1))
    given = [
        make_row([0.0, -1.0], [0.0, -2.0], group_id=0, traj_id=0),
        make_row([0.0, -1.0], [0.0, -4.0], group_id=0, traj_id=1),
    ]
    buffer.extend(given)
    # Rewards 1 - 0.1 and 1 - 0.3, their mean 0.8.
    advantages = [row["advantage"].item() for row in buffer[:].unbind(0)]
    assert advantages == pytest.approx([0.1, -0.1], abs=1e-6)
    assert [row["next", "reward"].item() for row in given] == [1.0, 1.0]


def test_of_a_conversation_every_token_is_paid_for_once():
    first = make_row([0.0, -1.0, -1.0], [0.0, -2.0, -2.0], done=False, traj_id=0, source=[1, 3, 3])
    second = make_row(
        [0.0, -1.0, -1.0, 0.0, -1.0],
        [0.0, -2.0, -2.0, 0.0, -4.0],
        response=1,
        traj_id=0,
        source=[1, 3, 3, 1, 3],
    )
    buffer = ReplayBuffer()
    buffer.append_transform(JoinTurns())
    buffer.append_transform(KLComputation(coeff=0.1))
    buffer.extend([first, second])
    assert rewards(buffer[:]) == [pytest.approx([(1 - 0.2) + (1 - 0.3)])]


def test_reading_penalises_nothing_again():
    buffer = ReplayBuffer(batch_size=1)
    buffer.append_transform(KLComputation(coeff=0.1))
    buffer.append_transform(torch.nn.Identity())  # makes the buffer run all of its transforms
    buffer.extend([make_row([0.0, -1.0], [0.0, -2.0])])
    assert [rewards(buffer.sample()) for _ in range(2)] == [[pytest.approx([0.9])]] * 2


def test_what_was_only_measured_can_be_penalised_later():
    rows = KLComputation(add_to_reward=False)(two_rows())
    assert rewards(rows) == [[2.0], [1.0]]
    assert divergences(rows, "coeff") == [[0.0], [0.0]]
    rows = KLComputation(coeff=0.1)(rows)
    assert rewards(rows) == [pytest.approx([2.05]), pytest.approx([0.975])]
    assert divergences(rows, "coeff") == [[pytest.approx(0.1)]] * 2


# -- the controller -------------------------------------------------------------------------------


def test_a_batch_is_penalised_before_the_controller_learns_of_it():
    # Divergences 2 and 4, mean 3, target 2: error 0.5 is clipped to 0.2, gain 2 / 20.
    controller = AdaptiveKLController(init_kl_coef=0.1, target=2.0, horizon=20)
    transform = KLComputation(coeff=controller)
    made = [make_row([0.0, -1.0], [0.0, -3.0]), make_row([0.0, -1.0], [0.0, -5.0])]
    assert rewards(transform(lazy_rows(made))) == [pytest.approx([0.8]), pytest.approx([0.6])]
    assert transform.coeff == pytest.approx(0.1 * (1 + 0.2 * 0.1))


def test_the_state_of_the_controller_is_that_of_the_buffer():
    def make():
        controller = AdaptiveKLController(init_kl_coef=0.1, target=2.0, horizon=20)
        buffer = ReplayBuffer()
        buffer.append_transform(KLComputation(coeff=controller))
        return buffer, controller

    buffer, controller = make()
    buffer.extend([make_row([0.0, -1.0], [0.0, -9.0])])
    resumed, again = make()
    resumed.load_state_dict(buffer.state_dict())
    assert again.coef == controller.coef != 0.1


# -- errors ---------------------------------------------------------------------------------------


def test_what_is_missing_or_misaligned_is_named():
    with pytest.raises(DataError, match="RetrieveLogProb"):
        KLComputation()(lazy_rows([make_row([0.0, -1.0])]))
    row = make_row([0.0, -1.0], [0.0, -1.0])
    with pytest.raises(DataError, match="transform that writes it"):
        KLComputation()(lazy_rows([row.exclude(("next", "reward"))]))
    with pytest.raises(DataError, match="log_probs"):
        KLComputation()(lazy_rows([row.exclude("log_probs")]))
    with pytest.raises(DataError, match="aligned"):
        KLComputation()(lazy_rows([make_row([0.0, -1.0], [0.0, -1.0, -1.0])]))
    with pytest.raises(DataError, match="NaN"):
        KLComputation()(lazy_rows([make_row([0.0, -1.0], [0.0, NAN])]))
    with pytest.raises(DataError, match=r"\[R, 1\]"):
        KLComputation()(lazy_rows([make_row([0.0, -1.0], [0.0, -1.0], reward=[1.0, 2.0, 3.0])]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coeff": -1.0}, "kl_coef must be at least 0"),
        ({"kl_key": ("a", "b")}, "kl_key"),
        ({"reward_key": "reward"}, "reward"),
        ({"add_to_reward": False, "coeff": ConstantKLController(kl_coef=1.0)}, "no effect"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        KLComputation(**settings)
