from __future__ import annotations

import math
import re
import sys
import threading
import time

import pytest
from cases import cases

from torchrl_llm.errors import ConfigError, DataError, MissingExtraError
from torchrl_llm.langmarl.calls import Budget, BudgetUsedUp, CallLog
from torchrl_llm.langmarl.config import PistonballConfig
from torchrl_llm.langmarl.environment import Episodes, list_envs, make_env
from torchrl_llm.langmarl.llm_client import LLMClient
from torchrl_llm.langmarl.llm_config import LLMConfig
from torchrl_llm.langmarl.pistonball import _read
from torchrl_llm.rewards.text_models import ScriptedTextModel

CASES = cases(__file__)

pytest.importorskip("pettingzoo", reason="pip install torchrl_llm[pettingzoo]")
FREE = {"input_price_per_million": 0.0, "output_price_per_million": 0.0}


def make(act=lambda messages: "stay", *, pistons=5, **settings):
    """An environment whose pistons ask a function; in threads, as a server would be asked."""
    llm = LLMConfig(name="s", model_string="scripted:builtins:str", **FREE)
    settings = {"num_pistons": pistons, "num_agents": pistons, "max_cycles": 40, **settings}
    env = make_env("pistonball", PistonballConfig(llm=llm, **settings))
    model = ScriptedTextModel(act, concurrency=env.actor.config.concurrency)
    env.actor = LLMClient(env.actor.config, model=model)
    return env


def play(env, seed=0, log=None):
    episodes = Episodes([(7, {"seed": seed})], CallLog() if log is None else log, "0")
    return env.collect_batch(env.default_policies(), episodes)[0]


def said(messages, pattern):
    return re.search(pattern, messages[-1]["content"])[1]


def push(messages):
    """Up where most of the ball is to the left, and out of its way elsewhere."""
    return "up" if int(said(messages, r"ball is ([+-]\d+)")) < -10 else "down"


# -- playing --------------------------------------------------------------------------------------


def test_pistons_that_push_get_the_ball_to_the_wall_and_pistons_that_stay_do_not():
    pushed, stayed = play(make(push, pistons=20)), play(make(pistons=20))
    assert len(pushed.steps) < 20 * 40  # over before the last cycle
    assert pushed.reward > 95
    assert len(stayed.steps) == 20 * 40
    assert stayed.reward < 0


def test_the_reward_is_that_of_pettingzoo_stepped_with_the_same_actions():
    from pettingzoo.butterfly import pistonball_v6

    found = play(make(push), seed=3)
    env = pistonball_v6.parallel_env(n_pistons=5, continuous=False, max_cycles=40)
    env.reset(seed=3)
    total, codes = 0.0, {"down": 0, "stay": 1, "up": 2}
    for start in range(0, len(found.steps), 5):
        steps = found.steps[start : start + 5]
        rewards = env.step({s["agent_id"]: codes[s["action"]] for s in steps})[1]
        mean = sum(rewards.values()) / 5
        assert [s["reward"] for s in steps] == [pytest.approx(mean)] * 5
        total += mean
    assert not env.agents
    assert found.reward == pytest.approx(total)


def test_the_same_seed_is_the_same_episode_and_another_seed_is_another():
    env = make(push)
    first, other = play(env, 1), play(env, 2)
    assert play(env, 1).to_dict() == first.to_dict()
    assert first.steps[0]["observation"] != other.steps[0]["observation"]
    assert first.metadata == {"episode_id": 7, "num_unread_actions": 0}
    assert first.task == {"seed": 1}


def test_each_piston_is_asked_with_its_own_policy_and_told_what_it_sees():
    asked = {}

    def note(messages):
        asked[messages[0]["content"]] = messages[1]["content"]
        return "stay"

    env = make(note, pistons=2, max_cycles=1)
    log = CallLog()
    policies = {"piston_0": "left one", "piston_1": "right one"}
    found = env.collect_batch(policies, Episodes([(0, {"seed": 0})], log, "0"))[0]
    assert asked == {
        policy: f"{step['observation']}\nAnswer with up, down or stay, and nothing else."
        for policy, step in zip(policies.values(), found.steps, strict=True)
    }


