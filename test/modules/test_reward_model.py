"""A Hugging Face classifier as a reward."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification

from torchrl_llm.data.ragged import ragged_rows
from torchrl_llm.errors import DataError, RewardError
from torchrl_llm.modules import HFRewardModelWrapper

IDS = [torch.tensor([5, 6, 7, 8]), torch.tensor([9, 10])]


def classifier(pad_token_id=0):
    torch.manual_seed(0)
    return LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_labels=1,
            pad_token_id=pad_token_id,
        )
    ).eval()


def ragged():
    return TensorDict(tokens=ragged_rows({"full": IDS}), batch_size=[2])


def one_by_one(model):
    with torch.no_grad():
        return torch.cat([model(input_ids=ids[None]).logits[0] for ids in IDS])


@pytest.mark.parametrize("pad_token_id", [0, 31, None])
def test_each_row_has_the_score_that_it_has_alone(pad_token_id):
    model = classifier(pad_token_id)
    got = HFRewardModelWrapper(model, inference_mode=True)(ragged())["reward"]
    assert got.shape == (2,)
    assert not got.requires_grad
    torch.testing.assert_close(got, one_by_one(classifier(0)), atol=1e-5, rtol=1e-5)


def test_ragged_rows_of_one_length_need_no_mask():
    rows = TensorDict(tokens=ragged_rows({"full": [IDS[0], IDS[0]]}), batch_size=[2])
    got = HFRewardModelWrapper(classifier())(rows)["reward"]
    torch.testing.assert_close(got.detach(), one_by_one(classifier())[[0, 0]])


def test_padding_of_any_id_has_no_influence():
    full = torch.stack([IDS[0], torch.cat([IDS[1], torch.tensor([17, 17])])])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    td = TensorDict(tokens={"full": full}, masks={"all_attention_mask": mask}, batch_size=[2])
    got = HFRewardModelWrapper(classifier())(td)["reward"]
    torch.testing.assert_close(got.detach(), one_by_one(classifier()), atol=1e-5, rtol=1e-5)


def test_gradients_flow_unless_they_are_not_wanted():
    HFRewardModelWrapper(model := classifier())(ragged())["reward"].sum().backward()
    assert model.score.weight.grad is not None


def test_in_the_place_of_rewards_it_has_their_form():
    td = ragged()
    td["next"] = TensorDict(done=torch.ones(2, 1).bool(), batch_size=[2])
    wrapper = HFRewardModelWrapper(classifier(), reward_key=("next", "reward"))
    assert wrapper(td)["next", "reward"].shape == (2, 1, 1)
    assert wrapper.out_keys == [("next", "reward")]


class Fixed(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, input_ids, attention_mask=None):
        return self.output


def test_outputs_of_several_kinds_are_understood():
    numbers = torch.tensor([1.0, 2.0])
    outputs = [numbers, numbers[:, None], SimpleNamespace(rewards=numbers)]
    for output in outputs:
        assert HFRewardModelWrapper(Fixed(output))(ragged())["reward"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.ones(2, 3), "num_labels=1"),
        (SimpleNamespace(), "logits"),
        (torch.tensor([1.0, float("nan")]), r"rows \[1\]"),
    ],
)
def test_what_is_no_number_a_row_is_an_error(output, message):
    with pytest.raises(RewardError, match=message):
        HFRewardModelWrapper(Fixed(output))(ragged())


def test_missing_columns_are_named():
    wrapper = HFRewardModelWrapper(Fixed(torch.ones(2)))
    with pytest.raises(DataError, match="tokens"):
        wrapper(TensorDict(batch_size=[2]))
    dense = TensorDict(tokens={"full": torch.ones(2, 3).long()}, batch_size=[2])
    with pytest.raises(DataError, match="never inferred"):
        wrapper(dense)
    without = HFRewardModelWrapper(Fixed(torch.ones(2)), attention_mask_key=None)
    assert without(dense)["reward"].tolist() == [1, 1]
    with pytest.raises(DataError, match="different length"):
        without(ragged())
