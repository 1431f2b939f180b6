"""Parts of imitate.py: the configuration, the environment, the games that are imitated."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensordict import TensorDict

from torchrl_llm.data import ChatHistory, History
from torchrl_llm.envs.games import Agent, Game, GameEnv, expert, random_agent
from torchrl_llm.recipes import ModelConfig, OptimizerConfig
from torchrl_llm.recipes.strict_config import ensure, from_mapping
from torchrl_llm.recipes.tasks import check_options, check_task, task_class


@dataclass(kw_only=True)
class GameConfig:
    """The game; what the recipes of ``grpo`` call by the same names means the same.

    Attributes:
        dataset: name of a task of :data:`~torchrl_llm.recipes.tasks.TASKS` that is a game.
        options: settings of the game, arguments of its class.
        system_prompt: first message; ``None`` for the rules and the form of an answer.
    """

    dataset: str = "tic_tac_toe"
    options: dict[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        check_task(self.dataset)
        ensure(
            issubclass(task_class(self.dataset), GameEnv),
            f"env.dataset={self.dataset!r} is no game: there is nobody to imitate",
        )
        check_options(self.dataset, self.options)


@dataclass(kw_only=True)
class PlayerConfig:
    """Who is imitated.

    Attributes:
        careless: share of the turns in which the player does anything legal; in the others it does
            one of the best things.
    """

    careless: float = 0.7

    def __post_init__(self) -> None:
        ensure(
            0 <= self.careless <= 1, f"player.careless must be between 0 and 1, got {self.careless}"
        )


@dataclass(kw_only=True)
class TrainConfig:
    """The loop.

    Attributes:
        max_steps: optimizer steps.
        batch_size: games in each; a game comes again when all have been shown.
        num_threads: CPU threads of torch; ``None`` for its own choice.
    """

    max_steps: int = 200
    batch_size: int = 32
    num_threads: int | None = 1

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "num_threads"):
            value = getattr(self, name)
            ensure(value is None or value >= 1, f"train.{name} must be at least 1, got {value}")


@dataclass(kw_only=True)
class EvalConfig:
    """Greedy games at the end.

    Attributes:
        num_prompts: games of the held-out split; 0 for none.
        batch_size: games at a time.
        max_tokens: of a turn.
    """

    num_prompts: int = 256
    batch_size: int = 128
    max_tokens: int = 16

    def __post_init__(self) -> None:
        ensure(
            self.num_prompts >= 0, f"eval.num_prompts must be at least 0, got {self.num_prompts}"
        )
        for name in ("batch_size", "max_tokens"):
            value = getattr(self, name)
            ensure(value >= 1, f"eval.{name} must be at least 1, got {value}")


@dataclass(kw_only=True)
class ImitateConfig:
    """Everything that ``imitate.py`` can be told.

    Attributes:
        output: folder of the finished model; ``None`` for ``model`` in the run's folder.
        seed: seeds the player.
    """

    env: GameConfig = field(default_factory=GameConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    player: PlayerConfig = field(default_factory=PlayerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    output: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.optimizer.check_warmup(self.train.max_steps)


def load_config(values: Mapping[str, Any]) -> ImitateConfig:
    """Validate a composed configuration; an unknown key names the nearest valid one."""
    return from_mapping(ImitateConfig, values)


def make_game_env(config: ImitateConfig, tokenizer: Any, *, held_out: bool = False) -> GameEnv:
    """The configured game."""
    size = min(config.eval.batch_size, config.eval.num_prompts) if held_out else 1
    return task_class(config.env.dataset)(
        **config.env.options,
        system_prompt=config.env.system_prompt,
        split="test" if held_out else "train",
        num_envs=size,
        shuffle=False,
        tokenizer=tokenizer,
    )


def player(config: PlayerConfig, seed: int) -> Agent:
    """The scripted player."""
    generator = random.Random(seed)
    careful, careless = expert(seed), random_agent(seed)

    def act(game: Game, state: Any) -> str:
        agent = careless if generator.random() < config.careless else careful
        return agent(game, state)

    return act


def games(config: ImitateConfig) -> Iterator[TensorDict]:
    """The games of each optimizer step, of the seeds that are trained on.

    Yields:
        Rows ``[batch_size]`` with ``("history", "full")``.
    """
    env, agent = make_game_env(config, None), player(config.player, config.seed)
    seeds = [row["seed"] for row in env.default_dataset("train")]
    random.Random(config.seed).shuffle(seeds)
    size = config.train.batch_size
    for step in range(config.train.max_steps):
        chosen = [seeds[i % len(seeds)] for i in range(step * size, (step + 1) * size)]
        chats = [env.demonstrate(agent, seed) for seed in chosen]
        history = ChatHistory(full=History.from_chats(chats), batch_size=[size])
        yield TensorDict({"history": history}, batch_size=[size])
