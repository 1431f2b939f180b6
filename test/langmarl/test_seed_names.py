"""Every name and argument of LangMARL in the table of the reference page: imported, and called."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import json
import math
import re
from pathlib import Path

import pytest
from langmarl.world import ROOT, scripted, settings, written

from torchrl_llm import langmarl
from torchrl_llm.rewards import ScriptedTextModel

PAGE = ROOT / "docs" / "source" / "reference" / "langmarl.rst"


def table():
    """Name to its arguments, as the page writes them."""
    lines = [line.strip() for line in PAGE.read_text().splitlines() if line.startswith('   "``')]
    rows = list(csv.reader(lines, skipinitialspace=True))
    return {name.strip("`"): (arguments, returns) for name, arguments, returns in rows}


TABLE = table()


def found(name):
    value = langmarl
    for part in name.split("."):
        value = getattr(value, part)
    return value


def signature(value):
    """Arguments without ``self``, as the table writes them."""
    shown = []
    for parameter in inspect.signature(value).parameters.values():
        if parameter.name == "self" or parameter.kind is parameter.KEYWORD_ONLY:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            shown.append(f"\\*\\*{parameter.name}")
        elif parameter.default is parameter.empty:
            shown.append(parameter.name)
        else:
            shown.append(f"{parameter.name}={parameter.default!r}")
    return ", ".join(shown)


class Env(langmarl.BaseEnvironment):
    def reset(self, task):
        return dict.fromkeys(self.agent_names, "hello")

    def step(self, agent_id, action):
        return action, 1.0, True, {}

    def collect_trajectory(self, policies, task):
        steps = [{"agent_id": k, "observation": "hello", "action": p} for k, p in policies.items()]
        return langmarl.Trajectory(task, steps, 1.0)


class Agent(langmarl.BaseAgent):
    def act(self, observation, policy):
        return f"{policy}: {observation}"


class Critic(langmarl.BaseCritic):
    def evaluate(self, trajectory, policies):
        return {"raw_response": "fine", "per_agent": dict.fromkeys(policies, "fine")}


class Reward(langmarl.BaseReward):
    def compute(self, trajectory):
        return 2.0


class Optimizer(langmarl.BaseOptimizer):
    def generate_gradient(self, policy, evaluation, context):
        return "Go on."

    def apply_gradient(self, policy, gradient):
        return f"{policy} {gradient}"

    def aggregate_gradients(self, gradients):
        return " ".join(gradients)


class Told(langmarl.Callback):
    """Remembers which hooks were called, and with what."""

    def __init__(self):
        self.calls = []

    def on_iteration_start(self, iteration, trainer):
        self.calls.append(("start", iteration))

    def on_iteration_end(self, iteration, stats, trainer):
        self.calls.append(("end", iteration, stats["avg_reward"]))

    def on_episode_complete(self, trajectory, trainer):
        self.calls.append(("episode", trajectory.metadata["episode_id"]))

    def on_policy_update(self, agent_id, old_policy, new_policy):
        self.calls.append(("update", agent_id, old_policy != new_policy))


MODEL = langmarl.LLMConfig("s", "scripted:langmarl.test_seed_names:answer", api_key="k")
ANSWER = '{"agent_1": "Be brief.", "agent_2": "Be kind."}'
EPISODE = langmarl.Trajectory(
    {"question": "2+2?", "ground_truth": "4"},
    [{"agent_id": "agent_1", "observation": "2+2?", "action": "four"}],
    1.0,
    {"episode_id": 2},
)
POLICIES = {"agent_1": "One.", "agent_2": "Two."}


def answer(messages):
    return ANSWER


@pytest.fixture
def run(tmp_path):
    """What calls need: a configuration, a store, and parts."""
    path = written(tmp_path)
    base = tmp_path / "base.json"
    model = MODEL.to_dict()
    base.write_text(json.dumps({"llm": model, "num_iterations": 1, "num_agents": 2}))

    class Run:
        pass

    run = Run()
    run.path, run.base, run.folder = path, base, tmp_path
    run.config = langmarl.BaseConfig(llm=MODEL, experiment_dir=str(tmp_path / "e"))
    run.config.checkpoint_dir = str(tmp_path / "policies")
    run.store = langmarl.LocalStore(str(tmp_path / "store"))
    run.checkpoint = langmarl.PolicyCheckpoint(run.store, "r", 2)
    run.checkpoint.save_policies(0, POLICIES)
    run.checkpoint.save_policies(1, {**POLICIES, "agent_2": "Three."}, stats={"avg_reward": 0.5})
    run.episodes = langmarl.TrajectoryStore(run.store, "r")
    run.episodes.save(0, 2, EPISODE)
    run.optimizer = langmarl.PolicyGradientOptimizer(MODEL)
    run.client = langmarl.LLMClient(MODEL)
    run.tracker = langmarl.TokenTracker("gpt-4o-mini", input_price=1.0, output_price=2.0)
    run.tracker.add_usage(1_000_000, 500_000)
    run.log = langmarl.RunLogger(run.store, "r")
    run.told = Told()
    return run


def trainer(run):
    return langmarl.MonteCarloTrainer(
        run.config, Env(run.config), Critic(), Optimizer(), Reward(), None, [run.told]
    )


def trained(run):
    made = trainer(run)
    run.history = made.train(1)
    made.close()
    return run.told.calls


def logged(run, method, *arguments):
    log = langmarl.RunLogger(run.store, "r", level="DEBUG")
    getattr(log, method)(*arguments)
    log.close()
    return run.store.read_text("runs/r/logs/train.log")


# Each call by the name in the table, with what must be true of what it returns.
CALLS = {
    "train": lambda run: len(langmarl.train(run.path, num_iterations=1)) == 1,
    "load_config": lambda run: type(
        langmarl.load_config(run.path, overrides={"seed": 3})
    ) is langmarl.LanguageTaskConfig,
    "make_env": lambda run: langmarl.make_env(
        "language", langmarl.load_config(run.path)
    ).agent_names == ["agent_1", "agent_2", "agent_3"],
    "register_env": lambda run: langmarl.register_env("seed_names_env")(Env) is Env
    and "seed_names_env" in langmarl.list_envs(),
    "list_envs": lambda run: {"language", "overcooked", "pistonball"} <= set(langmarl.list_envs()),
    "BaseConfig": lambda run: langmarl.BaseConfig(exp_name="x", llm=MODEL).num_agents == 2,
    "BaseConfig.from_json": lambda run: langmarl.BaseConfig.from_json(
        run.base, overrides={"num_agents": 3}
    ).num_agents == 3,
    "BaseConfig.to_json": lambda run: run.config.to_json(run.folder / "out.json") is None
    and langmarl.BaseConfig.from_json(run.folder / "out.json").llm.name == "s",
    "BaseConfig.get_actor_llm": lambda run: run.config.get_actor_llm() is MODEL,
    "BaseConfig.get_critic_llm": lambda run: run.config.get_critic_llm() is MODEL,
    "BaseConfig.get_optimizer_llm": lambda run: run.config.get_optimizer_llm() is MODEL,
    "LanguageTaskConfig": lambda run: langmarl.LanguageTaskConfig(task_type="math").task_type
    == "math",
    "OvercookedConfig": lambda run: langmarl.OvercookedConfig().layout == "cramped_room",
    "PistonballConfig": lambda run: langmarl.PistonballConfig(num_pistons=4).num_agents == 4,
    "LLMConfig": lambda run: langmarl.LLMConfig("n", "m", max_tokens=7).max_tokens == 7,
    "LLMConfig.get_api_key": lambda run: MODEL.get_api_key() == "k",
    "LLMConfig.from_preset": lambda run: langmarl.LLMConfig.from_preset("gpt-4o").model_string
    == "gpt-4o",
    "LLMConfig.from_dict": lambda run: langmarl.LLMConfig.from_dict(MODEL.to_dict()) == MODEL,
    "LLMConfig.to_dict": lambda run: MODEL.to_dict()["name"] == "s",
    "get_llm_config": lambda run: langmarl.get_llm_config("gpt-4o-mini").name == "gpt-4o-mini",
    "list_available_models": lambda run: len(langmarl.list_available_models()) == 18,
    "Trajectory": lambda run: langmarl.Trajectory({}, [], 0.0).metadata == {},
    "BaseEnvironment.reset": lambda run: Env(run.config).reset({})["agent_1"] == "hello",
    "BaseEnvironment.step": lambda run: Env(run.config).step("agent_1", "x")
    == ("x", 1.0, True, {}),
    "BaseEnvironment.collect_trajectory": lambda run: Env(run.config)
    .collect_trajectory(POLICIES, {}).reward == 1.0,
    "BaseAgent.act": lambda run: Agent().act("hi", "Be.") == "Be.: hi",
    "BaseCritic.evaluate": lambda run: set(Critic().evaluate(EPISODE, POLICIES))
    == {"raw_response", "per_agent"},
    "BaseReward.compute": lambda run: Reward().compute(EPISODE) == 2.0,
    "BaseOptimizer.generate_gradient": lambda run: Optimizer().generate_gradient("p", "e", "c")
    == "Go on.",
    "BaseOptimizer.apply_gradient": lambda run: Optimizer().apply_gradient("p", "g") == "p g",
    "BaseOptimizer.aggregate_gradients": lambda run: Optimizer().aggregate_gradients(["a", "b"])
    == "a b",
    "CentralizedCritic": lambda run: langmarl.CentralizedCritic(run.config, prompts_dir=None)
    .config is run.config,
    "CentralizedCritic.evaluate": lambda run: langmarl.CentralizedCritic(run.config).evaluate(
        EPISODE, POLICIES
    ) == {
        "raw_response": ANSWER,
        "paradigm": "central_credit",
        "per_agent": {"agent_1": "Be brief.", "agent_2": "Be kind."},
    },
    "PolicyGradientOptimizer": lambda run: run.optimizer.num_fallbacks == 0,
    "PolicyGradientOptimizer.generate_gradient": lambda run: run.optimizer.generate_gradient(
        "policy", "evaluation", "context", agent_name="agent_1"
    ) == ANSWER,
    "PolicyGradientOptimizer.generate_shared_gradient": lambda run: run.optimizer
    .generate_shared_gradient("evaluation", "context") == ANSWER,
    "PolicyGradientOptimizer.apply_gradient": lambda run: langmarl.PolicyGradientOptimizer
    .apply_gradient("One.", "Two.") == "One.\n\n[CASE-SPECIFIC FEEDBACK]\nTwo.",
    "PolicyGradientOptimizer.aggregate_gradients": lambda run: langmarl.PolicyGradientOptimizer
    .aggregate_gradients(["a", "b"]) == "a\n\n---\n\nb",
    "PolicyGradientOptimizer.parse_credit_response": lambda run: langmarl.PolicyGradientOptimizer
    .parse_credit_response(ANSWER, ["agent_1", "agent_2"])["agent_2"] == "Be kind.",
    "TrajectoryFormatter.format_trajectory": lambda run: "four"
    in langmarl.TrajectoryFormatter.format_trajectory(EPISODE.to_dict()),
    "TrajectoryFormatter.format_for_credit_assignment": lambda run: "agent_1"
    in langmarl.TrajectoryFormatter.format_for_credit_assignment(EPISODE.to_dict()),
    "TrajectoryFormatter.format_trajectory_minimal": lambda run: "1.00"
    in langmarl.TrajectoryFormatter.format_trajectory_minimal(EPISODE.to_dict()),
    "MonteCarloTrainer": lambda run: trainer(run).history == [],
    "MonteCarloTrainer.train": lambda run: trained(run) and run.history[0]["avg_reward"] == 2.0,
    "MonteCarloTrainer.train_one_iteration": lambda run: trainer(run).train_one_iteration(0)[
        "rewards"
    ] == [2.0] * 10,
    "Callback.on_iteration_start": lambda run: trained(run)[0] == ("start", 0),
    "Callback.on_iteration_end": lambda run: trained(run)[-1] == ("end", 0, 2.0),
    "Callback.on_episode_complete": lambda run: sorted(
        call[1] for call in trained(run) if call[0] == "episode"
    ) == list(range(10)),
    "Callback.on_policy_update": lambda run: [call for call in trained(run) if call[0] == "update"]
    == [("update", "agent_1", True), ("update", "agent_2", True)],
    "LoggingCallback": lambda run: isinstance(langmarl.LoggingCallback(), langmarl.Callback),
    "CheckpointCallback": lambda run: isinstance(langmarl.CheckpointCallback(), langmarl.Callback),
    "EarlyStoppingCallback": lambda run: langmarl.EarlyStoppingCallback(patience=2).min_delta
    == 0.01,
    "LLMClient": lambda run: run.client.tracker.get_stats()["total_tokens"] == 0,
    "LLMClient.chat": lambda run: run.client.chat("system", "user", max_tokens=5) == ANSWER,
    "LLMClient.chat_with_usage": lambda run: run.client.chat_with_usage("1234", "5678", None)
    == (ANSWER, {"input": 2, "output": math.ceil(len(ANSWER) / 4)}),
    "LLMClient.raw_client": lambda run: _raw_client(),
    "TokenTracker": lambda run: langmarl.TokenTracker().model == "gpt-4o-mini",
    "TokenTracker.add_usage": lambda run: run.tracker.add_usage(1, 2) is None
    and run.tracker.get_stats()["total_tokens"] == 1_500_003,
    "TokenTracker.get_stats": lambda run: run.tracker.get_stats() == {
        "model": "gpt-4o-mini",
        "input_tokens": 1_000_000,
        "output_tokens": 500_000,
        "total_tokens": 1_500_000,
        "input_cost_usd": 1.0,
        "output_cost_usd": 1.0,
        "cost_usd": 2.0,
    },
    "TokenTracker.estimate_cost": lambda run: run.tracker.estimate_cost(0, 1_000_000) == 2.0
    and run.tracker.get_stats()["cost_usd"] == 2.0,
    "TokenTracker.reset": lambda run: run.tracker.reset() is None
    and run.tracker.get_stats()["total_tokens"] == 0,
    "TokenTracker.get_summary_string": lambda run: "1,000,000"
    in run.tracker.get_summary_string(),
    "LocalStore": lambda run: langmarl.LocalStore(str(run.folder)).exists("config.json"),
    "PolicyCheckpoint": lambda run: run.checkpoint.agent_names == ["agent_1", "agent_2"],
    "PolicyCheckpoint.get_policies": lambda run: run.checkpoint.get_policies(iteration=0)
    == POLICIES and run.checkpoint.get_policies()["agent_2"] == "Three.",
    "PolicyCheckpoint.save_policies": lambda run: run.checkpoint.save_policies(
        2, POLICIES, stats=None
    ) is None and run.checkpoint.get_policies() == POLICIES,
    "PolicyCheckpoint.diff_policies": lambda run: re.findall(
        r"^[-+]\w.*", run.checkpoint.diff_policies(0, 1)["agent_2"], re.MULTILINE
    ) == ["-Two.", "+Three."],
    "TrajectoryStore": lambda run: run.episodes.count(1) == 0,
    "TrajectoryStore.save": lambda run: run.episodes.save(1, 0, EPISODE) is None
    and run.episodes.count(1) == 1,
    "TrajectoryStore.load": lambda run: [
        dataclasses.asdict(each) for each in run.episodes.load(0, limit=5)
    ] == [dataclasses.asdict(EPISODE)],
    "TrajectoryStore.count": lambda run: run.episodes.count(0) == 1,
    "RunLogger": lambda run: isinstance(run.log, langmarl.RunLogger),
    "RunLogger.info": lambda run: "INFO" in logged(run, "info", "hello"),
    "RunLogger.debug": lambda run: "DEBUG" in logged(run, "debug", "hello"),
    "RunLogger.warning": lambda run: "WARNING" in logged(run, "warning", "hello"),
    "RunLogger.error": lambda run: "ERROR" in logged(run, "error", "hello"),
    "RunLogger.iteration_start": lambda run: "3" in logged(run, "iteration_start", 3, POLICIES),
    "RunLogger.iteration_end": lambda run: "0.25" in logged(
        run, "iteration_end", 3,
        {"avg_reward": 0.25, "num_episodes": 2, "total_tokens": 9, "cost_usd": 0.0},
    ),
    "RunLogger.episode_saved": lambda run: "17" in logged(run, "episode_saved", 3, 17, 0.5),
    "RunLogger.evaluation_done": lambda run: "central_global"
    in logged(run, "evaluation_done", 3, 17, "central_global", "fine"),
    "RunLogger.gradient_saved": lambda run: "agent_9" in logged(
        run, "gradient_saved", 3, "agent_9", 4
    ),
}  # fmt: skip


def _raw_client():
    openai = pytest.importorskip("openai")
    config = langmarl.LLMConfig("m", "m", "http://localhost:1/v1")
    client = langmarl.LLMClient(config)
    return isinstance(client.raw_client, openai.OpenAI) and client.raw_client is client.raw_client


def test_the_table_has_every_name_of_the_seed_once():
    assert set(TABLE) == set(CALLS)
    assert len(TABLE) > 80


@pytest.mark.parametrize("name", TABLE)
def test_a_name_has_the_arguments_and_defaults_of_the_table(name):
    written_, _ = TABLE[name]
    value = found(name)
    if name == "LLMClient.raw_client":
        assert isinstance(inspect.getattr_static(langmarl.LLMClient, "raw_client"), property)
    elif dataclasses.is_dataclass(value):
        own = {each.name: each for each in dataclasses.fields(value)}
        for argument in written_.split(", "):
            key, _, default = argument.partition("=")
            assert key in own
            assert not default or repr(own[key].default) == default, argument
    else:
        assert signature(value) == written_


@pytest.mark.parametrize("name", CALLS)
def test_a_name_does_what_it_is_for(name, run):
    assert CALLS[name](run)


@pytest.mark.parametrize("name", ["Environment", "Agent", "Critic", "Reward", "Optimizer"])
def test_what_is_abstract_cannot_be_made(name):
    arguments = [None] if name == "Environment" else []
    with pytest.raises(TypeError, match="abstract"):
        getattr(langmarl, f"Base{name}")(*arguments)
    assert not inspect.isabstract(ScriptedTextModel)
    assert settings(Path("x"))["actor_llm"] == scripted("actor")
