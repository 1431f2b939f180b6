"""Parts of imitate.py: the configuration, the environment, the games that are imitated."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Annotated, Any

from sft_utils import AnswerEvalConfig, SFTGroups

from torchrl_llm._checked import In
from torchrl_llm._settings import Group, ensure, own
from torchrl_llm.data.row_files import MappedRows
from torchrl_llm.envs.games import Game, GameEnv, Player, expert, random_player
from torchrl_llm.recipes import OptimizerConfig, SFTLossConfig
from torchrl_llm.recipes.strict_config import from_mapping
from torchrl_llm.recipes.supervised import NumbersConfig, TrainConfig
from torchrl_llm.recipes.tasks import check_options, check_task, task_class


class GameConfig(Group, key="env"):
    """The game; the keys mean the same as in the recipes of ``grpo``.

    Attributes:
        dataset: name of a task (``torchrl-llm list tasks``) that is a game.
        options: settings of the game, arguments of its class.
        system_prompt: first message; ``None`` for the rules and the form of an answer.
    """

    dataset: str = "tic_tac_toe"
    options: dict[str, Any] = own(actions="bare")
    system_prompt: str | None = "Play tic-tac-toe."

    def __post_init__(self) -> None:
        super().__post_init__()
        check_task(self.dataset)
        ensure(
            issubclass(task := task_class(self.dataset), GameEnv) and len(task.PLAYERS) < 2,
            f"env.dataset={self.dataset!r} is no game for one player: there is nobody to imitate",
        )
        check_options(self.dataset, self.options)


class PlayerConfig(Group, key="player"):
    """The imitated player.

    Attributes:
        careless: share of the turns in which the player makes any legal move; in the others it
            makes one of the best moves.
    """

    careless: Annotated[float, In("[0, 1]")] = 0.7


class ImitateConfig(SFTGroups):
    """All settings of ``imitate.py``; ``seed`` also seeds the player."""

    env: GameConfig
    player: PlayerConfig
    train: TrainConfig = own(max_steps=200)
    optimizer: OptimizerConfig = own(
        lr=1e-3, weight_decay=0.1, betas=(0.9, 0.98), scheduler="linear", warmup_steps=0.1
    )
    loss: SFTLossConfig
    logging: NumbersConfig = own(experiment_name="imitate")
    eval: AnswerEvalConfig = own(num_prompts=256, max_tokens=8)


def load_config(values: Mapping[str, Any]) -> ImitateConfig:
    """Validate a composed configuration; errors for unknown keys name the nearest valid key."""
    return from_mapping(ImitateConfig, values)


def make_game_env(config: ImitateConfig, tokenizer: Any, *, held_out: bool = False) -> GameEnv:
    """The configured game."""
    return task_class(config.env.dataset)(
        **config.env.options,
        system_prompt=config.env.system_prompt,
        split="test" if held_out else "train",
        num_envs=config.eval.batch_size if held_out else 1,
        shuffle=False,
        tokenizer=tokenizer,
    )


def player(config: PlayerConfig, seed: int | str) -> Player:
    """The scripted player."""
    generator = random.Random(seed)
    # Each player has its own random stream: with one seed for all, their choices would be
    # correlated.
    careful, careless = expert(generator.getrandbits(32)), random_player(generator.getrandbits(32))

    def act(game: Game, state: Any) -> str:
        choose = careless if generator.random() < config.careless else careful
        return choose(game, state)

    return act


def games(config: ImitateConfig) -> MappedRows:
    """A conversation for each training seed, played when it is read."""
    env = make_game_env(config, None)
    seeds = [row["seed"] for row in env.default_dataset("train")]

    def game(seed: int) -> dict[str, Any]:
        # The player's moves depend only on its game, not on when it is read.
        return {"messages": env.demonstrate(player(config.player, f"{config.seed}/{seed}"), seed)}

    return MappedRows(seeds, game)
