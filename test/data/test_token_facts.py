"""Facts of a user's own, from a backend to a loss, with their values at each stop."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import replace
from itertools import chain

import pytest
import torch
from collectors.collecting import make_env
from envs.fake_policy import AnsweringPolicy
from tensordict import TensorDict
from torchrl.envs import Transform

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data import Chat, FinishReason, History, Source, TokenRecord
from torchrl_llm.data.nodes import own_rows
from torchrl_llm.data.ragged import lazy_rows, read_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.data.rollouts import split_batch, split_rollout
from torchrl_llm.data.token_facts import (
    FACTS,
    RECORD_COLUMNS,
    TokenFact,
    find_fact,
    register_fact,
    unregister_fact,
)
from torchrl_llm.data.views import LogProbs, Masks, Tokens, TokenTrace
from torchrl_llm.data.wire import PackedRows, encode, pack_rows
from torchrl_llm.envs import ChatEnv
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.modules import FakeWrapper
from torchrl_llm.modules.backends import SamplingParams
from torchrl_llm.modules.backends.fake import FakeBackend
from torchrl_llm.modules.remote.pool_wire import PackedCompletions
from torchrl_llm.objectives import GRPOLoss

MODES = ("history", "text", "tokens")
SURPRISE = TokenFact(
    name="surprise",
    dtype=torch.float32,
    key=("surprise", "full"),
    default=-0.5,
    padding=-7.0,
    parts=True,
)
ROUTE = TokenFact(
    name="route", dtype=torch.int16, key=("router", "experts"), default=-1, padding=-2, shape=(2,)
)
USER = {"role": "user", "content": "Go on"}


def _pickled(value):
    return pickle.loads(pickle.dumps(value))


def _safely_sent(packed):
    return PackedRows.open(encode(packed))


WIRES = (_pickled, _safely_sent)


def _surprise(ids):
    return ids.float() / 4


def _route(ids):
    return torch.stack([ids % 5, ids % 3], -1).to(torch.int16)


def _expected(ids, source):
    """Values worked out from the ids alone: of sampled tokens, and defaults elsewhere."""
    sampled = source == Source.SAMPLED
    surprise = torch.where(sampled, _surprise(ids), -0.5)
    return surprise, torch.where(sampled.unsqueeze(-1), _route(ids), -1)


class Telling(FakeBackend):
    """Returns both facts with each completion."""

    def generate(self, prompts, params):
        groups = super().generate(prompts, params)
        return [[self._told(completion) for completion in group] for group in groups]

    @staticmethod
    def _told(completion):
        ids = completion.token_ids
        return completion._replace(facts={"surprise": _surprise(ids), "route": _route(ids)})


class Ask(Transform):
    """The user asks again after each turn; the conversation ends with the second."""

    def _step(self, tensordict, next_tensordict):
        size = next_tensordict.batch_size.numel()
        self.parent.mode.append(tensordict, next_tensordict, [[USER]] * size)
        done = (next_tensordict["turn"] >= 2).unsqueeze(-1)
        for name in ("done", "terminated"):
            next_tensordict.set(name, done)
        return next_tensordict


@pytest.fixture
def facts():
    for fact in (SURPRISE, ROUTE):
        register_fact(fact)
    yield
    for fact in (SURPRISE, ROUTE):
        unregister_fact(fact.name)


def _policy(tokenizer, mode="history", **options):
    options = {"generate_kwargs": {"max_new_tokens": 5}, **options}
    return FakeWrapper(
        Telling(tokenizer=tokenizer), tokenizer=tokenizer, input_mode=mode, **options
    )


def _rollout(tokenizer, mode, queries, **options):
    env = ChatEnv(batch_size=(2,), input_mode=mode, tokenizer=tokenizer).append_transform(Ask())
    policy = _policy(tokenizer, mode, **options)
    td = env.reset(queries("a", "bcd"))
    return env.rollout(2, policy, tensordict=td, auto_reset=False)


def _check(row):
    ids, source = row["tokens", "full"], row["trace", "source"]
    surprise, route = _expected(ids, source)
    assert torch.equal(row["surprise", "full"], surprise)
    assert torch.equal(row["router", "experts"], route)
    start = len(row["tokens", "prompt"])
    assert torch.equal(row["surprise", "response"], surprise[start:])
    assert row["router", "experts"].dtype == torch.int16


# The table


def test_the_table_holds_the_columns_of_record_and_containers():
    fields = dataclasses.fields(TokenRecord)
    assert tuple(f.name for f in fields if f.type == "Tensor") == RECORD_COLUMNS
    for container, node in (
        (Tokens, "tokens"),
        (LogProbs, "log_probs"),
        (Masks, "masks"),
        (TokenTrace, "trace"),
    ):
        named = {fact.key for fact in FACTS.values() if fact.key[0] == node}
        assert {column for _, column in named} <= set(container._dtypes)
    assert TokenTrace._dtypes == {
        "source": torch.int8,
        "turn": torch.int16,
        "policy_version": torch.int32,
        "mask_reason": torch.int8,
    }


# The way of a value


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padded", [False, True])
def test_facts_follow_a_rollout_of_two_turns(mode, padded, tokenizer, queries, facts):
    rollout = _rollout(tokenizer, mode, queries, pad_output=padded)
    for step in range(2):
        answered = rollout[:, step]
        for row in range(2):
            one = answered[row]
            valid = one["masks", "all_attention_mask"]
            ids, source = one["tokens", "full"][valid], one["trace", "source"][valid]
            surprise, route = _expected(ids, source)
            assert int((source == Source.SAMPLED).sum()) >= step + 1
            assert torch.equal(one["surprise", "full"][valid], surprise)
            assert torch.equal(one["router", "experts"][valid], route)
            if not valid.all():
                assert (one["surprise", "full"][~valid] == -7).all()
                assert (one["router", "experts"][~valid] == -2).all()
    if padded:
        assert not rollout[:, 1]["masks", "all_attention_mask"].all()


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_token_modes_carry_facts_to_the_next_prompt(mode, tokenizer, queries, facts):
    env = ChatEnv(batch_size=(2,), input_mode=mode, tokenizer=tokenizer).append_transform(Ask())
    start = env.reset(queries("a", "bcd"))
    for rows in (read_rows(start, ("surprise", "prompt")), read_rows(start, ("router", "experts"))):
        assert all((row == row.flatten()[0]).all() for row in rows if row.numel())
    after = env.step(_policy(tokenizer, mode)(start))["next"]
    for row in range(2):
        ids = read_rows(after, ("tokens", "prompt"))[row]
        source = read_rows(after, ("trace", "source"))[row]
        surprise, route = _expected(ids, source)
        assert Source.SAMPLED in source.tolist()
        assert torch.equal(read_rows(after, ("surprise", "prompt"))[row], surprise)
        assert torch.equal(read_rows(after, ("router", "experts"))[row], route)
    assert env.observation_spec.is_in(after.select(*env.observation_spec.keys()))


def test_another_policy_in_between_leaves_defaults(tokenizer, queries, facts):
    env = ChatEnv(batch_size=(2,), input_mode="tokens", tokenizer=tokenizer)
    strange = AnsweringPolicy("tokens", tokenizer=tokenizer)
    after = env.step(strange(env.reset(queries("a", "bcd"))))["next"]
    for ids, values in zip(
        read_rows(after, ("tokens", "prompt")),
        read_rows(after, ("surprise", "prompt")),
        strict=True,
    ):
        assert values.tolist() == [-0.5] * len(ids)


@pytest.mark.parametrize("mode", MODES)
def test_joined_turns_have_each_turns_own_values(mode, tokenizer, queries, facts):
    rows = split_rollout(_rollout(tokenizer, mode, queries))
    for row in rows:
        # Only its own response says it: earlier turns must come from their own rows.
        start = len(row["tokens", "prompt"])
        row["surprise"] = TensorDict(row["surprise"])
        row["surprise", "full"] = row["surprise", "full"].index_fill(0, torch.arange(start), 9.0)
    buffer = ReplayBuffer(transform=JoinTurns())
    buffer.extend(lazy_rows(rows))
    joined = buffer[:].unbind(0)
    assert [row["num_turns"].item() for row in joined] == [2, 2]
    for row in joined:
        sampled = row["trace", "source"] == Source.SAMPLED
        surprise, route = _expected(row["tokens", "full"], row["trace", "source"])
        assert torch.equal(row["surprise", "full"][sampled], surprise[sampled])
        assert torch.equal(row["router", "experts"], route)
        start = len(row["tokens", "prompt"])
        assert torch.equal(row["surprise", "response"], row["surprise", "full"][start:])


def test_a_fork_forgets_the_facts_of_tokens_that_another_row_trains(tokenizer, queries, facts):
    first, second = (r for r in split_rollout(_rollout(tokenizer, "history", queries))[:2])
    second["tokens", "prompt"] = second["tokens", "prompt"].clone()
    second["tokens", "prompt"][0] += 1
    buffer = ReplayBuffer(transform=JoinTurns())
    buffer.extend(lazy_rows([first, second]))
    _, fork = buffer[:].unbind(0)
    start = len(fork["tokens", "prompt"])
    assert (fork["surprise", "full"][:start] == -0.5).all()
    assert (fork["router", "experts"][:start] == -1).all()
    assert torch.equal(fork["surprise", "response"], _surprise(fork["tokens", "response"]))


class SurprisedLoss(GRPOLoss):
    """The advantage of a token is its surprise."""

    def advantage(self, tensordict, rows):
        return rows.column(tensordict, ("surprise", "full"), "Telling returns it")


@pytest.mark.parametrize("padded", [False, True])
def test_a_loss_reads_a_fact(padded, tokenizer, queries, facts):
    policy = _policy(tokenizer, pad_output=padded)
    env = ChatEnv(batch_size=(2,))
    td = policy(env.reset(queries("a", "bcd")))
    loss = SurprisedLoss(policy, aggregation="token_mean", masking_strategy="rlhf")
    sampled = torch.cat(
        [
            row[s == Source.SAMPLED]
            for row, s in zip(
                read_rows(td, ("tokens", "full")), read_rows(td, ("trace", "source")), strict=True
            )
        ]
    )
    # the ratio is one: the objective is minus the mean advantage
    assert loss(td).loss_objective.item() == pytest.approx(-_surprise(sampled).mean().item())


@pytest.mark.parametrize("send", WIRES)
def test_a_new_fact_is_one_entry_from_the_backend_to_a_loss(send, tokenizer, facts):
    policy = _policy(tokenizer)
    collector = LLMCollector(
        make_env(2, turns=2, tool="7"),
        policy=policy,
        dialog_turns_per_batch=4,
        total_dialog_turns=4,
    )
    rows = split_rollout(next(iter(collector)))
    assert len(rows) == 4
    sent = send(pack_rows(rows)).unpack()
    for row in (*rows, *sent.unbind(0)):
        _check(row)
        told = row["history", "full"].chats[0].record.facts
        assert torch.equal(told["surprise"], row["surprise", "full"])
        assert torch.equal(told["route"], row["router", "experts"])
        assert told["route"].dtype == torch.int16
    buffer = ReplayBuffer(transform=JoinTurns())
    buffer.extend(sent)
    batch = buffer[:]
    rows = batch.unbind(0)
    assert [row["num_turns"].item() for row in rows] == [2, 2]
    for row in rows:
        _check(row)
    ids = torch.cat([row["tokens", "full"] for row in rows])
    sampled = torch.cat([row["trace", "source"] for row in rows]) == Source.SAMPLED
    loss = SurprisedLoss(policy, aggregation="token_mean")(batch)
    # the ratio is one: the objective is minus the mean advantage
    wanted = -_surprise(ids[sampled]).mean().item()
    assert loss.loss_objective.item() == pytest.approx(wanted)


def test_padding_fills_dense_columns_and_a_response_is_part_of_full(tokenizer, queries, facts):
    td = ChatEnv(batch_size=(2,)).reset(queries("a", "bcd"))
    ragged = _policy(tokenizer, generate_kwargs={"max_new_tokens": 5, "seed": 3})(td.copy())
    dense = _policy(tokenizer, generate_kwargs={"max_new_tokens": 5, "seed": 3}, pad_output=True)(
        td.copy()
    )
    rows = read_rows(ragged, ("surprise", "full"))
    longest = max(map(len, rows))
    assert dense["surprise", "full"].shape == (2, longest)
    assert dense["router", "experts"].shape == (2, longest, 2)
    there = dense["masks", "all_attention_mask"]
    for row, padded, mask in zip(rows, dense["surprise", "full"], there, strict=True):
        assert padded[mask].tolist() == row.tolist()
        assert (padded[~mask] == -7.0).all()
    for node in ("tokens", "log_probs", "surprise"):
        full, response = (read_rows(ragged, (node, part)) for part in ("full", "response"))
        for whole, part in zip(full, response, strict=True):
            assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            assert torch.equal(part, whole[len(whole) - len(part) :])


def test_out_keys_name_facts(tokenizer, facts):
    keys = _policy(tokenizer).out_keys
    assert {("surprise", "full"), ("surprise", "response"), ("router", "experts")} <= set(keys)
    unregister_fact("route")
    assert ("router", "experts") not in _policy(tokenizer).out_keys
    register_fact(ROUTE)


def test_several_samples_have_facts_of_their_own(tokenizer, queries, facts):
    td = ChatEnv(batch_size=(2,)).reset(queries("a", "bcd"))
    out = _policy(tokenizer, num_samples=3)(td.select("history"))
    assert out.batch_size == (2, 3)
    for group in out.unbind(0):
        for row in split_batch(group):
            _check(row)


def test_a_response_that_goes_on_keeps_its_facts(tokenizer, queries, facts):
    env = ChatEnv(batch_size=(2,))
    policy = _policy(tokenizer, generate_kwargs={"max_new_tokens": 2})
    answered = policy(env.reset(queries("a", "bcd")))
    chats = answered["history"].full.chats
    again = TensorDict(batch_size=[2])
    again["history"] = type(answered["history"])(prompt=History.of(chats), batch_size=[2])
    for row in split_batch(policy(again)):
        _check(row)


# Records


def _record():
    prompt = TokenRecord.from_prompt(torch.tensor([5, 6]), torch.tensor([0, 1]), 1)
    said = torch.tensor([7, 8]), torch.tensor([-0.5, -1.0]), 3, FinishReason.STOP
    return prompt.respond(*said, facts={"surprise": torch.tensor([1.0, 2.0])})


def test_records_extend_cut_pickle_and_answer_with_facts(facts):
    record = _record().extend(torch.tensor([9]), torch.tensor([1]), 3)
    record = record.respond(torch.tensor([10]), torch.tensor([-2.0]), 4, FinishReason.LENGTH)
    wanted = [-0.5, -0.5, 1.0, 2.0, -0.5, -0.5]
    for twin in (record, _pickled(record), copy.deepcopy(record)):
        assert twin.facts["surprise"].tolist() == wanted
    assert record.cut(1, 3).facts["surprise"].tolist() == [-0.5, 1.0]
    assert set(record.columns()) == {*RECORD_COLUMNS, "surprise", "route"}


def test_wires_keep_apart_records_with_and_without_a_fact(facts):
    bare = TokenRecord.from_prompt(torch.tensor([5, 6, 7]), torch.tensor([0, 1, 1]), 1)
    one = replace(_record(), facts={"surprise": _record().facts["surprise"]})
    chats = [Chat([{"role": "user", "content": "q"}], r) for r in (bare, one, bare)]
    packed = pack_rows(split_batch(TensorDict(history=History.of(chats), batch_size=[3])))
    for send in WIRES:
        back = [chat.record for chat in send(packed).unpack()["history"].chats]
        assert [dict(record.facts).keys() for record in back] == [set(), {"surprise"}, set()]
        assert back[1].facts["surprise"].tolist() == [-0.5, -0.5, 1.0, 2.0]


def test_a_pool_sends_facts_with_defaults_where_only_others_have_them(facts):
    backend = Telling(vocab_size=16, eos_token_ids=(2,))
    groups = backend.generate(
        [torch.tensor([5]), torch.tensor([6])], SamplingParams(max_new_tokens=3, num_samples=2)
    )
    groups[1][0] = groups[1][0]._replace(facts={"route": _route(groups[1][0].token_ids)})
    back = _pickled(PackedCompletions.of(groups, version=1)).groups()
    for old, new in zip(chain(*groups), chain(*back), strict=True):
        assert torch.equal(new.facts["route"], old.facts["route"])
    assert (back[1][0].facts["surprise"] == -0.5).all()
    assert torch.equal(back[0][1].facts["surprise"], groups[0][1].facts["surprise"])


def test_rows_that_own_their_memory_keep_the_response_in_it():
    whole = torch.arange(10_000)
    full = whole[100:1100]
    row = TensorDict(tokens=TensorDict(prompt=whole[100:200], response=full[100:], full=full))
    (owned,) = own_rows([row])
    tokens = owned["tokens"]
    assert torch.equal(tokens["full"], whole[100:1100])
    assert torch.equal(tokens["response"], whole[200:1100])
    assert tokens["full"].untyped_storage().nbytes() == 8 * 1000
    assert tokens["response"].data_ptr() == tokens["full"][100:].data_ptr()
    again = own_rows([owned])[0]["tokens"]
    assert again["full"].data_ptr() == tokens["full"].data_ptr()
    # a response that is no part of it is copied as before
    other = TensorDict(response=whole[100:200], full=whole[100:1100])
    (owned,) = own_rows([other])
    assert owned["response"].untyped_storage().nbytes() == 8 * 100
    assert owned["response"].tolist() == list(range(100, 200))


# Errors


def test_a_fact_is_registered_once(facts):
    assert register_fact(SURPRISE) is FACTS["surprise"]  # a module that is imported again
    other = dataclasses.replace(ROUTE, name="other")
    for fact, message in (
        (dataclasses.replace(SURPRISE, default=0.0), r"called 'surprise'.*unregister_fact"),
        (dataclasses.replace(SURPRISE, name="log_probs"), "already called 'log_probs'"),
        (other, r"the fact 'route' has it; choose a node of its own"),
        (dataclasses.replace(other, key=("trace", "mine")), "rows use 'trace' themselves"),
        (dataclasses.replace(other, key=("o", "full"), default=None), "no default.*pass default="),
        ("surprise", "takes a TokenFact, got str"),
    ):
        with pytest.raises(ConfigError, match=message):
            register_fact(fact)
    with pytest.raises(ConfigError, match=r"no fact 'source'.*\['surprise', 'route'\]"):
        unregister_fact("source")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "a b"}, "name"),
        ({"dtype": torch.bfloat16}, "dtype: one of"),
        ({"key": ("one",)}, "key: a tuple of two names"),
        ({"key": "one"}, "key: a tuple of two names"),
        ({"join": "sum"}, 'join: "turns" or "last"'),
        ({"key": ("router", "experts"), "parts": True}, 'ends in "full"'),
    ],
)
def test_an_entry_that_contradicts_itself_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        TokenFact(**{"name": "x", "dtype": torch.int8, "key": ("x", "full"), **wrong})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"surprise": torch.zeros(3, dtype=torch.int8)}, r"convert it with .to\(torch.float32\)"),
        (
            {"surprise": torch.zeros(2)},
            r"\[3\], got torch.float32 \[2\]; return one value for each",
        ),
        ({"route": torch.zeros(3, dtype=torch.int16)}, r"must be torch.int16 \[3, 2\]"),
        ({"surprise": [0.0] * 3}, "must be a tensor .* got list"),
        ({"unheard": torch.zeros(3)}, r"not registered in this process; call register_fact"),
        ({"turn": torch.zeros(3)}, "only facts that were registered with wired=True"),
    ],
)
def test_wrong_facts_of_a_completion_are_refused(given, message, tokenizer, queries, facts):
    class Wrong(FakeBackend):
        def generate(self, prompts, params):
            groups = super().generate(prompts, params)
            return [[one._replace(facts=given) for one in group] for group in groups]

    policy = FakeWrapper(
        Wrong([7, 8, 9], tokenizer=tokenizer, eos_token_ids=(9,)), tokenizer=tokenizer
    )
    with pytest.raises(DataError, match=message):
        policy(ChatEnv(batch_size=(1,)).reset(queries("a")))


def test_rows_of_another_process_need_the_registration_here(tokenizer, queries, facts):
    answered = _policy(tokenizer)(ChatEnv(batch_size=(1,)).reset(queries("a")))
    sent = encode(pack_rows(split_batch(answered)))
    pickled = pickle.dumps(answered["history"].full.chats[0])
    unregister_fact("route")
    with pytest.raises(DataError, match=r"\['route'\] are not registered here; see register_fact"):
        PackedRows.open(sent)
    record = pickle.loads(pickled).record
    with pytest.raises(DataError, match=r"call register_fact\(TokenFact\(name='route'"):
        record.extend(torch.tensor([1]), torch.tensor([0]), 3)
    with pytest.raises(DataError, match="'route' is not registered"):
        find_fact("route")
    register_fact(ROUTE)


def test_bytes_with_facts_of_another_length_or_type_are_refused(facts):
    for facts_of, message in (
        ({"surprise": torch.zeros(3)}, "surprise of a record has another length"),
        ({"surprise": torch.zeros(4, dtype=torch.int8)}, "surprise is not torch.float32"),
    ):
        record = dataclasses.replace(_record(), facts=facts_of)
        chat = Chat([{"role": "user", "content": "q"}], record)
        rows = split_batch(TensorDict(history=History.of([chat]), batch_size=[1]))
        with pytest.raises(DataError, match=message):
            _safely_sent(pack_rows(rows))
