"""The page `design.rst` says truly where a change goes, and five changes need no file of ours."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm import _registry
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.envs import ArithmeticEnv
from torchrl_llm.recipes import load_config
from torchrl_llm.recipes.tasks import add_tools
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
]

MINE = '''
"""Parts of a user, in one file of theirs."""
import torch
from torchrl.record.loggers import Logger

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
'''


def rows():
    """Each row of the table: what changes, and the files."""
    lines = PAGE.read_text().split("I change")[1].splitlines()
    found, at = {}, None
    start = re.search(r"=+ +=+", lines[1]) or re.search(r"=+ +=+", lines[0])
    width = len(start[0].split()[0]) + 2
    for line in lines[2:]:
        if line.startswith("==="):
            break
        at = line[:width].strip() or at
        found.setdefault(at, []).extend(re.findall(r"``([^`]+)``", line[width:]))
    return found


def test_each_change_names_few_files_and_each_of_them_is_there():
    found = rows()
    assert set(ASKED) <= set(found)
    for change, names in found.items():
        files = [name for name in names if "=" not in name]
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
