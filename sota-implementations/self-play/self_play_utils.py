"""Parts of self-play.py: its configuration, a learner for each policy, and the evaluation."""

from __future__ import annotations

import copy
import json
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import xxhash
from tensordict import LazyStackedTensorDict

from torchrl_llm import __version__
from torchrl_llm._checked import Ge
from torchrl_llm._settings import Count, Group, ensure, own
from torchrl_llm.algorithms import Algorithm
from torchrl_llm.collectors import AgentShares
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.envs.games.game_env import GameEnv
from torchrl_llm.evaluation import Evaluation, evaluate
from torchrl_llm.modules import LLMWrapperBase, PolicyRouter, TransformersWrapper
from torchrl_llm.recipes import (
    RENAMED,
    EnvConfig,
    GRPOConfig,
    LossConfig,
    OptimizerConfig,
    SleepingEngineConfig,
    TrainConfig,
    launch,
)
from torchrl_llm.recipes.algorithm_parts import make_algorithm
from torchrl_llm.recipes.builders import (
    autocast,
    device_kind,
    make_eval_env,
    make_policy,
    make_step_buffer,
    max_turns,
    overlong_metrics,
    seed_everything,
    set_threads,
)
from torchrl_llm.recipes.sampling_engine import make_sampler
from torchrl_llm.recipes.strict_config import from_mapping
from torchrl_llm.recipes.tasks import task_class
from torchrl_llm.trainers import (
    BatchSource,
    LoggingConfig,
    SampledEvalConfig,
    make_optimizer,
    make_scheduler,
    rollout_metrics,
    say,
)
from torchrl_llm.trainers.held_out import NUM_COMPARED
from torchrl_llm.trainers.run_folder import model_folder
from torchrl_llm.trainers.run_results import Shown
from torchrl_llm.weights import JointWeights

SHARED, EARLIER = "player", "opponent"


class AgentsConfig(Group, key="agents"):
    """The players.

    Attributes:
        shared: one policy plays all seats and is trained on all of them; otherwise each player has
            its own policy.
        opponent: ``self``: the trained players play each other; ``checkpoint``: one trained policy
            plays against an earlier version of itself, and changes its seat with each step.
        opponent_interval: steps after which the earlier policy gets the weights of the trained one.
        imitate_steps: steps of imitation (``imitate.py``) before self-play, if ``model.name`` is
            not given; the imitated player makes any legal move, so that winning is learned only by
            playing. With 0, self-play begins with the model that ships with the package.
        players_folder: folder that keeps imitated players for later runs; ``None`` to imitate in
            each run.
    """

    shared: bool = False
    opponent: Literal["self", "checkpoint"] = "self"
    opponent_interval: Count = 10
    imitate_steps: Annotated[int, Ge(0)] = 400
    players_folder: str | None = "outputs/self-play/players"

    def __post_init__(self) -> None:
        super().__post_init__()
        ensure(
            self.opponent == "self" or self.shared,
            "agents.opponent=checkpoint has one trained policy: choose agents.shared=true",
        )
        has_opponent = self.opponent == "checkpoint"
        self.only("opponent_interval", has_opponent, "without agents.opponent=checkpoint")


