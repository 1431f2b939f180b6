"""Delegation: child episodes as one batch, whose rows leave with their parent's."""

from __future__ import annotations

import json
import re

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm.agents import Agent
from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.data.rollouts import row_list, sampled_tokens
from torchrl_llm.envs import ChatEnv
from torchrl_llm.envs.datasets.number_tasks import DelegationEnv
from torchrl_llm.envs.datasets.rows_env import RowsEnv
from torchrl_llm.envs.delegate import Delegate, delegates_of
from torchrl_llm.envs.transforms import StepCounter
from torchrl_llm.errors import BackendError, ConfigError
from torchrl_llm.evaluation import evaluate
from torchrl_llm.modules import FakeWrapper, load_tokenizer
from torchrl_llm.modules.backends.fake import Answer
from torchrl_llm.objectives.credit import MCAdvantage
from torchrl_llm.rewards import RewardParser

ROWS = [{"query": f"Sum {n}", "answer": "right"} for n in range(8)]


def hand_on(*tasks, name="delegate"):
    """A turn that hands on tasks."""
    calls = [json.dumps({"name": name, "arguments": {"task": task}}) for task in tasks]
    return "".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def says(prompt):
    """The parent hands on two tasks, and answers by what it is told; children echo theirs."""
    last = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    if last.startswith("Part"):
        return f"done {last[-1]}"
    return "right" if "done" in prompt else hand_on("Part 1", "Part 2")


def collect(delegate, answers, tokenizer, *, num_envs=4, repeats=2, **options):
    env = RowsEnv(
        dataset=ROWS, reward=lambda response, answer: float(response == answer), num_envs=num_envs,
        repeats=repeats, shuffle=False, tokenizer=tokenizer, **options,
    )  # fmt: skip
    env.append_transform(delegate)
    mode = env.base_env.mode.name
    policy = FakeWrapper(answers, tokenizer=tokenizer, input_mode=mode)
    collector = LLMCollector(
        env, policy=policy, yield_completed_trajectories=True, reset_at_each_iter=True
    )
    return collector, row_list(next(iter(collector)))


def children_of(rows):
    return [row for row in rows if row.get("depth", None) is not None]


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_children_answer_as_one_batch_and_their_rows_leave_with_the_parents(mode, tokenizer):
    calls = []

    def counted(prompt):
        calls.append(prompt)
        return says(prompt)

    collector, rows = collect(Delegate(), counted, tokenizer, input_mode=mode)
    children = children_of(rows)
    assert (len(rows), len(children)) == (4 * 2 + 8, 8)
    by_parent = {}
    for row in children:
        by_parent.setdefault(int(row["parent_id"]), []).append(row)
        assert int(row["traj_id"]) == int(row["parent_id"])
        assert (int(row["depth"]), str(row["agent"])) == (1, "/delegate")
        assert not row["next", "done"].any()
    assert {len(each) for each in by_parent.values()} == {2}
    parents = [row for row in rows if row["next", "done"].all()]
    assert {int(row["traj_id"]) for row in parents} == set(by_parent)
    groups = {int(row["traj_id"]): int(row["group_id"]) for row in parents}
    assert all(int(row["group_id"]) == groups[int(row["parent_id"])] for row in children)
    assert len({int(row["child_id"]) for row in children}) == 8
    assert all(float(row["next", "reward"]) == 1.0 for row in parents)
    # Every sampled token is in one row, and counted once.
    total = sum(len(row["tokens", "response"]) for row in rows)
    assert total == sum(map(sampled_tokens, rows)) == collector.sampled_tokens
    assert len(calls) == 16


def test_they_are_trained_once_by_the_return_of_their_parent(tokenizer):
    def uneven(prompt):
        said = says(prompt)
        return "wrong" if said == "right" and "Sum 1" in prompt else said

    _, rows = collect(Delegate(), uneven, tokenizer, num_envs=4, repeats=2)
    for row in rows:  # the two prompts are one group here, of which one is solved
        row.set("group_id", torch.zeros((), dtype=torch.int64))
    buffer = ReplayBuffer()
    buffer.append_transform(JoinTurns())
    buffer.append_transform(MCAdvantage(grpo_size=4))
    buffer.extend(rows)
    found = [buffer[i] for i in range(len(buffer))]
    assert len(found) == 4 + 8
    advantages = {}
    for row in found:
        advantages.setdefault(int(row["traj_id"]), set()).add(
            round(float(row["advantage"].flatten()[0]), 3)
        )
    assert all(len(each) == 1 for each in advantages.values())
    assert len(set().union(*advantages.values())) == 2
    trained = sum(int((row["trace", "mask_reason"] == 0).sum()) for row in found)
    assert trained == sum(len(row["tokens", "response"]) for row in rows)


class Judge(RewardParser):
    """Half a point for whoever says what is done."""

    def score(self, response, answer):
        return 0.5 * response.startswith("done")