def test_what_a_piston_sees_is_where_things_are():
    env = make(pistons=3)
    env.reset({"seed": 0})
    world = env._by_hand.world
    # Walls are 40 wide, and so are pistons: their middles are at 60, 100, 140 from the left. At
    # height 0 the body of a piston is at 560 - 40 - (40 - 11) = 491; its surface is 5 above, at
    # 486. 84 units are as wide as three pistons, 120 pixels: 0.7 units a pixel.
    for piston, height in zip(world.pistonList, (0, 20, 64), strict=True):
        piston.position = (piston.position[0], 491 - height)
    world.ball.position, world.ball.velocity = (110, 486 - 30 - 40), (-200, 20)
    # Lowest point 30 above 486; three steps of 1/20 s a cycle: 30 pixels to the left, 3 down.
    assert env._by_hand.see("piston_0") == (
        "Cycle 1 of 40. Right and up are positive; a piston is 28 wide. Heights, from 0 to 45: "
        "left neighbour wall, you 0, right neighbour 14. The ball is +35 beside you, its lowest "
        "point at height 21; it moves -21 sideways and -2 up a cycle."
    )
    beside = "left neighbour 14, you 45, right neighbour wall. The ball is -21 beside you"
    assert beside in env._by_hand.see("piston_2")


def test_frame_size_is_how_finely_pistons_see():
    fine, coarse = (make(frame_size=size).reset({"seed": 0})["piston_0"] for size in (120, 6))
    assert "a piston is 40 wide. Heights, from 0 to 64:" in fine
    assert "a piston is 2 wide. Heights, from 0 to 3:" in coarse


# -- actions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mode", "action"),
    CASES["actions_are_read_from_answers"],
)
def test_actions_are_read_from_answers(text, mode, action):
    assert _read(text, mode) == action


def test_reading_takes_linear_time():
    begun = time.perf_counter()
    for piece in ("-", "up ", "action ", "1.", "\n", "0.5\n", "- - "):
        _read(piece * 50_000, "continuous")
    assert time.perf_counter() - begun < 5


def test_what_cannot_be_read_is_stay_and_is_counted():
    env = make(lambda m: "who knows" if "piston_1," in m[0]["content"] else "up", max_cycles=3)
    found = play(env)
    assert found.metadata["num_unread_actions"] == 3
    assert [s["action"] for s in found.steps] == ["up", "stay", "up", "up", "up"] * 3
    assert found.steps[1]["response"] == "who knows"


def test_continuous_actions_move_pistons_by_their_fraction():
    answers = {"piston_0,": "0.5", "piston_1,": "-0.25", "piston_2,": "up"}

    def act(messages):
        return next((a for name, a in answers.items() if name in messages[0]["content"]), "0")

    env = make(act, action_mode="continuous", frame_size=120, max_cycles=2)
    found = play(env)
    assert [s["action"] for s in found.steps[:3]] == ["0.5", "-0.25", "up"]
    # 120 units are 120 pixels, and 1 moves by 4.
    before, after = (
        [int(re.search(r"you (\d+)", s["observation"])[1]) for s in found.steps[k : k + 3]]
        for k in (0, 5)
    )
    assert after == [before[0] + 2, max(before[1] - 1, 0), before[2] + 4]


# -- calls ----------------------------------------------------------------------------------------


def test_an_episode_with_a_failed_call_is_a_row_with_an_error_and_the_others_go_on():
    def act(messages):
        if said(messages, r"Cycle (\d+)") == "2" and "piston_1," in messages[0]["content"]:
            calls.append(messages)
            if len(calls) == 1:
                raise OSError("no line")
        return "up"

    calls, told = [], []
    env = make(act, max_cycles=3, max_workers=1)
    numbered = [(4, {"seed": 0}), (5, {"seed": 1})]
    episodes = Episodes(numbered, CallLog(), "0", on_done=told.append)
    failed, fine = env.collect_batch(env.default_policies(), episodes)
    assert "no line" in failed.metadata["error"]
    assert math.isnan(failed.reward)
    assert len(failed.steps) == 5  # of the first cycle
    assert "error" not in fine.metadata
    assert len(fine.steps) == 15
    assert [each.metadata["episode_id"] for each in told] == [4, 5]


def test_a_budget_that_is_used_up_ends_the_collection_and_a_resume_asks_for_the_rest_only(tmp_path):
    count = []
    env = make(lambda messages: count.append(1) or push(messages), max_cycles=3, max_workers=1)
    with pytest.raises(BudgetUsedUp):
        play(env, log=CallLog(tmp_path / "calls.jsonl", budget=Budget(max_calls=8)))
    assert len(count) == 8
    resumed = play(env, log=CallLog(tmp_path / "calls.jsonl"))
    assert len(count) == 15
    assert resumed == play(make(push, max_cycles=3))


