"""LLMCollector in the calling thread: every option, versions, weights, exact resume."""

from __future__ import annotations

import queue

import pytest
import torch
from collectors.collecting import Ending, Failing, make_env, make_policy
from torch import nn
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase

from torchrl_llm.collectors import LLMCollector, RayLLMCollector
from torchrl_llm.data import History, Source
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.data.rollouts import sampled_tokens, split_rollout
from torchrl_llm.envs.transforms import PolicyVersion
from torchrl_llm.errors import ConfigError, MissingExtraError, WeightUpdateError
from torchrl_llm.weights import InProcessWeights


def _queries(batch):
    return [row["query"] for row in split_rollout(batch).unbind(0)]


def _turns(batch):
    return [row["turn"].item() for row in split_rollout(batch).unbind(0)]


# -- what a batch is ------------------------------------------------------------------------------


def test_a_batch_has_environments_and_time(policy):
    collector = LLMCollector(
        make_env(3, 2), policy=policy, dialog_turns_per_batch=6, total_dialog_turns=12
    )
    batches = list(collector)

    assert [batch.shape for batch in batches] == [(3, 2), (3, 2)]
    assert isinstance(batches[0]["history", "full"], History)
    assert batches[0]["turn"].tolist() == [[0, 1]] * 3
    assert _queries(batches[1]) == [f"question {i}" for i in (3, 3, 4, 4, 5, 5)]
    assert isinstance(collector, BaseCollector)
    assert collector.stats()["frames"] == collector.dialog_turns == 12


def test_steps_of_a_batch_do_not_change_afterwards(policy):
    collector = LLMCollector(make_env(2, 2), policy=policy, dialog_turns_per_batch=4)
    batches = iter(collector)
    first = next(batches)
    before = [ids.tolist() for ids in read_rows(split_rollout(first), ("tokens", "full"))]
    assert "response" not in first["next", "history"]._tensordict.keys()
    next(batches)
    assert [i.tolist() for i in read_rows(split_rollout(first), ("tokens", "full"))] == before


def test_flat_data_is_trajectory_by_trajectory(policy):
    collector = LLMCollector(
        make_env(2, 2), policy=policy, dialog_turns_per_batch=4, flatten_data=True
    )
    batch = next(iter(collector))
    assert batch.shape == (4,)
    assert _turns(batch) == [0, 1, 0, 1]
    assert _queries(batch) == ["question 0"] * 2 + ["question 1"] * 2


def test_a_batch_may_begin_and_end_in_the_middle_of_trajectories(policy):
    batches = iter(LLMCollector(make_env(2, 3), policy=policy, dialog_turns_per_batch=4))
    assert _turns(next(batches)) == [0, 1, 0, 1]
    assert _turns(next(batches)) == [2, 0, 2, 0]


def test_reset_at_each_iter_gives_up_what_is_in_flight(policy):
    collector = LLMCollector(
        make_env(2, 3), policy=policy, dialog_turns_per_batch=4, reset_at_each_iter=True
    )
    batches = iter(collector)
    next(batches)
    assert _turns(next(batches)) == [0, 1, 0, 1]


def test_completed_trajectories_come_whole_and_in_the_order_in_which_they_end(policy):
    # questions 0, 1, 2 take 1, 2, 3 turns, then 3, 4, 5 the same
    collector = LLMCollector(make_env(3), policy=policy, yield_completed_trajectories=True)
    batches = iter(collector)
    seen = [next(batches) for _ in range(5)]

    # place 0 answers 0, 3, 4; place 1 answers 1; place 2 answers 2
    assert [_queries(b)[0] for b in seen] == [f"question {i}" for i in (0, 3, 1, 2, 4)]
    assert [_turns(b) for b in seen] == [[0], [0], [0, 1], [0, 1, 2], [0, 1]]
    for batch in seen:
        done = [row["next", "done"].item() for row in batch.unbind(0)]
        assert done == [False] * (len(done) - 1) + [True]


def test_completed_trajectories_fill_a_batch_of_turns(policy):
    collector = LLMCollector(
        make_env(3), policy=policy, yield_completed_trajectories=True, dialog_turns_per_batch=4
    )
    batch = next(iter(collector))
    assert _turns(batch) == [0, 0, 0, 1]  # 1 + 1 + 2 turns


