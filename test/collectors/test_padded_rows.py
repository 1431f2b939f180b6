"""Padded rows are the ragged ones: in a buffer, joined, cut, penalised, evaluated and in a loss."""

import pytest
import torch
from collectors.collecting import make_env
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, SamplerWithoutReplacement
from torchrl.envs import Transform

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data import FinishReason
from torchrl_llm.data.nodes import leaf
from torchrl_llm.data.overlong import LengthRule
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.envs.transforms import KLComputation
from torchrl_llm.evaluation import evaluate
from torchrl_llm.modules import Answer, FakeWrapper
from torchrl_llm.objectives import MCAdvantage
from torchrl_llm.objectives.loss_rows import RowKeys, read_token_rows
from torchrl_llm.trainers import BatchSource, rollout_metrics


class Right(Transform):
    """Says that every answer is right."""

    def _step(self, tensordict, next_tensordict):
        next_tensordict["success"] = torch.ones(*next_tensordict.batch_size, 1).bool()
        return next_tensordict


def answer(prompt):
    """Answers of other lengths in each row and turn; some are empty."""
    return "ab" * (sum(map(ord, prompt)) % 4)


def policy(tokenizer, padded, mode):
    return FakeWrapper(answer, tokenizer=tokenizer, input_mode=mode, pad_output=padded)


def collect(tokenizer, padded, mode="history"):
    options = {"repeats": 2, "group_repeats": True, "input_mode": mode, "tokenizer": tokenizer}
    tool = "the tool says 42" if mode == "history" else None
    env = make_env(6, 3, tool=tool, **options)
    return LLMCollector(
        env,
        policy=policy(tokenizer, padded, mode),
        yield_completed_trajectories=True,
        reset_at_each_iter=True,
    )


def batch(tokenizer, padded, mode="history"):
    return row_list(next(iter(collect(tokenizer, padded, mode))))


def tensors(row):
    """Every tensor of a row but the names that are counted on over collectors, and times."""
    paths = [(key,) if isinstance(key, str) else key for key in row.keys(True, True)]
    left_out = {"traj_id", "group_id", "reward_seconds"}
    found = {path: leaf(row, path) for path in paths if path[-1] not in left_out}
    return {path: v.tolist() for path, v in found.items() if isinstance(v, torch.Tensor)}


def assert_same(padded, ragged):
    padded, ragged = (list(map(tensors, row_list(rows))) for rows in (padded, ragged))
    assert len(padded) == len(ragged)
    for one, other in zip(padded, ragged, strict=True):
        assert one.keys() == other.keys()
        assert one == other


def with_log_probs(rows):
    """Log-probs of a reference at every token, whatever the padding holds."""
    for row in rows:
        own = torch.where(row["masks", "all_assistant_mask"], -0.5, 0.0)
        row["ref_log_probs"] = TensorDict(full=own * 3)
        row["log_probs"] = TensorDict(full=own)
    return rows


@pytest.mark.parametrize("mode", ["history", "tokens"])
def test_turns_are_joined_and_priced_as_ragged_ones_are(tokenizer, mode):
    found = {}
    for padded in (True, False):
        rows = with_log_probs(batch(tokenizer, padded, mode))
        assert padded == any(not row["masks", "all_attention_mask"].all() for row in rows)
        buffer = ReplayBuffer()
        buffer.append_transform(joining := JoinTurns())
        buffer.append_transform(MCAdvantage(2, trajectory_return=None))
        buffer.append_transform(KLComputation(coeff=0.1, reduction="token"))
        buffer.extend(lazy_rows(rows))
        found[padded] = buffer[:], joining.get_stats()
    assert found[True][1] == found[False][1]
    assert found[True][1]["forks"] == 0  # 12 before
    assert_same(found[True][0], found[False][0])


def test_a_joining_without_a_buffer_sees_no_padding_either(tokenizer):
    joined = [JoinTurns().inv(lazy_rows(batch(tokenizer, padded))) for padded in (True, False)]
    assert_same(*joined)


def test_a_row_is_as_long_as_its_tokens(tokenizer):
    length = max(len(row["tokens", "full"]) for row in batch(tokenizer, False))
    found = {}
    for padded in (True, False):
        credit = MCAdvantage(2)
        buffer = ReplayBuffer(storage=LazyStackStorage(6), sampler=SamplerWithoutReplacement())
        buffer.append_transform(JoinTurns())
        buffer.append_transform(credit)
        source = BatchSource(
            collect(tokenizer, padded),
            buffer,
            credit=credit,
            num_rows=6,
            length=LengthRule(max_seq_len=length, on_overlong="error"),
        )
        rows = source.fill()  # a padded row was too long before
        found[padded] = rows, source.ledger.totals, rollout_metrics(rows)["train/response_length"]
    assert_same(found[True][0], found[False][0])
    assert found[True][1:] == found[False][1:]


def test_held_out_answers_are_as_long_as_their_tokens(tokenizer):
    padded, ragged = (
        evaluate(make_env(6, 1).append_transform(Right()), one, num_prompts=6)
        for one in (policy(tokenizer, True, "history"), policy(tokenizer, False, "history"))
    )
    assert padded.response_length == ragged.response_length


@pytest.mark.parametrize("traced", [True, False])
def test_an_empty_last_answer_trains_nothing_again(tokenizer, traced):
    # Two conversations of two turns; the last answer of the first is empty.
    def answer(prompt):
        first = "question 0" in prompt
        nothing = Answer([], FinishReason.LENGTH)
        if "42" in prompt:
            return nothing if first else "abcd"
        return "abc" if first else "defghijkl"

    found = {}
    for padded in (True, False):
        env = make_env(2, 2, tool="42", tokenizer=tokenizer)
        fake = FakeWrapper(answer, tokenizer=tokenizer, pad_output=padded)
        td = env.step_mdp(env.step(fake(env.reset())))
        td = fake(td) if traced else fake(td).exclude("trace")
        found[padded] = read_token_rows(td, RowKeys(), "sft")
    assert found[True].counts == found[False].counts == [0, 5]  # was [4, 5]: "abc" once more
    for one, other in zip(found[True].select, found[False].select, strict=True):
        assert torch.equal(one, other)