def judged(num):
    env = ChatEnv(batch_size=(num,)).append_transform(StepCounter(max_steps=1))
    return env.append_transform(Judge(in_keys=[("history", "full"), "query"]))


@pytest.mark.parametrize(("by", "total"), [("parent", 1.0), ("both", 2.0), ("own", 1.0)])
def test_what_children_are_trained_by(by, total, tokenizer):
    _, rows = collect(Delegate(judged, trained_by=by), says, tokenizer, num_envs=2)
    children = children_of(rows)
    parents = {int(row["traj_id"]) for row in rows} - {int(row["traj_id"]) for row in children}
    if by == "own":
        assert all(bool(row["next", "done"].all()) for row in children)
        assert {float(row["next", "reward"]) for row in children} == {0.5}
        assert len({int(row["traj_id"]) for row in children}) == 4
        assert len(parents) == 2
    returns = {}
    for row in rows:
        if by != "own" or row.get("depth", None) is None:
            key = int(row["traj_id"])
            returns[key] = returns.get(key, 0.0) + float(row["next", "reward"])
    assert set(returns.values()) == {total}


def test_children_of_their_own_end_and_have_no_group(tokenizer):
    def endless(num):
        return ChatEnv(batch_size=(num,), tokenizer=tokenizer)

    delegate = Delegate(endless, max_turns=1, trained_by="own")
    _, rows = collect(delegate, says, tokenizer, num_envs=2)
    children = children_of(rows)
    assert len(children) == 4
    assert all(row["next", "done"].all() and row["next", "truncated"].all() for row in children)
    with pytest.raises(ConfigError, match=r"trained_by='own'.*has no group"):
        ReplayBuffer(transform=MCAdvantage(2)).extend(lazy_rows(rows))


# -- limits, and what fails -----------------------------------------------------------------------


def results(rows):
    """What parents were told."""
    return [
        message["content"]
        for row in rows
        if row.get("depth", None) is None and row["next", "done"].all()
        for message in row["history"].full.chats[0]
        if message["role"] == "tool"
    ]


def test_a_child_that_fails_or_comes_to_nothing_is_a_message(tokenizer):
    def fails(num):
        raise ZeroDivisionError("no children here")

    def answers(prompt):
        return "right" if "sub-agent" in prompt or "No answer" in prompt else hand_on("Part 1")

    _, rows = collect(Delegate(judged, template="{task}!"), [hand_on("x"), ""], tokenizer,
                      num_envs=1, repeats=1, max_steps=1)  # fmt: skip
    assert len(rows) > 1

    class Broken(FakeWrapper):
        def forward(self, tensordict, **kwargs):
            if "Part" in str(tensordict["query"][0]):
                raise BackendError("out of memory")
            return super().forward(tensordict, **kwargs)

    env = RowsEnv(dataset=ROWS, reward=lambda r, answer: float(r == answer), num_envs=2)
    env.append_transform(Delegate())
    collector = LLMCollector(
        env, policy=Broken(answers, tokenizer=tokenizer), yield_completed_trajectories=True,
        reset_at_each_iter=True,
    )  # fmt: skip
    rows = row_list(next(iter(collector)))
    assert results(rows) == ["The sub-agent failed."] * 2
    failed = [row["next", "tools", "calls"][0] for row in rows if row["turn"] == 0]
    assert {call["error"] for call in failed} == {"BackendError"}
    assert all(float(row["next", "reward"]) == 1.0 for row in rows if row["turn"] == 1)
    with pytest.raises(ZeroDivisionError):
        collect(Delegate(fails), says, tokenizer)


def test_a_child_that_is_cut_has_no_answer(tokenizer):
    def answers(prompt):
        said = says(prompt)
        return Answer(said, FinishReason.LENGTH) if said.startswith("done") else said

    def parent(prompt):
        return "right" if "came to no answer" in prompt else answers(prompt)

    _, rows = collect(Delegate(), parent, tokenizer, num_envs=1, repeats=1)
    assert results(rows) == ["The sub-agent came to no answer in 1 turns."] * 2


def test_tasks_are_handed_on_as_deep_as_is_allowed(tokenizer):
    def nested(num):
        return ChatEnv(batch_size=(num,)).append_transform(Delegate(nested))

    def answers(prompt):
        if "handed on" in prompt or "deepest" in prompt:
            return "deepest"
        return hand_on("Part 1")

    for depth in (1, 2):
        delegate = Delegate(nested, max_depth=depth, max_turns=2)
        collector, rows = collect(delegate, answers, tokenizer, num_envs=1, repeats=1)
        children = children_of(rows)
        assert max(int(row["depth"]) for row in children) == depth
        told = [m["content"] for row in children for m in row["history"].full.chats[0]]
        assert any(f"handed on {depth} deep" in text for text in told)
        # Each child knows its parent, and no row of any depth is lost.
        depths = {int(row["child_id"]): int(row["depth"]) for row in children}
        for row in children:
            if row["depth"] == 2:
                assert depths[int(row["parent_id"])] == 1
                assert str(row["agent"]) == "/delegate/delegate"
        assert sum(len(row["tokens", "response"]) for row in rows) == collector.sampled_tokens


