"""The page `design.rst` says truly where a change goes, and ten changes need no file of ours."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm import _registry
from torchrl_llm.data import FinishReason, TokenFact, TokenRecord, register_fact, unregister_fact
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.record import Completion, respond_records
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.envs import ArithmeticEnv
from torchrl_llm.langmarl.environment import env_class
from torchrl_llm.modules import SamplingParams
from torchrl_llm.recipes import load_config
from torchrl_llm.recipes.tasks import add_tools
from torchrl_llm.rewards.reward_scorer import Sample, as_scorer
from torchrl_llm.trainers import make_loggers

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "source" / "design.rst"
ASKED = [
    "a loss",
    "a GRPO metric",
    "how pads are masked",
    "a tool",
    "a chat template",
    "a vLLM sampling parameter",
    "a reward",
    "a logger",
    "a key of a recipe",
    "a weight path",
    "a learning-rate schedule",
    "a task",
    "an advantage estimator",
    "a KL estimator",
    "what a checkpoint holds",
    "a per-token fact",
    "the syntax of tool calls",
    "a sandbox",
    "a stop rule",
    "how versions are counted",
    "a reason to stop",
    "a metric of the loop",
    "a squash of logits",
    "the token ledger",
    "the conversation of a row",
    "an environment of LangMARL",
    "the optimizer of LangMARL",
    "a figure of evaluation",
    "Redis, its address and its keys",
    "an optimizer",
]

MINE = '''
"""Parts of a user, in one file of theirs."""
import torch

from torchrl_llm.agents import Agent
from torchrl_llm.langmarl.environment import BaseEnvironment, Trajectory
from torchrl_llm.modules.backends import FakeBackend
from torchrl_llm.objectives import CreditAssigner, PolicyGradientLoss
from torchrl_llm.objectives.credit import ConstantCredit
from torchrl_llm.objectives.policy_loss import Surrogate
from torchrl_llm.tools import Tool


class Halved(PolicyGradientLoss):
    """Half of REINFORCE."""

    def __init__(self, actor_network, *, share: float = 0.5, **settings):
        super().__init__(actor_network, **settings)
        self.share = share

    def surrogate(self, tokens):
        return Surrogate(-self.share * tokens.advantage * tokens.log_probs)


class Twice(ConstantCredit):
    """Two for every row, or for every token that has a reward."""

    reads_tokens = True

    def __init__(self, *, value: float = 2.0):
        super().__init__(value=value)


class SQL(Tool):
    name, description = "sql", "Runs a query."
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}}

    def run(self, call):
        import sqlite3
        return str(sqlite3.connect(":memory:").execute(call.args["query"]).fetchall())


class Lines:
    def __init__(self, *, run_dir, experiment_name):
        self.exp_name, self.lines = experiment_name, []

    def log_scalar(self, name, value, step=None):
        self.lines.append((name, value, step))


def halve(done):
    return 1 - done / 2


def polite(sample):
    """1 for a response that says please."""
    return float("please" in sample.response)


def majority(answers):
    """Whether the answer that most samples give is right."""
    texts = [answer["messages"][-1]["content"] for answer in answers]
    return answers[texts.index(max(texts, key=texts.count))]["success"]


class Brief(Agent):
    """Sees the last two messages."""


class Trade(BaseEnvironment):
    """Two agents that trade."""

    def reset(self, task):
        return {}

    def step(self, agent_id, action):
        return None, 0.0, True, {}

    def collect_trajectory(self, policies, task):
        return Trajectory(task, [], 0.0, {})


class Silent(FakeBackend):
    """Answers nothing at all."""

    def __init__(self, name, *, tokenizer):
        super().__init__([""], tokenizer=tokenizer)
'''


def rows():
    """Each row of the tables: what changes, and the files."""
    tables = PAGE.read_text().split("Where a change goes\n---")[1]
    found, at, start = {}, None, None
    for line in tables.splitlines():
        if line.startswith("=="):
            start = line.index("  ") + 2
        elif start and "``" in line:
            at = line[:start].strip() or at
            found.setdefault(at, []).extend(re.findall(r"``([^`]+)``", line[start:]))
    return found


def test_each_change_names_few_files_and_each_of_them_is_there():
    found = rows()
    assert set(ASKED) <= set(found)
    for change, names in found.items():
        files = [name for name in names if "/" in name or name.endswith(".py")]
        assert 1 <= len(files) <= (1 if change == "a chat template" else 2), change
        for name in files:
            base = ROOT if name.startswith(("sota", "test", "docs")) else ROOT / "torchrl_llm"
            known = base / name.split("<")[0]
            assert known.exists(), f"{change}: {name}"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The name of a module of the user's, which lies in no package."""
    (tmp_path / "parts_of_a_user.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "parts_of_a_user"
    sys.modules.pop("parts_of_a_user", None)


@pytest.fixture
def evaluation(monkeypatch):
    """The figures of the page that evaluates, and the reader of its keys."""
    monkeypatch.syspath_prepend(str(ROOT / "sota-implementations" / "evaluate"))
    utils, config = map(importlib.import_module, ("evaluate_utils", "evaluate_config"))
    return utils.figures, config.load_config


class Actor(TokenScorer):
    """Scores nothing: only its losses are built."""

    def token_scores(self, *args, **kwargs):
        raise NotImplementedError


def test_a_loss_of_a_user_is_configured_with_its_own_key(mine):
    config = load_config({"loss": {"type": f"{mine}:Halved", "share": 0.25}})
    loss = config.build_loss(Actor())
    assert type(loss).__name__ == "Halved"
    assert loss.share == 0.25


def test_an_advantage_estimator_of_a_user_writes_advantages(mine):
    config = load_config({"advantage": {"type": f"{mine}:Twice", "value": 3.0}})
    assert config.advantage.reads_tokens
    assert not load_config({"advantage": {"type": "group"}}).advantage.reads_tokens
    buffer = ReplayBuffer(transform=config.build_credit())
    reward = {"reward": torch.ones(1, 1), "done": torch.ones(1).bool()}
    buffer.extend(lazy_rows([TensorDict(next=reward, group_id=torch.tensor(0))]))
    assert buffer[:]["advantage"].item() == 3.0


def test_a_tool_of_a_user_is_named_in_the_configuration(mine):
    names = [f"{mine}:SQL"]
    assert load_config({"env": {"tools": names}}).env.tools == names
    env = add_tools(ArithmeticEnv(num_envs=1), names, max_turns=2)
    assert [schema["function"]["name"] for schema in env.tool_schemas] == ["sql"]
    tool = _registry.find("tools", names[0])()
    from torchrl_llm.tools import ToolCall

    assert tool.run(ToolCall("sql", {"query": "select 6 * 7"})) == "[(42,)]"


def test_a_logger_of_a_user_is_made_by_name(mine, tmp_path):
    (logger,) = make_loggers(["csv", f"{mine}:Lines"], run_dir=tmp_path, experiment_name="mine")
    assert (type(logger).__name__, logger.exp_name) == ("Lines", "mine")


def test_a_schedule_of_a_user_is_an_entry_of_the_table(mine, monkeypatch):
    from torchrl_llm.trainers.optim import SCHEDULES, schedule_factor

    monkeypatch.setitem(SCHEDULES, "halve", _registry.import_named(f"{mine}:halve"))
    assert load_config({"optimizer": {"scheduler": "halve"}}).optimizer.scheduler == "halve"
    assert schedule_factor(5, name="halve", warmup_steps=0, total_steps=10) == 0.75


def test_a_reward_of_a_user_is_a_function_of_a_sample(mine):
    (component,) = load_config(
        {"reward": {"components": {"polite": {"_target_": f"{mine}:polite", "weight": 0.5}}}}
    ).reward.components.values()
    assert component["weight"] == 0.5
    score = as_scorer(_registry.find("rewards", f"{mine}:polite"))
    assert [score.score(Sample(response=text)) for text in ("now", "now please")] == [0, 1]


def test_a_figure_of_a_user_is_the_mean_over_prompts_of_what_it_gives(mine, evaluation):
    figures, load = evaluation

    def answer(prompt, text, right):
        told = {"prompt": prompt, "valid": True, "cut": False, "length": 1, "reward": 1.0}
        return told | {"success": right, "messages": [{"content": text}]}

    answers = [answer(0, *each) for each in (("4", True), ("5", False), ("4", True))]
    answers += [answer(1, *each) for each in (("7", False), ("7", False), ("8", True))]
    name = f"{mine}:majority"
    assert load({"eval": {"figures": [name]}}).eval.figures == [name]
    assert figures(answers, [name])["majority"] == 0.5


def test_an_agent_and_an_environment_of_a_user_are_found_by_their_path(mine):
    assert type(load_config({"agent": {"type": f"{mine}:Brief"}}).agent.build()).__name__ == "Brief"
    assert env_class(f"{mine}:Trade").__doc__ == "Two agents that trade."


def test_a_backend_of_a_user_answers_by_the_port_alone(mine, tokenizer):
    config = {"inference_model": {"backend": f"{mine}:Silent"}}
    assert load_config(config).inference_model.backend == f"{mine}:Silent"
    backend = _registry.find("backends", f"{mine}:Silent")(None, tokenizer=tokenizer)
    [[completion]] = backend.generate([torch.tensor([5])], SamplingParams(max_new_tokens=4))
    assert completion.token_ids.tolist() == [tokenizer.eos_token_id]


def test_a_per_token_fact_of_a_user_follows_its_token(mine):
    register_fact(TokenFact(name="heat", dtype=torch.float32, key=("heat", "full"), default=1.0))
    try:
        prompt = TokenRecord.from_prompt(torch.tensor([5, 6]), torch.tensor([1, 1]), 1)
        facts = {"heat": torch.tensor([0.5])}
        sampled = Completion(
            torch.tensor([7]), torch.tensor([-0.5]), FinishReason.STOP, facts=facts
        )
        [record] = respond_records([prompt], [sampled], 0)
        assert record.facts["heat"].tolist() == [1.0, 1.0, 0.5]
    finally:
        unregister_fact("heat")


def test_a_registered_name_is_listed_and_a_second_owner_refused(mine):
    _registry.register("losses", "halved_here")(_registry.find("losses", f"{mine}:Halved"))
    try:
        assert "halved_here" in _registry.names("losses")
        config = load_config({"loss": {"type": "halved_here"}})
        assert config.build_loss(Actor()).share == 0.5
        with pytest.raises(Exception, match="'halved_here' among the losses already"):
            _registry.register("losses", "halved_here")(Actor)
    finally:
        del _registry._entries["losses"]["halved_here"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"env": {"tools": ["sqll"]}}, "'sqll' is not among the tools"),
        ({"env": {"tools": ["calculator", "calculator"]}}, "twice"),
        ({"env": {"tools": ["fractions:Fraction"]}}, "no Tool"),
        ({"env": {"max_tool_turns": 2}}, "no effect without env.tools"),
        ({"loss": {"type": "no_such_module:Loss"}}, "no_such_module"),
        ({"inference_model": {"backend": "vlm"}}, "did you mean 'vllm'"),
        ({"weight_sync": {"type": "del"}}, "weight_sync.type"),
        ({"optimizer": {"scheduler": "cosin"}}, "constant, linear or cosine"),
    ],
)
def test_what_cannot_be_found_says_so_before_anything_runs(values, message):
    with pytest.raises(Exception, match=message):
        load_config(values)