class SelfPlayConfig(GRPOConfig):
    """All settings of ``self-play.py``."""

    agents: AgentsConfig
    env: EnvConfig = own(repeats=16)
    train: TrainConfig = own(max_steps=60, num_threads=1)
    inference_model: SleepingEngineConfig = own(max_tokens=4)
    loss: LossConfig = own(entropy_coeff=0.03)  # less entropy would overfit to one opponent
    optimizer: OptimizerConfig = own(lr=4e-4, scheduler="linear", warmup_steps=0.08)
    logging: LoggingConfig = own(experiment_name="self-play")
    eval: SampledEvalConfig = own(num_prompts=1024, interval=20, batch_size=256)

    def __post_init__(self) -> None:
        super().__post_init__()
        task = task_class(self.env.dataset)
        ensure(
            isinstance(task, type) and issubclass(task, GameEnv) and self.num_players > 1,
            f"env.dataset={self.env.dataset} has no two players with a policy: self-play needs a "
            "game of several, such as env=tic_tac_toe_for_two, and no scripted seats",
        )
        ensure(self.loss.type != "ppo", "self-play.py trains no critic: choose another loss")
        ensure(not self.needs_reference, "self-play.py has no reference policy")
        ensure(self.train.parallel == "none", "self-play.py trains in one process")
        ensure(
            not self.inference_model.sleep or self.agents.shared or device_kind(self) == "cpu",
            "inference_model.sleep=true with agents.shared=false needs an engine for each player, "
            "and vLLM has only one engine of a process sleep: choose agents.shared=true",
        )
        ensure(not self.curriculum.follows_results, "self-play.py plays all games alike")
        ensure(
            self.model.quantization is None or self.agents.opponent == "self",
            "agents.opponent=checkpoint does not go with model.quantization: the earlier policy "
            "would be a second model, and gets whole weights",
        )

    @property
    def rows_per_policy(self) -> int:
        """Trajectories of a step that one policy is trained on."""
        all_seats = self.agents.shared and self.agents.opponent == "self"
        return self.rows_per_batch if all_seats else self.rows_per_batch // self.num_players

    @property
    def players(self) -> tuple[str, ...]:
        """Names of the players that have a policy."""
        seats = self.env.options.get("seats") or {}
        return tuple(p for p in task_class(self.env.dataset).PLAYERS if p not in seats)

    def players_of(self, policies: Mapping[str, Any]) -> dict[str, list[str]]:
        """Name of each policy to the players that it is trained on.

        Args:
            policies: policies by name.
        """
        if self.agents.shared:
            return {name: list(self.players) for name in policies}
        return {name: [name] for name in policies}


def load_config(values: Mapping[str, Any]) -> SelfPlayConfig:
    """Validate a composed configuration; errors for unknown keys name the nearest valid key."""
    return from_mapping(SelfPlayConfig, values, renamed=RENAMED)


def make_policies(config: SelfPlayConfig, folder: str | Path) -> dict[str, TransformersWrapper]:
    """A policy for each player, or one for all, with the same weights to begin with.

    Args:
        config: configuration of the recipe.
        folder: folder of the run, in which a player is imitated.
    """
    set_threads(config)
    if config.model.name is None and config.agents.imitate_steps:
        config.model.name = str(_imitated(config, Path(folder) / "imitated"))
    seed_everything(config.seed)
    names = [SHARED] if config.agents.shared else config.players
    return {name: make_policy(config) for name in names}


def make_samplers(
    config: SelfPlayConfig, policies: Mapping[str, TransformersWrapper]
) -> tuple[dict[str, LLMWrapperBase], JointWeights]:
    """The samplers of the policies (themselves or engines), and the updaters of their weights.

    Args:
        config: configuration of the recipe.
        policies: the trained policies.
    """
    made = {name: make_sampler(config, policy, policy, name) for name, policy in policies.items()}
    samplers = {name: sampler for name, (sampler, _) in made.items()}
    return samplers, JointWeights(updater for _, updater in made.values())


def _imitated(config: SelfPlayConfig, folder: Path) -> Path:
    """The model that imitates a scripted player: loaded, or made in the run's folder."""
    page = launch.load_page("sft/imitate.py")
    steps = config.agents.imitate_steps
    chosen = [
        f"train.max_steps={steps}",
        "player.careless=1.0",
        "optimizer.warmup_steps=0.05",
        f"seed={config.seed}",
        "eval.num_prompts=0",
        "checkpoint.resume=auto",
        f"env.options.actions={config.env.options.get('actions', 'tag')}",
        f"train.num_threads={config.train.num_threads or 'null'}",
        "logging.progress=false",
    ]
    files = launch.PAGES / "sft" / "config"
    wanted = page.load_config(launch.compose_files(files, "imitate", chosen))
    made_of = json.dumps([__version__, wanted.flat()], sort_keys=True, default=str)
    shelf = config.agents.players_folder
    kept = shelf and Path(shelf) / f"imitated_{xxhash.xxh64_hexdigest(made_of.encode())}"
    if kept and kept.is_dir():
        say(f"begins from the player of an earlier run, {kept}; delete it to imitate anew")
        return kept
    say(f"model.name names no player: {steps} steps of imitation come first")
    for _ in page.train(wanted, folder):
        pass
    return _keep_player(model_folder(folder), kept) if kept else model_folder(folder)