def test_calls_of_a_turn_are_limited(tokenizer):
    def answers(prompt):
        return says(prompt) if "done" in prompt or "Part" in prompt else hand_on("Part 1", "Part 2")

    _, rows = collect(Delegate(max_calls=1), answers, tokenizer, num_envs=1, repeats=1)
    assert len(children_of(rows)) == 1
    assert results(rows)[1] == "1 further calls were not run: at most 1 a turn."


def test_a_child_may_begin_with_the_parents_conversation(tokenizer):
    _, rows = collect(Delegate(inherits_context=True), says, tokenizer, num_envs=1, repeats=1)
    for child in children_of(rows):
        said = [message["content"] for message in child["history"].full.chats[0]]
        assert said[-3] == "Sum 0"
        assert said[-2].startswith("Part")
    # The parent sees only what was returned.
    assert all("Part 1" not in text for text in results(rows))
    with pytest.raises(ConfigError, match="history mode"):
        collect(Delegate(inherits_context=True), says, tokenizer, input_mode="tokens")


def test_an_agent_acts_for_children(tokenizer):
    agent = Agent(system_prompt="You are the child.")
    _, rows = collect(Delegate(agent=agent), says, tokenizer, num_envs=1, repeats=1)
    prompts = [tokenizer.decode(row["tokens", "prompt"]) for row in rows]
    children = [row.get("depth", None) is not None for row in rows]
    assert ["You are the child." in prompt for prompt in prompts] == children


def test_a_template_without_a_task_is_refused():
    with pytest.raises(ConfigError, match=r"must have \{task\}"):
        Delegate(template="Do it.")


def test_without_a_policy_or_with_other_rows_it_says_so(tokenizer):
    env = ChatEnv(batch_size=(1,)).append_transform(Delegate())
    turn = FakeWrapper(hand_on("x"), tokenizer=tokenizer)
    td = turn(env.reset(TensorDict({"query": ["Go"]}, batch_size=(1,))))
    with pytest.raises(ConfigError, match="no policy for its children"):
        env.step(td)
    wrong = Delegate(lambda num: ChatEnv(batch_size=(num + 1,)))
    with pytest.raises(ConfigError, match=r"make_env\(8\) made an environment of 9 rows"):
        collect(wrong, says, tokenizer)
    with pytest.raises(ConfigError, match="no room for the rows of children"):
        LLMCollector(
            ChatEnv(batch_size=(1,)).append_transform(Delegate()), policy=turn,
            dialog_turns_per_batch=2,
        )  # fmt: skip


def test_evaluation_lends_its_policy_and_keeps_no_rows(tokenizer):
    env = RowsEnv(dataset=ROWS, reward=lambda r, answer: float(r == answer), num_envs=4)
    env.append_transform(Delegate())
    policy = FakeWrapper(says, tokenizer=tokenizer)
    assert evaluate(env, policy, num_prompts=8, max_turns=4).accuracy == 1.0
    assert delegates_of(env)[0].take_rows() == {}


def test_a_conversation_of_ones_own_goes_on_by_hand(tokenizer):
    env = ChatEnv(batch_size=(1,)).append_transform(Delegate(name="helper"))
    delegates_of(env)[0].use_policy(FakeWrapper("4", tokenizer=tokenizer))
    td = env.reset(TensorDict({"query": ["Go"]}, batch_size=(1,)))
    call = {"function": {"name": "helper", "arguments": {"task": "2+2"}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    td["history"].full = History.of([td["history"].prompt.chats[0] + [turn]])
    assert env.step(td)["next", "history"].prompt.chats[0][-1]["content"] == "4"


def test_the_task_hands_expressions_to_a_child_that_has_the_calculator(tokenizer):
    env = DelegationEnv(num_envs=4, repeats=2, split="test", shuffle=False)
    expressions = {}

    def answers(prompt):
        asked = re.findall(r"What is ([\d*-]+)\?", prompt)[-1]
        if "<tool_response>" in prompt:
            return prompt.rpartition("<tool_response>\n")[2].partition("\n<")[0]
        expressions[asked] = expressions.get(asked, 0) + 1
        call = json.dumps({"name": "calculator", "arguments": {"expression": asked}})
        return f"<tool_call>\n{call}\n</tool_call>"

    collector = LLMCollector(
        env, policy=FakeWrapper(answers, tokenizer=tokenizer), yield_completed_trajectories=True,
        reset_at_each_iter=True,
    )  # fmt: skip
    rows = row_list(next(iter(collector)))
    assert (len(rows), len(children_of(rows))) == (16, 8)
    # Each expression was called for by two parents, and by the child of each.
    assert set(expressions.values()) == {4}
    assert all(float(row["next", "reward"]) == 1.0 for row in rows if row["next", "done"].all())
    assert len(rows) <= 4 * DelegationEnv.max_turns()