def test_only_last_steps_hold_the_whole_conversation_and_all_turns_count(policy):
    collector = LLMCollector(
        make_env(1, 3, tool="r"), policy=policy, yield_only_last_steps=True, total_dialog_turns=6
    )
    batches = list(collector)

    assert [_turns(batch) for batch in batches] == [[2], [2]]
    assert collector.dialog_turns == 6
    assert batches[0]["history", "full"].role == [
        ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    ]


def test_verbose_postproc_and_hooks_see_every_batch(policy):
    seen = []
    collector = LLMCollector(
        make_env(2, 1), policy=policy, dialog_turns_per_batch=2, total_dialog_turns=4, verbose=True
    )
    collector.set_postproc(lambda batch: batch.set("mark", torch.ones(batch.shape)))
    collector.post_collect_hook = lambda batch: seen.append(batch["mark"].sum().item())
    list(collector)
    assert seen == [2.0, 2.0]
    with pytest.raises(ConfigError, match="postproc"):
        collector.set_postproc(lambda batch: batch)


def test_a_buffer_is_filled_with_rows(policy):
    buffer = ReplayBuffer()
    collector = LLMCollector(
        make_env(2, 2),
        policy=policy,
        dialog_turns_per_batch=4,
        total_dialog_turns=8,
        replay_buffer=buffer,
    )
    assert list(collector) == [None, None]
    assert len(buffer) == 8
    assert buffer[0].batch_size == ()


def test_a_queue_of_this_process_gets_tensordicts_another_one_gets_wire_form(policy):
    class Remote:
        def __init__(self):
            self.items = []

        def put(self, item, timeout=None):
            self.items.append(item)

    local, remote = queue.Queue(), Remote()
    for target in (local, remote):
        env = make_env(2, 2)
        collector = LLMCollector(
            env, policy=policy, dialog_turns_per_batch=4, total_dialog_turns=4, queue=target
        )
        list(collector)
    assert _turns(local.get()) == _turns(remote.items[0].unpack()) == [0, 1, 0, 1]


def test_factories_are_called(policy):
    collector = LLMCollector(
        lambda: make_env(2, 1), policy_factory=lambda: policy, dialog_turns_per_batch=2
    )
    assert isinstance(collector.env, EnvBase)
    assert collector.policy is policy
    assert "turns=0/-1" in repr(collector)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dialog_turns_per_batch": 2, "policy_factory": lambda: None},
        {"yield_only_last_steps": True, "yield_completed_trajectories": False},
        {
            "yield_completed_trajectories": True,
            "reset_at_each_iter": True,
            "dialog_turns_per_batch": 2,
        },
        {"yield_completed_trajectories": True, "flatten_data": False},
        {"dialog_turns_per_batch": 2, "async_envs": True},
        {"dialog_turns_per_batch": 2, "replay_buffer": 1, "queue": 1},
    ],
)
def test_arguments_that_contradict_each_other_are_refused(policy, options):
    with pytest.raises(ConfigError):
        LLMCollector(make_env(2, 1), policy=policy, **options)


def test_an_unknown_argument_is_an_error(policy):
    with pytest.raises(TypeError):
        LLMCollector(make_env(2, 1), policy=policy, frames_per_batch=2)


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_text_and_tokens_mode_are_collected_too(tokenizer, mode):
    env = make_env(2, 2, input_mode=mode, tokenizer=tokenizer)
    policy = make_policy(tokenizer, input_mode=mode)
    collector = LLMCollector(
        env, policy=policy, yield_completed_trajectories=True, dialog_turns_per_batch=4
    )
    rows = next(iter(collector)).unbind(0)
    first, second = rows[0], rows[1]
    old = first["tokens", "full"]
    assert torch.equal(second["tokens", "prompt"][: len(old)], old)


# -- turns to joined rows -------------------------------------------------------------------------


