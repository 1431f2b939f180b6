"""A chat environment of the user's is trained on as a task is."""

import textwrap
import uuid
from functools import partial

import pytest
from recipes.grpo_helper import column, run_script

from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes.tasks import task_class, task_options

MINE = """
from torchrl_llm.envs import DatasetChatEnv, RewardParser
from torchrl_llm.envs.transforms import StepCounter

ROWS = [{"query": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(20, 60)]


class Right(RewardParser):
    def score(self, response, answer):
        return float(response.strip() == answer)


class Sums(DatasetChatEnv):
    def __init__(self, **kwargs):
        super().__init__(dataset=ROWS, **kwargs)
        self.append_transform(Right())


def make_env(*, first=0, **kwargs):
    return DatasetChatEnv(dataset=ROWS[first:], **kwargs).append_transform(Right())


def with_split(split="train", **kwargs):
    rows = ROWS[:8] if split == "test" else ROWS[8:]
    env = DatasetChatEnv(dataset=rows, **kwargs)
    env.append_transform(Right())
    env.append_transform(StepCounter(max_steps=2))
    return env


def bare(**kwargs):
    return DatasetChatEnv(dataset=ROWS, **kwargs)


def few(num_envs=1):
    return DatasetChatEnv(dataset=ROWS, num_envs=num_envs)


def nothing(**kwargs):
    return ROWS
"""


@pytest.fixture
def mine(tmp_path):
    # Modules of a process have different names.
    path = tmp_path / f"envs_{uuid.uuid4().hex}.py"
    path.write_text(textwrap.dedent(MINE))
    return path


@pytest.fixture
def run(monkeypatch, tmp_path):
    return partial(run_script, monkeypatch, tmp_path / "run", "train.max_steps=2")


def test_a_class_trains_on_its_rows_but_the_last(mine, run):
    table = run(f"env.dataset={mine}:Sums")
    assert len(column(table, "train/reward")) == 2
    assert column(table, "eval/num_prompts") == [8.0, 8.0]


def test_the_rows_that_are_held_out_are_never_trained(mine):
    from torchrl_llm.recipes.chat_env_task import Part

    for name, held_out in (("Sums", range(52, 60)), ("with_split", range(20, 28))):
        task = task_class(f"{mine}:{name}")
        parts = [task(part=Part(split, 8), num_envs=4) for split in ("train", "test")]
        seen = []
        for env in parts:
            loader = env.primer.dataloader
            seen.append({row["query"] for row in loader.rows})
        assert seen[1] == {f"What is {n}+{n}?" for n in held_out}
        assert len(seen[0]) == 32
        assert not seen[0] & seen[1]


def test_a_reward_is_given_to_an_environment_without_one(mine, run):
    run(f"env.dataset={mine}:bare", "reward.function=exact")


def test_its_own_limit_of_turns_counts_or_the_configured_one_or_one(mine):
    assert task_class(f"{mine}:with_split").max_turns() == 2
    assert task_class(f"{mine}:make_env").max_turns() == 1
    assert task_class(f"{mine}:make_env").max_turns(5) == 5
    with pytest.raises(ConfigError, match=r"env\.max_steps=3 has no effect.*up to 2"):
        task_class(f"{mine}:with_split")(max_steps=3)


def test_its_own_arguments_are_options(mine):
    assert task_options(f"{mine}:make_env") == ("first",)
    assert task_options(f"{mine}:Sums") == ()


REFUSED = [
    ("bare", {}, "has no reward: append a RewardParser"),
    ("Sums", {"reward": len}, "has a reward already"),
    ("few", {"seed": 0}, r"does not take seed: give its constructor \*\*kwargs"),
    ("nothing", {}, "must make a DatasetChatEnv or a TaskEnv"),
]


@pytest.mark.parametrize(("name", "given", "message"), REFUSED)
def test_an_environment_that_cannot_be_trained_says_what_it_lacks(name, given, message, mine):
    with pytest.raises(ConfigError, match=message):
        task_class(f"{mine}:{name}")(**given)


def test_more_held_out_rows_than_there_are_is_an_error(mine, run):
    with pytest.raises(ConfigError, match=r"eval.num_prompts=40 leaves none of the 40 problems"):
        run(f"env.dataset={mine}:Sums", "eval.num_prompts=40")
