"""The loss of reward models, against numbers by hand and transformers' own classifier.

``preferences/trl_reward_values.py`` compares with TRL, under a Python that has it.
"""

import copy
import math

import pytest
import torch
from tensordict import TensorDict
from torch.nn.functional import logsigmoid

from torchrl_llm.data.ragged import lazy_rows, pad_rows, ragged_rows
from torchrl_llm.data.scoring import ScoreExtras, TokenScorer, TokenScores, last_values
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.modules import load_model, load_reward_model
from torchrl_llm.modules.backends import CausalScorer, ClassifierScorer
from torchrl_llm.modules.backends.head import ValueHead
from torchrl_llm.objectives import RewardLoss
from torchrl_llm.trainers import micro_batches


class Fixed(TokenScorer):
    """The value of a state is the id of the token before."""

    def token_scores(self, sequences, select, *, extras=None, **_):
        assert extras == ScoreExtras(values=True, log_probs=False)
        values = [ids[:-1][mask[1:]].float() for ids, mask in zip(sequences, select, strict=True)]
        return TokenScores(torch.zeros(0), values=torch.cat(values))


def rows(ids, *, pair_id, is_chosen, **columns):
    return TensorDict(
        tokens=ragged_rows({"full": [torch.tensor(row) for row in ids]}),
        pair_id=torch.tensor(pair_id),
        is_chosen=torch.tensor(is_chosen),
        **{name: torch.tensor(values) for name, values in columns.items()},
        batch_size=len(ids),
    )


# Scores 3, 1, 2, 2, in whatever order the sides stand.
HAND = {"pair_id": [7, 7, 4, 4], "is_chosen": [True, False, False, True]}
HAND_IDS = [[9, 3], [9, 9, 1], [8, 2], [2]]


def test_values_by_hand():
    output = RewardLoss(Fixed())(rows(HAND_IDS, **HAND))
    softplus = [math.log1p(math.exp(-difference)) for difference in (2, 0)]
    assert output.loss_reward.item() == pytest.approx(sum(softplus) / 2)
    assert output.accuracy.item() == 0.5
    assert output.margin.item() == 1.0
    assert output.score.item() == 2.0


def test_margins_and_centring_by_hand():
    batch = rows(HAND_IDS, **HAND, margin=[1.5, 1.5, -1.0, -1.0])
    output = RewardLoss(Fixed(), centering=0.01)(batch)
    parts = [math.log1p(math.exp(-d)) + 0.01 * 16 for d in (2 - 1.5, 0 + 1)]
    assert output.loss_reward.item() == pytest.approx(sum(parts) / 2)
    assert output.margin.item() == 1.0  # of the scores, whatever was asked for


def test_padding_at_the_end_of_a_row_is_not_scored():
    loss = RewardLoss(Fixed(), pad_id=5)
    batch = rows([[1, 5, 3, 5, 5], [5, 5]], pair_id=[0, 0], is_chosen=[True, False])
    assert loss(batch).margin.item() == 3 - 5  # all padding: its first token


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return load_reward_model()


def random_rows(number=6):
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 20, (number,), generator=draw).tolist()
    ids = [torch.randint(5, 300, (n,), generator=draw).tolist() for n in lengths]
    pairs = [row // 2 for row in range(number)]
    return rows(ids, pair_id=pairs, is_chosen=[True, False] * (number // 2))


@pytest.mark.parametrize("layout", ["padded", "bucketed", "packed", "shared"])
def test_loss_and_gradients_are_those_of_the_classifier_itself(model, layout):
    batch, twin = random_rows(), copy.deepcopy(model)
    loss = RewardLoss(ClassifierScorer(copy.deepcopy(model), layout=layout))
    output = loss(batch)
    output.total_loss().backward()
    ids = [row["tokens", "full"] for row in batch.unbind(0)]
    mask = pad_rows([torch.ones_like(row) for row in ids], 0)
    scores = twin(input_ids=pad_rows(ids, 0), attention_mask=mask).logits[:, 0]
    margins = scores[0::2] - scores[1::2]
    (expected := -logsigmoid(margins).mean()).backward()
    assert output.total_loss().item() == pytest.approx(expected.item(), abs=1e-6)
    assert output.margin.item() == pytest.approx(margins.mean().item(), abs=1e-6)
    own = dict(loss.actor_network.model.named_parameters())
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(own[name].grad, parameter.grad, atol=1e-6, rtol=1e-4)


def test_micro_batches_keep_pairs_and_add_up(model):
    batch = lazy_rows(random_rows(12).unbind(0))
    loss = RewardLoss(ClassifierScorer(model), centering=0.1)
    whole, pieces = loss(batch), micro_batches(batch, budget=40)
    assert len(pieces) > 2
    parts = [loss(piece, normalizer=loss.normalizer(batch)) for piece in pieces]
    total = sum(parts[1:], parts[0])
    for name, value in whole.metrics().items():
        torch.testing.assert_close(total.metrics()[name], value, atol=1e-5, rtol=1e-5)


def test_a_language_model_with_a_value_head_is_a_scorer_too():
    causal = load_model()
    head = ValueHead.for_model(causal)
    torch.nn.init.normal_(head.linear.weight)
    ids = torch.tensor([3, 4, 5])
    (got,) = last_values(CausalScorer(causal, value_head=head), [ids])
    hidden = causal.model(input_ids=ids[None])[0][0, -1]
    torch.testing.assert_close(got, head(hidden[None])[0])


def test_rows_that_are_no_pairs_are_refused():
    loss = RewardLoss(Fixed())
    with pytest.raises(DataError, match=r"the pairs \[0, 1\] do not"):
        loss(rows([[1, 2], [3, 4]], pair_id=[0, 1], is_chosen=[True, True]))
    wrong = rows(HAND_IDS, **HAND, margin=[math.nan] * 4)
    with pytest.raises(DataError, match="margin"):
        loss(wrong)


def test_diverged_scores_are_an_error(model):
    broken = copy.deepcopy(model)
    loss = RewardLoss(ClassifierScorer(broken))
    broken.score.weight.data.fill_(math.nan)
    with pytest.raises(DataError, match="diverged"):
        loss(random_rows())


def test_a_classifier_has_no_log_probs(model):
    ids = [torch.tensor([3, 4])]
    with pytest.raises(ConfigError, match="not log-probs"):
        ClassifierScorer(model).token_scores(ids, [torch.tensor([False, True])])


def test_what_scores_rows_in_another_way_is_refused(model):
    with pytest.raises(ConfigError, match="no reward model"):
        ClassifierScorer(load_model())
    other = copy.deepcopy(model)
    other.score.register_forward_hook(lambda module, inputs, output: output.cumsum(-2))
    with pytest.raises(ConfigError, match="state of its last token"):
        ClassifierScorer(other)