def test_defect_03_the_tool_message_is_in_the_next_prompts_tokens(tokenizer, policy):
    """TorchRL's next token prompt ends before the tool result, so the model never sees it."""
    env = make_env(1, 2, tool="the result is 42")
    collector = LLMCollector(env, policy=policy, yield_completed_trajectories=True)
    first, second = next(iter(collector)).unbind(0)

    old, prompt = first["tokens", "full"], second["tokens", "prompt"]
    assert torch.equal(prompt[: len(old)], old)  # the sampled ids, not re-encoded ones
    assert "the result is 42" in tokenizer.decode(prompt[len(old) :])
    source = second["trace", "source"][len(old) : len(prompt)]
    assert (source == Source.TOOL).any()


def test_a_collected_dialog_with_tools_is_one_row_that_trains_each_token_once(policy):
    buffer = ReplayBuffer(transform=JoinTurns())
    collector = LLMCollector(
        make_env(3, tool="result"),
        policy=policy,
        yield_completed_trajectories=True,
        total_dialog_turns=12,
        replay_buffer=buffer,
    )
    list(collector)
    rows = buffer[:].unbind(0)
    assert sorted(row["num_turns"].item() for row in rows)[-1] == 3
    for row in rows:
        turns = row["num_turns"].item()
        assert sampled_tokens(row) == 4 * turns  # four tokens a turn
        assert row["next", "reward"].item() == turns
        sampled = row["trace", "source"] == Source.SAMPLED
        assert torch.equal(sampled, row["masks", "all_assistant_mask"])
        assert (row["log_probs", "full"][sampled] < 0).all()
        assert row["trace", "turn"][sampled].unique().tolist() == list(range(turns))


def test_defect_29_grouped_repeats_of_several_environments(policy):
    """TorchRL's GSM8KEnv(num_envs=4, repeats=2, group_repeats=True) raises a broadcast error."""
    env = make_env(4, 1, repeats=2, group_repeats=True)
    batch = next(iter(LLMCollector(env, policy=policy, dialog_turns_per_batch=4)))
    groups = batch["group_id"].flatten().tolist()
    assert groups[0] == groups[1] != groups[2] == groups[3]


# -- versions and weights -------------------------------------------------------------------------


def test_versions_are_those_of_the_weights_that_acted(policy):
    collector = LLMCollector(
        make_env(2, 3), policy=policy, dialog_turns_per_batch=2, track_policy_version=True
    )
    batches = iter(collector)
    first = next(batches)
    collector.update_policy_weights_()
    second = next(batches)  # the same conversations, in their second turn

    assert first["policy_version"].unique().tolist() == [0]
    assert second["policy_version"].unique().tolist() == [1]
    assert collector.policy_version == collector.get_policy_version() == 1
    row = split_rollout(second)[0]
    sampled = row["trace", "turn"] >= 0
    assert row["trace", "policy_version"][sampled].tolist() == [0] * 4 + [1] * 4


def test_a_given_tracker_is_used_and_the_trace_counts_along(policy):
    tracker = PolicyVersion("uuid")
    collector = LLMCollector(
        make_env(2, 1), policy=policy, dialog_turns_per_batch=2, track_policy_version=tracker
    )
    old = collector.policy_version
    collector.increment_version()
    assert collector.policy_version_tracker is tracker
    assert collector.policy_version == tracker.version != old
    assert policy.policy_version == 1
    assert next(iter(collector))["policy_version"] == [[tracker.version]] * 2


def test_without_tracking_the_policys_own_version_counts(policy):
    collector = LLMCollector(make_env(2, 1), policy=policy, dialog_turns_per_batch=2)
    collector.update_policy_weights_()
    assert collector.policy_version == 1
    plain = LLMCollector(make_env(2, 1), policy=lambda td: td, dialog_turns_per_batch=2)
    assert plain.policy_version is None


class Numbering(InProcessWeights):
    """Sends weights under the next number, as the updaters of engines do."""

    def __init__(self, fails=False):
        super().__init__()
        self.sent, self.fails = [], fails

    def push_weights(self, policy_or_weights=None):
        self.sent.append(self.collector.policy_version + 1)
        super().push_weights(policy_or_weights)
        if self.fails:
            self.collector.increment_version()
            raise WeightUpdateError("no proof")


