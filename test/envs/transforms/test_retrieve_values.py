"""A critic's values in the rows of a replay buffer."""

from __future__ import annotations

import pytest
import torch
from modules.backends.model_zoo import build
from tensordict import TensorDict

from torchrl_llm.data.enums import Source
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.data.scoring import ScoreExtras, TokenScorer, TokenScores
from torchrl_llm.envs.transforms import RetrieveValues
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import TransformersBackend, ValueHead


class Position(TokenScorer):
    """The value of a token is its place in the row."""

    def __init__(self):
        self.calls = []

    def token_scores(self, sequences, select, *, extras=None, **_):
        self.calls.append((sequences, select, extras))
        places = torch.cat([mask.nonzero()[:, 0] for mask in select])
        return TokenScores(torch.zeros(0), values=places.float())


def row(length, prompt, *, truncated=None, terminated=None, source=None):
    ids = torch.arange(length) + 3
    made = TensorDict(tokens={"full": ids, "prompt": ids[:prompt], "response": ids[prompt:]})
    if source is None:
        source = [Source.PROMPT] * prompt + [Source.SAMPLED] * (length - prompt)
    made["trace", "source"] = torch.tensor([int(s) for s in source], dtype=torch.int8)
    for name, value in (("truncated", truncated), ("terminated", terminated)):
        if value is not None:
            made["next", name] = torch.tensor([value])
    return made


def written(critic, *rows):
    buffer = ReplayBuffer(transform=RetrieveValues(critic))
    buffer.extend(list(rows))
    return [buffer[i] for i in range(len(rows))]


def test_values_stand_at_sampled_tokens_and_nowhere_else():
    tool = [Source.PROMPT, Source.SAMPLED, Source.TOOL, Source.SAMPLED]
    first, second = written(Position(), row(3, 2), row(4, 1, source=tool))
    assert first["values", "full"].tolist() == [0.0, 0.0, 2.0]
    assert second["values", "full"].tolist() == [0.0, 1.0, 0.0, 3.0]
    assert first["next", "state_value"].tolist() == [[0.0]]


def test_behind_a_cut_stands_the_value_of_the_state_there():
    rows = written(
        Position(),
        row(3, 2, truncated=True, terminated=False),
        row(3, 2, truncated=True, terminated=True),
        row(3, 2, truncated=False),
    )
    assert [r["next", "state_value"].item() for r in rows] == [3.0, 0.0, 0.0]
    assert all(r["values", "full"].tolist() == [0.0, 0.0, 2.0] for r in rows)
    assert all(r["tokens", "full"].shape == (3,) for r in rows)


def test_the_critic_is_asked_once_for_values_alone_and_not_about_rows_without_tokens():
    critic = Position()
    empty, _ = written(critic, row(2, 2), row(3, 1))
    [(sequences, _, extras)] = critic.calls
    assert len(sequences) == 1
    assert extras == ScoreExtras(values=True, log_probs=False)
    assert empty["values", "full"].tolist() == [0.0, 0.0]
    written(critic, row(2, 2))
    assert len(critic.calls) == 1


def test_the_state_behind_a_cut_is_that_of_the_model_after_its_last_token():
    model = build("llama", max_position_embeddings=5)
    head = ValueHead.for_model(model)
    torch.nn.init.ones_(head.linear.weight)
    critic = TransformersBackend(model, value_head=head)
    # The row fills the context: what stands behind it is never run.
    full, short = written(critic, row(5, 2, truncated=True), row(3, 1))
    states = [model.model(r["tokens", "full"][None])[0][0].sum(-1) for r in (full, short)]
    torch.testing.assert_close(full["next", "state_value"][0, 0], states[0][-1])
    torch.testing.assert_close(full["values", "full"][2:], states[0][1:-1])
    torch.testing.assert_close(short["values", "full"][1:], states[1][:-1])
    assert not full["values", "full"].requires_grad


def test_the_critic_is_no_part_of_the_transform():
    model = build("llama", max_position_embeddings=5)
    transform = RetrieveValues(
        TransformersBackend(model.train(), value_head=ValueHead.for_model(model))
    )
    transform.eval()
    assert model.training
    assert not list(transform.parameters())


def test_rows_that_have_values_keep_them():
    given = row(3, 2)
    given["values", "full"] = torch.tensor([7.0, 7.0, 7.0])
    [kept] = written(Position(), given)
    assert kept["values", "full"].tolist() == [7.0] * 3


def test_a_critic_without_values_and_wrong_arguments_are_refused():
    class Mute(TokenScorer):
        def token_scores(self, sequences, select, **_):
            return TokenScores(torch.zeros(0))

    with pytest.raises(ConfigError, match="no value head"):
        written(Mute(), row(3, 2))
    with pytest.raises(ConfigError, match="TokenScorer"):
        RetrieveValues(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="nested"):
        RetrieveValues(Position(), values_key="values")


def test_rows_under_the_budget_are_valued_together_and_the_result_is_the_same():
    rows = [row(4, 2, truncated=True), row(6, 3), row(3, 1)]
    whole, pieces = Position(), Position()
    expected = written(whole, *rows)
    buffer = ReplayBuffer(transform=RetrieveValues(pieces, token_budget=10))
    buffer.extend(rows)
    # Five tokens with the one behind the cut, then six and three: 2 x 6 is above the budget.
    assert [len(sequences) for sequences, *_ in pieces.calls] == [1, 1, 1]
    assert len(whole.calls) == 1
    for index, other in enumerate(expected):
        assert torch.equal(buffer[index]["values", "full"], other["values", "full"])