def _keep_player(model: Path, kept: Path) -> Path:
    """Copy a player atomically to the folder where later runs find it."""
    half = kept.with_name(f".{kept.name}.{uuid.uuid4().hex[:8]}")
    try:
        shutil.copytree(model, half)
        half.rename(kept)
    except OSError:
        shutil.rmtree(half, ignore_errors=True)
        if not kept.is_dir():  # otherwise a different run has saved the same player
            raise
    return kept


class Learner(NamedTuple):
    """The parts that train one policy."""

    algorithm: Algorithm
    buffer: ReplayBuffer
    source: BatchSource
    optimizer: torch.optim.Optimizer
    scheduler: Any

    @property
    def parts(self) -> list[tuple[str, Any]]:
        """Its parts in a checkpoint besides the model."""
        return [
            (name, getattr(self, name)) for name in ("optimizer", "scheduler", "buffer", "source")
        ]


def make_learners(
    config: SelfPlayConfig,
    policies: Mapping[str, TransformersWrapper],
    shares: AgentShares,
    players: Mapping[str, list[str]],
) -> dict[str, Learner]:
    """A learner for each policy, on the rows of its players."""
    learners = {}
    for name, policy in policies.items():
        num_rows = config.rows_per_policy
        algorithm = make_algorithm(config, policy)
        algorithm.credit.whole_groups = True  # not every player acts; absent players add no rows
        buffer = algorithm.append_to(make_step_buffer(config, num_rows))
        optimizer = make_optimizer(policy, **config.optimizer.arguments)
        source = BatchSource(
            shares[name],
            buffer,
            credit=algorithm.credit,
            num_rows=num_rows,
            length=config.train.length_rule,
            truncated=config.filter.truncated,
            max_resamples=config.filter.resamples,
            rows_per_trajectory=max_turns(config),
        )
        scheduler = make_scheduler(
            optimizer, **config.optimizer.schedule, total_steps=config.num_updates
        )
        learners[name] = Learner(algorithm, buffer, source, optimizer, scheduler)
    return learners


class Opponent:
    """An earlier policy, which plays the other seat with ``agents.opponent=checkpoint``.

    The seat of the trained policy changes with each step, and only its rows are trained on.

    Args:
        config: configuration of the recipe.
        policies: the trained policies.
        samplers: the sampler of each policy.
    """

    def __init__(
        self,
        config: SelfPlayConfig,
        policies: Mapping[str, TransformersWrapper],
        samplers: Mapping[str, LLMWrapperBase],
    ) -> None:
        self._players, self._interval = config.players, config.agents.opponent_interval
        self._trained, self._samplers = policies, samplers
        self.policies: dict[str, TransformersWrapper] = {}
        if config.agents.opponent == "checkpoint":
            earlier = make_policy(config)
            earlier.model.requires_grad_(False)
            self.policies = {EARLIER: earlier}

    def seats(self, step: int) -> dict[str, LLMWrapperBase]:
        """The policy that plays each player.

        Args:
            step: number of the step, from 1.
        """
        if len(self._samplers) > 1:
            return dict(self._samplers)
        [sampler] = self._samplers.values()
        seats = dict.fromkeys(self._players, sampler)
        if self.policies:
            seats |= dict.fromkeys(set(seats) - {self._seat(step)}, self.policies[EARLIER])
        return seats

    def _seat(self, step: int) -> str:
        """The player that is trained in a step."""
        return self._players[(step - 1) % len(self._players)]

    def sit_down(self, step: int, router: PolicyRouter, shares: AgentShares) -> None:
        """Change seats, before a step.

        Args:
            step: its number, from 1.
            router: router with the policies that change seats.
            shares: object that distributes rows; then it distributes only the rows of the trained
                policy.
        """
        if self.policies:
            router.seat(self.seats(step))
            shares.assign({SHARED: [self._seat(step)]})

    def follow(self, step: int) -> None:
        """Copy the trained weights if this is due, after a step.

        Args:
            step: its number.
        """
        if self.policies and step % self._interval == 0:
            [trained] = self._trained.values()
            self.policies[EARLIER].model.load_state_dict(copy.deepcopy(trained.model.state_dict()))