@pytest.mark.parametrize("track", [True, False])
def test_weights_of_the_start_or_of_a_checkpoint_are_no_new_version(policy, track):
    updater = Numbering()
    collector = LLMCollector(
        make_env(2, 1),
        policy=policy,
        dialog_turns_per_batch=2,
        track_policy_version=track,
        weight_updater=updater,
    )
    collector.publish()
    assert (collector.policy_version, updater.sent) == (0, [0])
    collector.update_policy_weights_()
    collector.update_policy_weights_()
    collector.publish()  # as after a resume: 3 before
    assert (collector.policy_version, updater.sent) == (2, [0, 1, 2, 2])
    updater.fails = True
    with pytest.raises(WeightUpdateError):
        collector.publish()
    assert collector.policy_version == policy.policy_version == 2


def test_weights_are_shared_in_place_and_the_pointers_say_so(policy):
    collector = LLMCollector(make_env(2, 1), policy=policy, dialog_turns_per_batch=2)
    before = [p.data_ptr() for p in policy.parameters()]
    collector.update_policy_weights_(policy)
    assert collector.weight_updater.num_copied == 0
    assert [p.data_ptr() for p in policy.parameters()] == before
    assert collector.get_policy_model() is policy.model


def test_weights_of_another_module_are_copied_into_the_same_memory(policy, tokenizer):
    trained = make_policy(tokenizer)
    with torch.no_grad():
        for p in trained.parameters():
            p.add_(1.0)
    collector = LLMCollector(make_env(2, 1), policy=policy, dialog_turns_per_batch=2)
    before = [p.data_ptr() for p in policy.parameters()]
    collector.update_policy_weights_(state_dict=trained.model.state_dict())
    for ours, theirs, pointer in zip(
        policy.parameters(), trained.parameters(), before, strict=True
    ):
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() == pointer != theirs.data_ptr()


def test_a_failed_update_counts_no_version(policy):
    collector = LLMCollector(make_env(2, 1), policy=policy, dialog_turns_per_batch=2)
    collector.update_policy_weights_(policy)
    with pytest.raises(ConfigError, match="not those of the policy"):
        collector.update_policy_weights_({"another": torch.ones(1)})
    assert collector.policy_version == 1  # the failed update counts no version
    with pytest.raises(ConfigError, match="once"):
        collector.update_policy_weights_(policy, policy=policy)


def test_a_policy_without_a_model_says_so():
    collector = LLMCollector(make_env(2, 1), policy=lambda td: td, dialog_turns_per_batch=2)
    with pytest.raises(ConfigError, match="no model"):
        collector.get_policy_model()
    with pytest.raises(ConfigError, match="weight_updater"):
        collector.update_policy_weights_(nn.Linear(1, 1))


# -- failure and end ------------------------------------------------------------------------------


def test_an_error_of_the_policy_reaches_the_loop(policy):
    collector = LLMCollector(make_env(2, 1), policy=Failing(policy, 1), dialog_turns_per_batch=2)
    batches = iter(collector)
    next(batches)
    with pytest.raises(ValueError, match="broken"):
        next(batches)


def test_ctrl_c_in_a_step_loses_nothing(policy):
    failing = Failing(policy, 1, KeyboardInterrupt())
    collector = LLMCollector(make_env(2, 3), policy=failing, dialog_turns_per_batch=2)
    next(iter(collector))
    with pytest.raises(KeyboardInterrupt):
        next(iter(collector))
    failing.after = 99
    assert _turns(next(iter(collector))) == [1, 1]  # goes on where it was


def test_a_batch_that_was_cut_short_goes_on_with_the_steps_that_it_has(policy):
    failing = Failing(policy, 1, KeyboardInterrupt())
    env = make_env(2, 3)
    collector = LLMCollector(env, policy=failing, dialog_turns_per_batch=6)
    with pytest.raises(KeyboardInterrupt):
        next(iter(collector))
    failing.after = 99
    resumed = LLMCollector(make_env(2, 3), policy=Failing(policy, 99), dialog_turns_per_batch=6)
    resumed.load_state_dict(collector.state_dict())
    for one in (collector, resumed):
        assert _turns(next(iter(one))) == [0, 1, 2, 0, 1, 2]
        assert one.dialog_turns == 6


def test_after_shutdown_the_environment_is_closed_and_collecting_an_error(policy):
    env = make_env(2, 1)
    with LLMCollector(env, policy=policy, dialog_turns_per_batch=2) as collector:
        next(iter(collector))
    assert env.is_closed
    collector.shutdown()
    with pytest.raises(ConfigError, match="shut down"):
        next(iter(collector))


