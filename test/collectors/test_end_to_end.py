"""Policy, environment, collector, buffer and credit together, with a real model."""

import multiprocessing
import operator

import pytest
import torch
from collectors.collecting import make_env, make_policy
from tensordict import LazyStackedTensorDict
from torchrl.envs import Transform

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.collectors.rollout import tokens_of_call
from torchrl_llm.data import Source
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.data.rollouts import sampled_tokens, split_rollout
from torchrl_llm.data.wire import PackedRows
from torchrl_llm.modules import FakeWrapper, TransformersWrapper
from torchrl_llm.objectives import MCAdvantage


@pytest.fixture
def real_policy(tiny_model, tokenizer):
    return TransformersWrapper(
        tiny_model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 6}
    )


def test_a_joined_dialog_scores_as_it_was_sampled(real_policy):
    """log_probs(joined row) == the log-probs that were sampled, in every turn."""
    credit, join = MCAdvantage(2), JoinTurns()
    buffer = ReplayBuffer(transform=credit)
    buffer.append_transform(join)  # runs first
    collector = LLMCollector(
        make_env(4, tool="the tool says 7", repeats=2),
        policy=real_policy,
        yield_completed_trajectories=True,
        dialog_turns_per_batch=12,
        total_dialog_turns=12,
    )
    generated = 0
    for batch in collector:
        generated += sum(map(sampled_tokens, batch.unbind(0)))
        buffer.extend(batch)
    kept = buffer[:].unbind(0)
    held = sum(
        sampled_tokens(row)
        for group in credit._groups.groups.values()
        for trajectory in group
        for row in trajectory.rows
    )
    assert sum(map(sampled_tokens, kept)) + held == generated
    assert max(row["num_turns"].item() for row in kept) > 1

    sequences = [row["tokens", "full"] for row in kept]
    select = [row["trace", "source"] == Source.SAMPLED for row in kept]
    sampled = torch.cat([row["log_probs", "full"][s] for row, s in zip(kept, select, strict=True)])
    with torch.no_grad():
        scored = real_policy.token_scores(sequences, select).log_probs
    assert torch.allclose(scored, sampled, atol=1e-4)


def _thinks_and_forgets(tokenizer, template):
    """A template that shows reasoning in the last answer only, and answers with reasoning."""
    content = "message['content'] + '<|im_end|>' -}}{%- endgeneration"
    kept = "(message['content'] if loop.last else message['content'].split('</think>')[-1])"
    template = template.replace(content, content.replace("message['content']", kept))
    answers = ["<think>let me see</think>42", "no thought"]
    return FakeWrapper(
        answers,
        tokenizer=tokenizer,
        chat_template=template,
        generate_kwargs={"max_new_tokens": 40},
    )


@pytest.mark.parametrize("case", ["history", "text", "tokens", "forks"])
def test_each_sampled_token_is_trained_exactly_once_whatever_the_mode(tokenizer, case):
    mode = "history" if case == "forks" else case
    history = mode == "history"
    if case == "forks":
        policy = _thinks_and_forgets(tokenizer, tokenizer.chat_template)
    else:
        policy = make_policy(tokenizer, input_mode=mode)
    credit, join = MCAdvantage(3), JoinTurns()
    buffer = ReplayBuffer(transform=credit)
    buffer.append_transform(join)  # runs first
    collector = LLMCollector(
        make_env(
            3,
            tool="result" if history else None,
            repeats=3,
            input_mode=mode,
            tokenizer=None if history else tokenizer,
        ),
        policy=policy,
        yield_completed_trajectories=True,
        dialog_turns_per_batch=12,
        total_dialog_turns=36,
    )
    generated = 0
    for batch in collector:
        generated += sum(map(sampled_tokens, batch.unbind(0)))
        buffer.extend(batch)
    rows = buffer[:].unbind(0)
    trained = sum(
        ((row["trace", "source"] == Source.SAMPLED) & (row["trace", "mask_reason"] == 0)).sum()
        for row in rows
    )
    stats = join.get_stats()
    assert generated == trained + credit.get_stats()["queued_tokens"]
    assert stats["turns"] > stats["trajectories"]
    assert (stats["forks"] > 0) == (case == "forks")
    for traj_id in {row["traj_id"].item() for row in rows}:
        shared = {r["advantage"].item() for r in rows if r["traj_id"].item() == traj_id}
        assert len(shared) == 1