def test_pistons_are_asked_together_and_no_more_than_max_workers_at_a_time():
    lock, now, most = threading.Lock(), [0], [0]

    def act(messages):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return "stay"

    env = make(act, pistons=8, max_cycles=2, max_workers=3)
    numbered = [(n, {"seed": n}) for n in range(3)]
    env.collect_batch(env.default_policies(), Episodes(numbered, CallLog(), "0", workers=3))
    assert most[0] == 3


# -- by hand --------------------------------------------------------------------------------------


def test_stepping_piston_by_piston_is_the_episode_that_is_collected():
    found = play(make(push), seed=3)
    env = make()
    seen, total, done = env.reset({"seed": 3}), 0.0, False
    for k, step in enumerate(found.steps):
        assert not done
        assert seen[step["agent_id"]] == step["observation"]
        observation, reward, done, _ = env.step(step["agent_id"], step["action"])
        if k % 5 < 4:
            assert (observation, reward, done) == (step["observation"], 0.0, False)
            continue
        total += reward
        seen = {name: env._by_hand.see(name) for name in seen}
        assert observation == seen[step["agent_id"]]
    assert done
    assert total == pytest.approx(found.reward)
    with pytest.raises(DataError, match=r"one of \[\] is to act"):
        env.step("piston_0", "up")


def test_a_piston_acts_once_a_cycle():
    env = make(pistons=3)
    env.reset({"seed": 0})
    env.step("piston_1", "up")
    for name in ("piston_1", "piston_9"):
        with pytest.raises(DataError, match=rf"\['piston_0', 'piston_2'\] is .* got '{name}'"):
            env.step(name, "up")


# -- what it declares, and what it refuses --------------------------------------------------------


def test_defect_4_the_environment_names_its_agents_and_their_first_policies():
    env = make(pistons=3)
    assert env.agent_names == ["piston_0", "piston_1", "piston_2"] == list(env.default_policies())
    assert len(set(env.default_policies().values())) == 3
    assert "number 3 of 3" in env.default_policies()["piston_2"]


def test_there_are_a_thousand_seeds():
    tasks = make().tasks()
    assert [task["seed"] for task in tasks] == list(range(1000))
    assert {task["question"] for task in tasks} == {
        "Roll the ball to the left wall in at most 40 cycles."
    }


def test_the_critic_reads_a_line_for_each_cycle():
    act = lambda m: "up" if "piston_1," in m[0]["content"] else "stay"  # noqa: E731
    env = make(act, max_cycles=2)
    found = play(env)
    told = env.critic_prompt_vars(found)
    first, second = found.steps[0], found.steps[5]
    assert told["task_type"] == "pistonball"
    assert told["trajectory"].splitlines() == [
        f"Reward of the episode: {first['reward'] + second['reward']:.2f}",
        f"Cycle 1: ball {first['distance']} from the left wall, reward {first['reward']:.2f}. "
        "Pistons: {'stay': [0, 2, 3, 4], 'up': [1]}",
        f"Cycle 2: ball {second['distance']} from the left wall, reward {second['reward']:.2f}. "
        "Pistons: {'stay': [0, 2, 3, 4], 'up': [1]}",
    ]
    # Its middle is 40 + 30, give or take 30, from the right wall, 200 from the left one: the way
    # that is left to it is 200 - 40 - 70 = 90, give or take 30, at 0.7 units a pixel.
    assert 0.7 * 60 <= first["distance"] <= 0.7 * 120


@pytest.mark.parametrize("task", [{}, {"seed": "1"}, {"seed": -1}])
def test_a_task_without_a_seed_is_refused(task):
    with pytest.raises(DataError, match="needs a 'seed'"):
        make().reset(task)


def test_without_the_extra_making_it_says_what_to_install(monkeypatch):
    config = make().config
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(MissingExtraError, match=r'pip install "torchrl_llm\[pettingzoo\]"'):
        make_env("pistonball", config)


def test_overcooked_says_what_is_missing_and_how_to_register_an_environment():
    assert "overcooked" in list_envs()
    with pytest.raises(ConfigError, match=r"(?s)overcooked-ai.*ProAgent.*@register_env\("):
        make_env("overcooked", make().config)