@dataclass(frozen=True, kw_only=True)
class PlayersResult:
    """Result of the evaluation of each player; see :class:`PlayersEvaluation`."""

    by_player: Mapping[str, Evaluation]

    @property
    def conversations(self) -> tuple[str, ...]:
        """The first games of each player, as text."""
        return tuple(text for each in self.by_player.values() for text in each.conversations)

    @property
    def accuracy(self) -> float:
        """Share of won games, over all players."""
        return sum(each.accuracy for each in self.by_player.values()) / len(self.by_player)

    def metrics(self) -> dict[str, float]:
        """``eval/<player>/won``, ``eval/<player>/legal``, ``eval/<player>/reward``; and means."""
        found = {}
        for player, each in self.by_player.items():
            found |= {
                f"eval/{player}/won": each.accuracy,
                f"eval/{player}/legal": each.shares["game_legal"],
                f"eval/{player}/reward": each.reward,
            }
        games = sum(each.num_prompts for each in self.by_player.values())
        return {"eval/accuracy": self.accuracy, "eval/num_prompts": games, **found}


class PlayersEvaluation:
    """Plays held-out games against the random player, each player from its seat, greedily.

    Args:
        config: the recipe's; ``eval.num_prompts`` games for each player.
        policies: the sampler of each trained policy.
        players: the players of each policy.
    """

    def __init__(
        self,
        config: SelfPlayConfig,
        policies: Mapping[str, LLMWrapperBase],
        players: Mapping[str, list[str]],
    ) -> None:
        self._config = config
        arguments = {"max_new_tokens": config.inference_model.max_tokens, "temperature": 0.0}
        self._seats = {
            player: (policy.get_new_version(generate_kwargs=arguments), self._env(player, policy))
            for name, policy in policies.items()
            for player in players[name]
        }

    def _env(self, player: str, policy: LLMWrapperBase) -> GameEnv:
        others = dict.fromkeys((p for p in self._config.players if p != player), "random")
        seats = {**(self._config.env.options.get("seats") or {}), **others}
        return make_eval_env(self._config, policy.tokenizer, seats=seats)

    def __call__(self) -> PlayersResult:
        """Play."""
        config, found = self._config, {}
        for player, (policy, env) in self._seats.items():
            with autocast(config):
                found[player] = evaluate(
                    env,
                    policy,
                    num_prompts=config.eval.num_prompts or env.primer.num_rows,
                    max_turns=max_turns(config),
                    share_keys=("game_legal",),
                    num_shown=NUM_COMPARED,
                    title=f"evaluating {player}",
                )
        return PlayersResult(by_player=found)


def shown(config: SelfPlayConfig, policies: Mapping[str, Any]) -> Shown:
    """The shown columns: games won by the first player, and against the random player."""
    held_out = {"eval/accuracy": "held-out games won"}
    held_out |= {f"eval/{player}/won": f"won as {player}" for player in config.players}
    first = next(iter(policies))
    return Shown(f"train/{first}/reward", f"reward_{first}", "train/tokens_generated", held_out)


def metrics_of(
    learners: Mapping[str, Learner],
    rows: Mapping[str, LazyStackedTensorDict],
    updates: Mapping[str, Mapping[str, float]],
    absent: Mapping[str, tuple[int, float]],
    router: PolicyRouter,
) -> dict[str, float]:
    """The metrics of a step; the names of each policy's metrics begin with ``train/<name>/``.

    ``train/<player>/absent`` counts the episodes in which a player never acted, and
    ``train/<player>/reward_absent`` is the sum of the player's rewards in them, which are in no
    row.
    """
    found: dict[str, float] = {}
    for name, learner in learners.items():
        own = rollout_metrics(rows[name]) | dict(updates[name]) | learner.source.ledger.metrics()
        own |= learner.source.overlong
        found |= {f"train/{name}/{key.removeprefix('train/')}": value for key, value in own.items()}
    for player, (times, reward) in absent.items():
        found |= {f"train/{player}/absent": times, f"train/{player}/reward_absent": reward}
    tokens = (learner.source.ledger.totals["generated"] for learner in learners.values())
    overlong = [overlong_metrics(policy)["train/overlong"] for policy in router.asked]
    return {"train/tokens_generated": sum(tokens), "train/overlong": sum(overlong), **found}
