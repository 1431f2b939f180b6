"""The environments in TorchRL's own rollouts, collectors, env pools and replay buffers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from envs.fake_policy import AnsweringPolicy, answer_four, chatter
from tensordict import TensorDict, lazy_stack
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, LazyStackStorage, ListStorage, ReplayBuffer
from torchrl.envs import ParallelEnv, RewardSum, SerialEnv

from torchrl_llm.data.enums import MaskReason, Source
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.envs import GSM8KEnv
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import FakeWrapper, TransformersWrapper

MODES = ("history", "text", "tokens")
ROWS = [{"question": "Q" * n, "answer": f"#### {n}"} for n in range(1, 6)]


class Alternating:
    """Answers at every second call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, prompt):
        self.calls += 1
        return answer_four(prompt) if self.calls % 2 else chatter(prompt)


def make_env(mode, tokenizer, **kwargs):
    kwargs = {"num_envs": 4, "max_steps": 2, "shuffle": False, "repeats": 2} | kwargs
    return GSM8KEnv(dataset=ROWS, input_mode=mode, tokenizer=tokenizer, **kwargs)


@pytest.mark.parametrize("mode", MODES)
def test_a_rollout_goes_on_over_resets_of_single_rows(mode, tokenizer):
    env = make_env(mode, tokenizer)
    policy = AnsweringPolicy(mode, Alternating(), tokenizer)
    td = env.rollout(3, policy, break_when_any_done=False)
    assert td.shape == (4, 3)
    # rows 0 and 2 answer at once and start anew; rows 1 and 3 are cut after two turns
    assert td["turn"].tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 1, 0]]
    assert td["next", "truncated"].squeeze(-1)[1].tolist() == [False, True, False]
    rows = [list(row) for row in td["query"]]
    assert rows[0] == ["Q", "QQQ", "QQQQ"]
    assert rows[1] == ["Q", "Q", "QQQQ"]
    assert list(td["answer"][1]) == ["1", "1", "4"]
    ids = td["traj_id"]
    assert ids[1, 0] == ids[1, 1] != ids[1, 2]
    groups = td["group_id"]
    assert groups[0, 0] == groups[1, 0]
    assert groups[0, 1] == groups[2, 1]


@pytest.mark.parametrize("mode", MODES)
def test_each_prompt_continues_the_last_turn_token_for_token(mode, tokenizer):
    env = make_env(mode, tokenizer)
    policy = AnsweringPolicy(mode, chatter, tokenizer)
    td = env.rollout(2, policy)
    for row in range(4):
        full = read_rows(td[:, 0], ("tokens", "full"))[row]
        prompt = read_rows(td[:, 1], ("tokens", "prompt"))[row]
        assert prompt[: len(full)].tolist() == full.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_a_rollout_can_wait_until_all_rows_are_done(mode, tokenizer):
    env = make_env(mode, tokenizer, max_steps=3)
    policy = AnsweringPolicy(mode, Alternating(), tokenizer)
    td = env.rollout(5, policy, break_when_any_done=False, break_when_all_done=True)
    assert td["next", "done"][:, -1].all()
    assert td["next", "turn"][:, -1].tolist() == [1, 3, 1, 3]


@pytest.mark.parametrize("mode", MODES)
def test_torchrls_plain_collector_and_replay_buffers_hold_the_rows(mode, tokenizer):
    policy = AnsweringPolicy(mode, Alternating(), tokenizer)
    env = make_env(mode, tokenizer)
    collector = Collector(env, policy, frames_per_batch=12, total_frames=24)
    batches = list(collector)
    collector.shutdown()
    assert [batch.shape for batch in batches] == [(4, 3), (4, 3)]
    rows = batches[-1].reshape(-1)
    texts = [row["query"] for row in rows.unbind(0)]
    ids = [row.tolist() for row in read_rows(rows, ("tokens", "full"))]
    known = list(zip(texts, ids, strict=True))

    lazy = ReplayBuffer(storage=LazyStackStorage(100), batch_size=6)
    lazy.extend(rows)
    sample = lazy.sample()
    pairs = zip(sample["query"], read_rows(sample, ("tokens", "full")), strict=True)
    assert all((text, row.tolist()) in known for text, row in pairs)

    listed = ReplayBuffer(storage=ListStorage(100), batch_size=6, collate_fn=list)
    listed.extend(rows)
    assert all((row["query"], row["tokens", "full"].tolist()) in known for row in listed.sample())

    if mode == "history":
        chats = [row["history"].full.chats[0] for row in rows.unbind(0)]
        assert all(row["history"].full.chats[0] in chats for row in sample.unbind(0))


def test_dense_rows_go_through_memory_mapped_storage(tokenizer, tmp_path):
    td = make_env("tokens", tokenizer).rollout(1, AnsweringPolicy("tokens", tokenizer=tokenizer))
    rows = td.reshape(-1)
    full = torch.nn.utils.rnn.pad_sequence(read_rows(rows, ("tokens", "full")), batch_first=True)
    dense = TensorDict(
        ids=full, reward=rows["next", "reward"], group_id=rows["group_id"], batch_size=[4]
    )
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path), batch_size=4)
    buffer.extend(dense)
    assert torch.equal(buffer[:]["ids"], full)
    assert torch.equal(buffer[:]["group_id"], rows["group_id"])


