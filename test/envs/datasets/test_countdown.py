"""CountdownEnv: every puzzle can be solved, and none is both trained on and held out."""

from __future__ import annotations

from fractions import Fraction

import pytest
from torchrl.envs.utils import check_env_specs

from torchrl_llm.envs.datasets.number_tasks import CountdownEnv, countdown_problem
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.rewards.number_rewards import evaluate_expression


def reachable(numbers):
    """Value to an expression for it, of all expressions over some of the numbers."""
    found = {}
    pools = [[(Fraction(n), str(n)) for n in numbers]]
    seen = set()
    while pools:
        pool = pools.pop()
        for value, text in pool:
            found.setdefault(value, text)
        for i in range(len(pool)):
            for j in range(len(pool)):
                if i == j:
                    continue
                (a, x), (b, y) = pool[i], pool[j]
                rest = [pool[k] for k in range(len(pool)) if k not in (i, j)]
                values = [(a + b, f"({x}+{y})"), (a - b, f"({x}-{y})"), (a * b, f"({x}*{y})")]
                if b:
                    values.append((a / b, f"({x}/{y})"))
                for made in values:
                    key = tuple(sorted(value for value, _ in [*rest, made]))
                    if key not in seen:
                        seen.add(key)
                        pools.append([*rest, made])
    return found


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_puzzle_keeps_its_limits_and_can_be_solved(split):
    for index in range(15):
        target, numbers = countdown_problem(
            index, split=split, num_count=3, max_number=20, max_target=99
        )
        assert len(numbers) == 3
        assert all(1 <= n <= 20 for n in numbers)
        assert 1 <= target <= 99
        assert target not in numbers
        assert evaluate_expression(reachable(numbers)[target], numbers) == target


def test_no_puzzle_is_trained_on_and_held_out_whatever_the_order_of_its_numbers():
    small = {"num_count": 2, "max_number": 6, "max_target": 12}
    splits = [
        {
            (target, tuple(sorted(numbers)))
            for target, numbers in (countdown_problem(i, split=s, **small) for i in range(500))
        }
        for s in ("train", "test")
    ]
    assert len(splits[0]) > 20
    assert len(splits[1]) > 1
    assert not splits[0] & splits[1]


def test_a_puzzle_depends_on_its_arguments_alone():
    # Runs resume, and are compared, only while these stay what they are.
    assert countdown_problem(0) == (300, (20, 34, 49, 98))
    assert countdown_problem(0, split="test") == countdown_problem(0, split="test")
    assert countdown_problem(1) != countdown_problem(0)


def test_repeats_share_a_puzzle_and_a_resumed_environment_sees_the_next_one():
    env = CountdownEnv(num_envs=4, repeats=2, group_repeats=True, seed=3)
    td = env.reset()
    assert td["query"][0] == td["query"][1] != td["query"][2] == td["query"][3]
    state = env.state_dict()
    after = list(env.reset()["query"])
    again = CountdownEnv(num_envs=4, repeats=2, group_repeats=True, seed=99)
    again.load_state_dict(state)
    assert list(again.reset()["query"]) == after


def test_a_solution_is_worth_one_and_the_specs_hold(answer):
    rows = [{"target": 24, "nums": [4, 6, 1]}, {"target": 7, "numbers": [3, 4]}]
    env = CountdownEnv(dataset=rows, shuffle=False, num_envs=2)
    td = env.reset()
    assert list(td["query"]) == [
        "Make 24 of the numbers 4, 6, 1.",
        "Make 7 of the numbers 3, 4.",
    ]
    td = env.step(answer(td, "<answer>4 * 6</answer>", "<answer>4 * 3</answer>"))["next"]
    assert td["reward"].flatten().tolist() == pytest.approx([1.0, 0.1])
    assert td["success"].flatten().tolist() == [True, False]
    assert td["done"].all()
    check_env_specs(CountdownEnv())


def test_impossible_settings_and_malformed_rows_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="'train' or 'test', got 'dev'"):
        CountdownEnv(split="dev")
    with pytest.raises(ConfigError, match="at least 2, got 1"):
        CountdownEnv(num_count=1)
    with pytest.raises(ConfigError, match="choose wider limits"):
        CountdownEnv(num_count=2, max_number=2, max_target=2, split="test")
    with pytest.raises(ConfigError, match="no effect"):
        CountdownEnv(dataset=[{"target": 1, "numbers": [1]}], num_count=3)
    for row in (
        {"target": 1},
        {"target": 1, "numbers": []},
        {"target": 1, "numbers": "12"},
        {"target": 1.5, "numbers": [1]},
        {"target": 1, "numbers": [True]},
        {"target": 1, "numbers": [-1]},
    ):
        with pytest.raises(DataError, match="whole 'target'"):
            CountdownEnv(dataset=[row])
    path = tmp_path / "rows.jsonl"
    path.write_text('{"nums": [1, 2]}\n')
    with pytest.raises(DataError, match="lacks the column 'target'"):
        CountdownEnv(data_files=path)