def test_a_rollout_of_the_environment_goes_into_the_buffer_as_it_is(real_policy):
    rollout = make_env(2, 3, tool="result").rollout(3, real_policy)
    assert rollout.batch_size == (2, 3)
    buffer = ReplayBuffer(transform=JoinTurns())
    buffer.extend(rollout)
    assert [row["num_turns"].item() for row in buffer[:].unbind(0)] == [3, 3]


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
@pytest.mark.parametrize("padded", [False, True])
def test_tokens_of_a_call_are_those_of_its_rows(tokenizer, mode, padded):
    answers = ["a", "a longer answer", "an answer", "b"]
    env = make_env(4, input_mode=mode, tokenizer=tokenizer)
    td = FakeWrapper(answers, tokenizer=tokenizer, input_mode=mode, pad_output=padded)(env.reset())
    for source in read_rows(td, ("trace", "source")):
        source[-1] = Source.FORCED
    counts = tokens_of_call(td)
    assert counts == [sampled_tokens(row) for row in split_rollout(td).tensordicts]
    assert len(set(counts)) > 1
    assert tokens_of_call(td.unsqueeze(0)) == counts
    assert tokens_of_call(td.exclude("tokens")) == [0] * 4


class Hooked(Transform):
    """Changes what is carried into the next step, as TorchRL lets a transform do."""

    def _post_step_mdp_hooks(self, tensordict, tensordict_):
        tensordict_["turn"] = tensordict_["turn"] + 2
        return tensordict, tensordict_


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
@pytest.mark.parametrize("way", [{}, {"yield_completed_trajectories": True}])
def test_a_step_that_copies_nothing_stale_is_the_step_of_torchrl(tokenizer, mode, way):
    def collected(by_parts):
        torch.manual_seed(0)
        env = make_env(3, input_mode=mode, tokenizer=tokenizer).append_transform(Hooked())
        policy = make_policy(tokenizer, input_mode=mode)
        collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=9, **way)
        assert collector._rollout._by_parts
        collector._rollout._by_parts = by_parts
        batches = iter(collector)
        return [row for _ in range(4) for row in split_rollout(next(batches)).unbind(0)]

    for row, other in zip(collected(True), collected(False), strict=True):
        leaves, others = (dict(r.items(True, True)) for r in (row, other))
        assert leaves.keys() == others.keys()
        for key, value in leaves.items():
            if {"traj_id", "group_id"} & {key, key[-1]}:  # counted on over collectors
                continue
            same = torch.equal if isinstance(value, torch.Tensor) else operator.eq
            assert same(row[key], other[key]), key


def test_what_only_the_policy_writes_is_not_carried_into_the_next_step(tokenizer):
    class Remembers:
        """Declares a key that it reads back, and one that it only writes."""

        in_keys = ("memory",)
        out_keys = ("memory", "scratch", ("history", "full"))

        def __init__(self):
            self.policy, self.seen = make_policy(tokenizer), []

        def __call__(self, td):
            self.seen.append(sorted({"memory", "scratch"} & set(td.keys())))
            td["memory"] = td.get("memory", torch.zeros(2)) + 1
            td["scratch"] = torch.ones(2)
            return self.policy(td)

    policy = Remembers()
    collector = LLMCollector(make_env(2, 3), policy=policy, dialog_turns_per_batch=6)
    batch = next(iter(collector))
    assert policy.seen == [[], ["memory"], ["memory"]]
    assert batch["memory"].tolist() == [[1, 2, 3]] * 2
    assert batch["scratch"].shape == (2, 3)


def test_defect_31_no_stack_view_or_densify_on_the_way_of_a_row(tokenizer, monkeypatch):
    """TorchRL views, stacks and densifies lazy rows at each step, row by row."""

    def refuse(*args, **kwargs):
        raise AssertionError("rows were reshaped or stacked")

    for name in ("view", "reshape", "contiguous", "to_tensordict", "densify", "flatten"):
        monkeypatch.setattr(LazyStackedTensorDict, name, refuse)
    buffer = ReplayBuffer(batch_size=4, transform=MCAdvantage(2))
    buffer.append_transform(JoinTurns())
    collector = LLMCollector(
        make_env(4, 2, tool="result", repeats=2),
        policy=make_policy(tokenizer),
        yield_completed_trajectories=True,
        dialog_turns_per_batch=8,
        total_dialog_turns=16,
        replay_buffer=buffer,
    )
    list(collector)
    assert len(read_rows(buffer.sample(), ("tokens", "full"))) == 4


def test_wire_form_crosses_a_queue_between_processes(tokenizer):
    queue = multiprocessing.get_context("spawn").Queue()
    collector = LLMCollector(
        make_env(2, 2, tool="result"),
        policy=make_policy(tokenizer),
        dialog_turns_per_batch=4,
        total_dialog_turns=4,
        queue=queue,
    )
    list(collector)
    packed = queue.get(timeout=30)
    assert isinstance(packed, PackedRows)
    rows = packed.unpack()
    chat = rows[1]["history", "full"].chats[0]
    assert chat.record.token_ids.tolist() == rows[1]["tokens", "full"].tolist()
    assert len(split_rollout(rows)) == 4
    queue.close()
    queue.join_thread()