def test_names_of_other_backends_are_importable_and_say_what_they_need():
    with pytest.raises(MissingExtraError):
        RayLLMCollector(None)


# -- resume ---------------------------------------------------------------------------------------

_WAYS = {
    "steps": {"dialog_turns_per_batch": 3},
    "completed": {"yield_completed_trajectories": True, "dialog_turns_per_batch": 4},
    "last": {"yield_only_last_steps": True},
    "rows": {"dialog_turns_per_batch": 3, "flatten_data": True},
}


def _content(batch):
    rows = split_rollout(batch).unbind(0)
    return [
        (
            row["query"],
            row["traj_id"].item(),
            row["turn"].item(),
            row["tokens", "full"].tolist(),
            row["log_probs", "full"].tolist(),
            row["trace", "policy_version"].tolist(),
            row["policy_version"].item(),
        )
        for row in rows
    ]


@pytest.mark.parametrize("way", _WAYS)
def test_a_resumed_collector_goes_on_bit_for_bit(tokenizer, tmp_path, way):
    def build():
        return LLMCollector(
            make_env(3, repeats=2, tool="result"),
            policy=make_policy(tokenizer),
            track_policy_version=True,
            **_WAYS[way],
        )

    collector = build()
    batches = iter(collector)
    for _ in range(2):
        next(batches)
    collector.update_policy_weights_()
    next(batches)
    torch.save(
        {"collector": collector.state_dict(), "rng": torch.get_rng_state()}, tmp_path / "state.pt"
    )
    expected = [_content(next(batches)) for _ in range(4)]

    resumed = build()
    state = torch.load(tmp_path / "state.pt", weights_only=False)
    resumed.load_state_dict(state["collector"])
    torch.set_rng_state(state["rng"])
    batches = iter(resumed)
    assert [_content(next(batches)) for _ in range(4)] == expected
    assert resumed.dialog_turns == collector.dialog_turns
    assert resumed.policy_version == 1


def test_a_state_is_not_changed_by_going_on(tokenizer):
    collector = LLMCollector(
        make_env(2, 3), policy=make_policy(tokenizer), dialog_turns_per_batch=2
    )
    batches = iter(collector)
    next(batches)
    state, rng = collector.state_dict(), torch.get_rng_state()
    first = [row["tokens", "full"].tolist() for row in split_rollout(next(batches)).unbind(0)]
    next(batches)
    collector.load_state_dict(state)
    torch.set_rng_state(rng)
    again = [row["tokens", "full"].tolist() for row in split_rollout(next(batches)).unbind(0)]
    assert again == first


def test_a_state_before_the_first_batch_starts_from_the_beginning(policy):
    collector = LLMCollector(make_env(2, 1), policy=policy, dialog_turns_per_batch=2)
    other = LLMCollector(make_env(2, 1), policy=policy, dialog_turns_per_batch=2)
    other.load_state_dict(collector.state_dict())
    assert _queries(next(iter(other))) == ["question 0", "question 1"]


def test_a_state_of_another_environment_is_refused(policy):
    collector = LLMCollector(make_env(2, 1), policy=policy, dialog_turns_per_batch=2)
    from torchrl.envs import TransformedEnv

    from torchrl_llm.errors import CheckpointError

    deeper = TransformedEnv(make_env(2, 1), Ending(1))
    other = LLMCollector(deeper, policy=policy, dialog_turns_per_batch=2)
    with pytest.raises(CheckpointError, match="layers"):
        other.load_state_dict(collector.state_dict())
    other = LLMCollector(make_env(2, 1), policy=lambda td: td, dialog_turns_per_batch=2)
    with pytest.raises(CheckpointError, match="parts of the policy"):
        other.load_state_dict(collector.state_dict())


def test_seeding_returns_the_next_seed(policy):
    collector = LLMCollector(make_env(2, 1), policy=policy, dialog_turns_per_batch=2)
    assert collector.set_seed(3) != 3


def test_a_policy_knows_the_collector_that_runs_it(policy):
    collector = LLMCollector(
        make_env(), policy=policy, dialog_turns_per_batch=3, total_dialog_turns=3
    )
    assert policy.collector is collector
    collector.shutdown()