@pytest.mark.parametrize("mode", ["history", "text"])
@pytest.mark.parametrize("by_row", [True, False])
def test_conversations_are_refused_by_memory_mapped_storage(tokenizer, tmp_path, mode, by_row):
    env = make_env(mode, tokenizer)
    policy = FakeWrapper("a", tokenizer=tokenizer, input_mode=mode, pad_output=True)
    padded = policy(env.reset()).select(mode, "tokens")  # padded, so that rows have one shape
    rows = lazy_stack(list(padded.unbind(0))) if by_row else padded
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path), batch_size=4)
    with pytest.raises(ConfigError, match=r"loses text and conversations.*LazyStackStorage"):
        buffer.extend(rows)  # each row read back as the first one
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path), batch_size=4)
    buffer.extend(rows.select("tokens"))
    assert torch.equal(buffer[:]["tokens", "full"], padded["tokens", "full"])
    # What is mapped with its rows keeps them.
    mapped = padded.select(mode).memmap(tmp_path / "whole")
    assert mapped.batch_size == padded.batch_size


def test_a_list_storage_collates_dense_rows(tokenizer):
    td = make_env("tokens", tokenizer).rollout(1, AnsweringPolicy("tokens", tokenizer=tokenizer))
    rows = td.reshape(-1).select("group_id", ("next", "reward"))
    buffer = ReplayBuffer(storage=ListStorage(10), batch_size=4, collate_fn=torch.stack)
    buffer.extend(rows)
    assert buffer.sample()["next", "reward"].shape == (4, 1, 1)


def test_a_serial_env_stacks_the_environments(tokenizer):
    env = SerialEnv(2, lambda: make_env("history", tokenizer, num_envs=1))
    td = env.rollout(2, break_when_any_done=False)
    assert td.shape == (2, 1, 2)
    assert td["group_id"][:, 0, 0].unique().numel() == 2


@pytest.mark.parametrize("mode", MODES)
def test_a_wrapper_answers_and_scores_a_serial_env_as_its_environments(mode, tokenizer, tiny_model):
    check_pool(SerialEnv, mode, tokenizer, tiny_model)


def test_a_wrapper_answers_and_scores_a_parallel_env(tokenizer, tiny_model):
    pool = partial(ParallelEnv, mp_start_method="fork")
    check_pool(pool, "history", tokenizer, tiny_model)


def check_pool(kind, mode, tokenizer, model):
    policy = TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode=mode,
        generate_kwargs={"max_new_tokens": 4, "temperature": 0},
    )
    single = partial(make_env, mode, tokenizer, num_envs=3, repeats=1)
    expected = single().rollout(2, policy)
    pool = kind(2, single)
    try:
        td = pool.rollout(2, policy, break_when_any_done=False)
    finally:
        pool.close()
    assert td.shape == (2, 3, 2)
    score = policy.get_new_version(generate=False, log_probs_key="scored")
    score(td)
    for env in range(2):
        for step in range(2):
            got, want = td[env, :, step], expected[:, step]
            for key in (("tokens", "full"), ("tokens", "response"), ("trace", "turn")):
                pairs = zip(read_rows(got, key), read_rows(want, key), strict=True)
                assert all(torch.equal(a, b) for a, b in pairs)
            scored, sampled = (read_rows(got, (node, "full")) for node in ("scored", "log_probs"))
            source = read_rows(got, ("trace", "source"))
            for new, old, where in zip(scored, sampled, source, strict=True):
                mask = where == Source.SAMPLED
                torch.testing.assert_close(new[mask], old[mask], atol=1e-4, rtol=0)


def test_core_transforms_can_be_appended(tokenizer):
    env = make_env("history", tokenizer)
    env.append_transform(RewardSum(in_keys=["reward"], out_keys=["episode_reward"]))
    td = env.rollout(2, AnsweringPolicy(answer=chatter))
    assert td["next", "episode_reward"].shape == (4, 2, 1, 1)


@pytest.mark.parametrize("mode", MODES)
def test_with_a_real_wrapper_every_turn_keeps_ids_trace_and_log_probs(mode, tokenizer, tiny_model):
    policy = TransformersWrapper(
        tiny_model,
        tokenizer=tokenizer,
        input_mode=mode,
        generate_kwargs={"max_new_tokens": 4, "temperature": 1.0},
    )
    td = make_env(mode, tokenizer, max_steps=3).rollout(3, policy)
    assert td.shape == (4, 3)
    for row in range(4):
        sampled, before = 0, torch.zeros(0)
        for turn in range(3):
            step = td[:, turn]
            full = read_rows(step, ("tokens", "full"))[row]
            sampled += len(read_rows(step, ("tokens", "response"))[row])
            source = read_rows(step, ("trace", "source"))[row]
            reason = read_rows(step, ("trace", "mask_reason"))[row]
            log_probs = read_rows(step, ("log_probs", "full"))[row]
            assert (source == Source.SAMPLED).sum() == sampled
            assert ((reason == MaskReason.TRAINED) == (source == Source.SAMPLED)).all()
            assert ((log_probs != 0) == (source == Source.SAMPLED)).all()
            assert full[: len(before)].tolist() == before.tolist()
            before = full
