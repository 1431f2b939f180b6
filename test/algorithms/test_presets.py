"""Each preset is the pair that its paper, and the configuration of the recipe, name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import cases
from hydra import compose, initialize_config_dir
from tensordict import TensorDict

from torchrl_llm import algorithms
from torchrl_llm.algorithms import Algorithm
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.envs.transforms import RetrieveTeacherLogProb, RetrieveValues
from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives import GRPOLoss
from torchrl_llm.objectives.credit import MCAdvantage
from torchrl_llm.trainers import load_config

FOLDER = Path(__file__).parents[2] / "sota-implementations" / "grpo" / "config"
SAME = cases(__file__)["same"]


class Actor(TokenScorer):
    def token_scores(self, *args, **kwargs):
        raise AssertionError("nothing is scored here")


def settings(thing):
    """Everything that was configured: plain attributes, by name."""
    plain = (bool, int, float, str, tuple, list, dict, type(None))
    ignored = {"training", "in_keys", "out_keys", "dist_params_keys", "_is_init"}
    found = {k: v for k, v in vars(thing).items() if isinstance(v, plain) and k not in ignored}
    # Those of torch.nn.Module hold no settings.
    return {k: v for k, v in found.items() if k not in vars(torch.nn.Module()) and "hook" not in k}


@pytest.mark.parametrize(("name", "arguments", "overrides"), SAME)
def test_a_preset_and_its_configuration_are_the_same_pair(name, arguments, overrides):
    algorithm = getattr(algorithms, name)(Actor(), **arguments)
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        config = load_config(compose("grpo", ["inference_model.max_tokens=32", *overrides]))
    for made, configured in (
        (algorithm.loss, config.build_loss(Actor())),
        (algorithm.credit, config.build_credit()),
    ):
        assert type(made) is type(configured)
        assert settings(made) == settings(configured)
        assert settings(made)
    # A wide clip of all settings that differ shows that they are compared at all.
    assert settings(GRPOLoss(Actor(), clip_epsilon=0.9)) != settings(GRPOLoss(Actor()))


def test_every_preset_of_the_paper_table_is_compared_or_has_no_recipe_here():
    made = {name for name in algorithms.__all__ if name.startswith("make_")}
    assert made - {name for name, *_ in SAME} == {"make_sft", "make_opd", "make_mopd"}


def test_the_defaults_are_those_of_the_papers():
    actor = Actor()
    assert algorithms.make_grpo(actor).loss.clip_epsilon == (0.2, 0.2)
    assert algorithms.make_grpo(actor).loss.aggregation == "sequence_mean"
    dapo = algorithms.make_dapo(actor)
    assert (dapo.loss.clip_epsilon, dapo.loss.aggregation) == ((0.2, 0.28), "token_mean")
    assert not dapo.credit.keep_zero_variance
    assert algorithms.make_gspo(actor).loss.clip_epsilon == (3e-4, 4e-4)
    assert algorithms.make_gmpo(actor).loss.clip_epsilon == (0.4, 0.4)
    assert algorithms.make_cispo(actor).loss.clip_epsilon == (None, 0.2)
    sapo = algorithms.make_sapo(actor).loss
    assert (sapo.tau_pos, sapo.tau_neg) == (1.0, 1.05)
    ppo = algorithms.make_ppo(actor)
    assert (ppo.credit.gamma, ppo.credit.lmbda, ppo.loss.value_coeff) == (1.0, 1.0, 0.5)
    assert isinstance(ppo.transforms[0], RetrieveValues)


def test_ludics_style_changes_what_ludic_does_differently_and_nothing_else():
    for name in ("grpo", "dr_grpo", "sapo"):
        ludic = getattr(algorithms, f"make_{name}")(Actor(), style="ludic")
        assert ludic.loss.aggregation == "sequence_sum"
    assert algorithms.make_cispo(Actor(), style="ludic").loss.aggregation == "sequence_mean"
    assert algorithms.make_reinforce(Actor(), style="ludic").loss.level == "sequence"
    scalerl = algorithms.make_scalerl(Actor(), style="ludic")
    assert scalerl.loss.clip_epsilon == (0.2, 0.28)
    assert not scalerl.credit.keep_zero_advantage
    paper, ludic = (algorithms.make_gspo(Actor(), style=style) for style in ("paper", "ludic"))
    assert settings(paper.loss) == settings(ludic.loss)
    assert settings(paper.credit) != settings(ludic.credit)
    assert not algorithms.make_sft(Actor(), style="ludic").loss.normalize_by_seq_length
    assert algorithms.make_sft(Actor()).loss.normalize_by_seq_length


def test_ludics_scalerl_divides_as_ludic_does():
    """(R - mean of the group) / (deviation of the batch + 1e-8), by hand."""
    credit = algorithms.make_scalerl(Actor(), group_size=2, style="ludic").credit
    rewards = [(0, 0.0), (0, 2e-8), (1, 0.0), (1, 6e-8), (2, 7.0), (2, 7.0)]
    rows = [
        TensorDict(
            next={
                "reward": torch.tensor([[reward]], dtype=torch.float64),
                "done": torch.ones(1).bool(),
            },
            group_id=torch.tensor(group),
        )
        for group, reward in rewards
    ]
    buffer = ReplayBuffer(transform=credit)
    buffer.extend(lazy_rows(rows))
    # Differences -1 1 -3 3 0 0 in units of 1e-8: squares 20 over six, plus 1. The zeros count in
    # the deviation, and their rows are not trained.
    deviation = (20 / 6) ** 0.5 + 1
    got = [row["advantage"].item() for row in buffer[:].unbind(0)]
    assert got == pytest.approx([x / deviation for x in (-1.0, 1.0, -3.0, 3.0)], abs=1e-12)


@pytest.mark.parametrize("style", ["paper", "ludic"])
@pytest.mark.parametrize("name", ["grpo", "cispo", "sapo", "scalerl"])
def test_an_aggregation_of_ones_own_comes_before_the_papers(name, style):
    make = getattr(algorithms, f"make_{name}")
    own = make(Actor(), style=style, aggregation="constant", constant_length=7)
    assert (own.loss.aggregation, own.loss.constant_length) == ("constant", 7)
    # All else is the style's.
    plain = make(Actor(), style=style)
    assert settings(own.credit) == settings(plain.credit)
    given = {name: settings(plain.loss)[name] for name in ("aggregation", "constant_length")}
    # A mean over prompts reads "group_id", too.
    given["_in_keys"] = settings(plain.loss)["_in_keys"]
    assert {**settings(own.loss), **given} == settings(plain.loss)
    with pytest.raises(ConfigError, match="aggregation must be one of"):
        make(Actor(), style=style, aggregation="mean")


def test_grpo_takes_an_aggregation_as_dapo_does():
    for make in (algorithms.make_grpo, algorithms.make_dapo):
        for aggregation in ("token_mean", "sequence_sum", "prompt_mean"):
            assert make(Actor(), aggregation=aggregation).loss.aggregation == aggregation


def test_mistakes_fail_at_construction():
    with pytest.raises(ConfigError, match="style must be one of 'paper', 'ludic', got 'trl'"):
        algorithms.make_grpo(Actor(), style="trl")
    with pytest.raises(ConfigError, match=r"constant_length, .* the limit of sampling"):
        algorithms.make_dr_grpo(Actor())
    with pytest.raises(ConfigError, match="normalize has no effect with style='ludic'"):
        algorithms.make_grpo(Actor(), style="ludic", normalize="sample")
    with pytest.raises(ConfigError, match=r"teachers must be a TokenScorer .* got Linear"):
        algorithms.make_opd(Actor(), torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="clip_epsilom"):
        algorithms.make_gspo(Actor(), clip_epsilom=0.1)
    with pytest.raises(ConfigError, match="style"):
        algorithms.make_scalerl(Actor(), style="")


def test_distillation_reads_its_teachers_where_its_estimator_does():
    stored = algorithms.make_opd(Actor(), Actor())
    assert isinstance(stored.scorers[0], RetrieveTeacherLogProb)
    assert stored.credit.group_size == 1
    several = algorithms.make_mopd(
        Actor(), {"maths": Actor(), "code": Actor()}, outcome_coeff=0.5, group_size=4
    )
    assert set(several.scorers[0].teachers) == {"maths", "code"}
    assert several.credit.group_size == 4
    assert several.loss.outcome_coeff == 0.5


def test_rows_pass_the_transforms_of_an_algorithm_in_its_order():
    # What changes the reward comes before credit, so the advantages are those of the new rewards.
    from torchrl.envs import Transform

    class Add(Transform):
        adds_keys_only = True

        def __init__(self, key, value):
            super().__init__()
            self.key, self.value = key, value

        def _inv_call(self, tensordict):
            for row, value in zip(tensordict.unbind(0), self.value, strict=True):
                row.set(self.key, torch.tensor([[value]]))
            return tensordict

    algorithm = Algorithm(
        name="test",
        loss=GRPOLoss(Actor()),
        credit=MCAdvantage(2, normalize="none"),
        transforms=(Add(("next", "reward"), [0.0, 1.0]), Add(("next", "reward"), [0.0, 4.0])),
        scorers=(Add("seen_last", [7.0, 8.0]),),
    )
    buffer = algorithm.append_to(ReplayBuffer())
    rows = [
        TensorDict(
            next={"reward": torch.ones(1, 1), "done": torch.ones(1).bool()},
            tokens={
                "full": torch.arange(3),
                "prompt": torch.arange(2),
                "response": torch.arange(1),
            },
            group_id=torch.tensor(0),
            traj_id=torch.tensor(number),
        )
        for number in range(2)
    ]
    buffer.extend(rows)
    assert [row["advantage"].item() for row in buffer[:].unbind(0)] == [-2.0, 2.0]
    assert [row["seen_last"].item() for row in buffer[:].unbind(0)] == [7.0, 8.0]


@pytest.mark.parametrize(("name", "arguments"), [(name, given) for name, given, _ in SAME])
def test_a_preset_without_a_model_is_the_same_once_it_has_one(name, arguments):
    make = getattr(algorithms, name)
    later, actor = make(**arguments), Actor()
    bound, whole = later.bind(actor), make(actor, **arguments)
    assert bound.loss.actor_network is actor
    assert bound.credit is later.credit
    assert settings(bound.loss) == settings(whole.loss)
    assert settings(bound.credit) == settings(whole.credit)
    assert [type(each) for each in bound.transforms] == [type(each) for each in whole.transforms]
    with pytest.raises(ConfigError, match="has a model already"):
        bound.bind(actor)
    more = (RetrieveValues(Actor()),)
    assert replace(later, scorers=more).bind(actor).scorers is more


def test_a_preset_of_ludic_is_written_as_there():
    algorithm = algorithms.make_gmpo(group_size=4)
    assert algorithm.credit.group_size == 4
    assert algorithms.make_sft().bind(Actor()).credit is None
    with pytest.raises(TypeError, match="make_gmpo\\(\\) takes no argument 'groupsize'"):
        algorithms.make_gmpo(groupsize=4)
    with pytest.raises(ConfigError, match="clip_epsilon"):
        algorithms.make_gmpo(group_size=4, clip_epsilon=-1.0)


def test_a_loss_without_a_model_says_how_to_give_it_one():
    ids = torch.tensor([1, 2, 3])
    with pytest.raises(ConfigError, match=r"made without a model: .*bind\(policy\)"):
        algorithms.make_grpo().loss.scorer.token_scores([ids], [ids > 1])
