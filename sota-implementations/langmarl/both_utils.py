"""Parts of both.py: its settings, the world, a player who follows advice, critic and optimizer.

Even a tiny model follows a text in this world: :func:`imitated` trains it on games of a player who
follows the advice in the system prompt, good or bad, and otherwise makes any legal move.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from torchrl.data import LazyStackStorage, SamplerWithoutReplacement

from torchrl_llm._checked import Ge
from torchrl_llm._settings import Count, Group
from torchrl_llm.data.demonstrations import DemonstrationColumns, Demonstrations, learned_rows
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.data.row_files import MappedRows, RowLoader
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.envs.games import Game, Player, TicTacToeEnv
from torchrl_llm.evaluation import Evaluation, evaluate
from torchrl_llm.langmarl.environment import BaseCritic, BaseOptimizer, Trajectory
from torchrl_llm.langmarl.language_policy import (
    LanguagePolicy,
    LanguagePrompts,
    split_policy,
    with_feedback,
)
from torchrl_llm.modules import TransformersBackend, TransformersWrapper, load_model, load_tokenizer
from torchrl_llm.objectives import SFTLoss
from torchrl_llm.recipes.builders import seed_everything, spare_threads
from torchrl_llm.trainers import make_optimizer, make_scheduler, optimize, say

BASE = "Play tic-tac-toe."
ADVICE = {
    "Middle, then corners.": ("5", "1379"),
    "Take corners.": ("1379",),
    "Take edges.": ("2468",),
}
"""Advice, and the cells that it prefers, the best first."""

AGENT = "agent"
MAX_TURNS = 6  # five moves, and an illegal one
_KINDS = {"middle": "5", "corner": "1379", "edge": "2468"}
_TURN = {"max_new_tokens": 2}  # a digit, and the end of the turn
_IMITATED_GAMES = 16  # per step: many small steps teach the rules faster than few large ones


class BothConfig(Group):
    """All settings of ``both.py``.

    Attributes:
        mode: train the text, the weights, or both.
        seed: seed of the imitated player, the games and the optimizer's choices.
        steps: rollouts, each followed by a training step.
        prompts: games per step; each is started ``repeats`` times.
        repeats: size of a group of GRPO.
        lr: learning rate of GRPO.
        language_interval: steps between two language steps.
        gradients: number of lost games per step that the optimizer turns into gradients.
        validation: games that decide whether a changed text is kept.
        games: further games for the results.
        imitate_steps: steps of the initial imitation.
        folder: folder that keeps the imitated player for later runs.
        run: folder of the run; null for DATE/TIME in ``folder``. If the folder contains a run, the
            run is resumed.
    """

    mode: Literal["text", "weights", "both"] = "both"
    seed: Annotated[int, Ge(0)] = 0
    steps: Count = 40
    prompts: Count = 8
    repeats: Annotated[int, Ge(2)] = 8
    lr: Annotated[float, Ge(0)] = 4e-4
    language_interval: Count = 2
    gradients: Count = 4
    validation: Count = 256
    games: Count = 1024
    imitate_steps: Count = 450
    folder: str = "outputs/langmarl-weights"
    run: str | None = None

    @property
    def run_folder(self) -> Path:
        """Folder of the run."""
        return Path(self.run or f"{self.folder}/{self.mode}-seed{self.seed}")


# --- The world ------------------------------------------------------------------------------------


def make_env(text: LanguagePolicy, tokenizer: Any, num_games: int, **options: Any) -> Any:
    """Games against a random opponent, whose system prompt is a policy.

    Args:
        text: the policy.
        tokenizer: tokenizer of the player.
        num_games: number of games at a time.
        **options: further arguments of the environment.
    """
    rules = {"actions": "bare", "max_steps": MAX_TURNS, "system_prompt": BASE}
    env = TicTacToeEnv(**rules, num_envs=num_games, tokenizer=tokenizer, **options)
    return env.append_transform(LanguagePrompts({AGENT: text}))


def won_games(
    text: LanguagePolicy, policy: TransformersWrapper, num_games: int, **options: Any
) -> Callable[[], Evaluation]:
    """A function that plays the same held-out games greedily at each call.

    Args:
        text: the system prompt.
        policy: the player.
        num_games: number of games.
        **options: further arguments of the environment.
    """
    env = make_env(text, policy.tokenizer, min(num_games, 256), shuffle=False, **options)
    greedy = policy.get_new_version(generate_kwargs={**_TURN, "temperature": 0.0})
    return partial(
        evaluate, env, greedy, num_prompts=num_games, max_turns=MAX_TURNS, share_keys=["game_legal"]
    )


def validation_rows(num_games: int) -> list[dict[str, int]]:
    """Games that are in neither split of the task.

    Args:
        num_games: number of games.
    """
    return [{"seed": 10**6 + number} for number in range(num_games)]


def make_buffer(num_games: int) -> ReplayBuffer:
    """A buffer for the games of one step, which are one batch.

    Args:
        num_games: number of games.
    """
    return ReplayBuffer(
        storage=LazyStackStorage(num_games),
        sampler=SamplerWithoutReplacement(),
        batch_size=num_games,
    )


# --- The player -----------------------------------------------------------------------------------


def make_policy(config: BothConfig) -> TransformersWrapper:
    """The package's model after the imitation; it is cached for the other modes.

    Args:
        config: configuration of the page.
    """
    spare_threads(None)
    folder = Path(config.folder) / f"player-seed{config.seed}-{config.imitate_steps}"
    if not folder.is_dir():
        say(f"first the model imitates games for {config.imitate_steps} steps")
        seed_everything(config.seed)
        policy = imitated(config, _policy(None))
        unfinished = folder.with_suffix(".unfinished")
        policy.model.save_pretrained(unfinished)
        policy.tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)
    seed_everything(config.seed)
    return _policy(str(folder))


def _policy(name: str | None) -> TransformersWrapper:
    tokenizer = load_tokenizer(name)
    backend = TransformersBackend(load_model(name).train(), tokenizer=tokenizer, layout="auto")
    return TransformersWrapper(backend, tokenizer=tokenizer, generate_kwargs=_TURN)


def imitated(config: BothConfig, policy: TransformersWrapper) -> TransformersWrapper:
    """The policy after training on games of scripted players.

    Args:
        config: configuration of the page.
        policy: the policy to train.
    """
    env = TicTacToeEnv(actions="bare", system_prompt=BASE, num_envs=1)
    seeds = [row["seed"] for row in TicTacToeEnv.generate("train")]
    shown = Demonstrations(
        MappedRows(seeds, partial(demonstration, env, config.seed)),
        ChatFormatter(policy.tokenizer),
        DemonstrationColumns(messages="messages"),
    )
    loader = RowLoader(shown, seed=config.seed, batch_size=_IMITATED_GAMES, collate_fn=list)
    arguments = {"name": "AdamW", "lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.98)}
    optimizer = make_optimizer(policy.parameters(), **arguments)
    steps = config.imitate_steps
    schedule = {"name": "linear", "warmup_steps": 0.05, "total_steps": steps}
    optimize(
        SFTLoss(policy, reduction="mean"),
        (learned_rows(batch) for batch in islice(loader, steps)),
        optimizer,
        make_scheduler(optimizer, **schedule),
        max_norm=1.0,
        layout=policy.layout,
    )
    return policy


def demonstration(env: TicTacToeEnv, seed: int, game: int) -> dict[str, Any]:
    """A game of a player with or without advice.

    Args:
        env: environment with the policy's base as its system prompt.
        seed: seed of the players.
        game: seed of the game.
    """
    generator = random.Random(f"{seed}/{game}")
    advice = generator.choice(["", *ADVICE])
    told, *turns = env.demonstrate(obedient(advice, generator), game)
    return {"messages": [{**told, "content": with_feedback(BASE, advice)}, *turns]}


def obedient(advice: str, generator: random.Random) -> Player:
    """A player who follows the advice in most turns, and otherwise makes any legal move.

    Args:
        advice: one of :data:`ADVICE`, or ``None``.
        generator: random generator for the choices.
    """

    def act(game: Game, state: Any) -> str:
        legal = game.legal_actions(state)
        wanted = ([cell for cell in legal if cell in cells] for cells in ADVICE.get(advice, ()))
        preferred = next(filter(None, wanted), legal)
        return generator.choice(preferred if generator.random() < 0.95 else legal)

    return act


# --- Critic and optimizer, scripted ---------------------------------------------------------------


class Critic(BaseCritic):
    """For a game that was not won, tells which better cell was free when an edge was taken."""

    def evaluate(self, trajectory: Trajectory, policies: dict[str, str]) -> dict[str, Any]:
        """See :class:`~torchrl_llm.langmarl.environment.BaseCritic`."""
        faults = [] if trajectory.reward > 0 else list(filter(None, map(_fault, trajectory.steps)))
        said = " ".join(faults)
        return {"raw_response": said, "per_agent": dict.fromkeys(policies, said)}


def _fault(step: dict[str, Any]) -> str:
    board, taken = step["observation"], step["action"].strip()
    free = set(re.findall(r"[1-9]", "\n".join(board.splitlines()[-4:-1])))
    better = [kind for kind in ("middle", "corner") if free & set(_KINDS[kind])]
    if taken not in _KINDS["edge"] or not better:
        return ""
    return f"You took {taken}, an edge, while a {' and a '.join(better)} was free."


class Optimizer(BaseOptimizer):
    """Chooses different advice on the critic's topic at random, good or bad."""

    def generate_gradient(self, policy: str, evaluation: str, context: str) -> str:
        """One of :data:`ADVICE`."""
        topics = [kind for kind in _KINDS if kind in evaluation]
        others = [each for each in ADVICE if each not in policy]
        fitting = [each for each in others if any(kind in each.lower() for kind in topics)]
        return random.choice(fitting or others)

    def aggregate_gradients(self, gradients: list[str]) -> str:
        """The most frequent one."""
        return Counter(gradients).most_common(1)[0][0]

    def apply_gradient(self, policy: str, gradient: str) -> str:
        """The policy with different feedback."""
        return with_feedback(split_policy(policy).base, gradient)
