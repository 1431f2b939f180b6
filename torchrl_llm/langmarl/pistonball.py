"""The ``pistonball`` environment: a row of pistons that rolls a ball to the left wall.

Each piston is an agent and acts in each cycle, so an episode costs up to ``num_pistons`` times
``max_cycles`` calls. Pistons get the state of the game as text; no model sees an image.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from torchrl_llm._registry import register
from torchrl_llm.envs.libs.pettingzoo import joint_step, make_pettingzoo
from torchrl_llm.errors import DataError
from torchrl_llm.langmarl import calls
from torchrl_llm.langmarl.config import PistonballConfig
from torchrl_llm.langmarl.environment import BaseEnvironment, Episodes, Trajectory
from torchrl_llm.langmarl.llm_client import LLMClient

_WORDS = {"up": "1", "down": "-1", "stay": "0"}
_NAMES = {float(value): word for word, value in _WORDS.items()}
_WORD = r"\b(?:up|down|stay)\b"
_NUMBER = r"(?<![\w.])(?<![\w.][-+])[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?(?!\w|\.\d)"
_ACTION = {"discrete": _WORD, "continuous": f"{_WORD}|{_NUMBER}"}
_ASK = {"discrete": "up, down or stay", "continuous": "a number from -1 (down) to 1 (up)"}


def _read(text: str, mode: str) -> float | None:
    """The action on the last line that is only an action, or the only action in the text."""
    said = text.rpartition("</think>")[2].lower().replace("\N{MINUS SIGN}", "-")
    alone = re.compile(rf"(?:\W*action\b)?\W*?({_ACTION[mode]})\W*")
    lines = [found[1] for line in said.splitlines() if (found := alone.fullmatch(line))]
    named = lines[-1:] or sorted(set(re.findall(_ACTION[mode], said)))
    value = float(_WORDS.get(named[0], named[0])) if len(named) == 1 else math.nan
    return value if -1 <= value <= 1 else None


class _Game:
    """A running episode, with its observations and actions as text."""

    def __init__(self, config: PistonballConfig, number: int, task: dict[str, Any]) -> None:
        if not isinstance(task.get("seed"), int) or task["seed"] < 0:
            raise DataError(f"a task of pistonball needs a 'seed', 0 or more, got {task!r}")
        self.config, self.number, self.cycle = config, number, 0
        self.env = make_pettingzoo(
            "butterfly/pistonball_v6",
            n_pistons=config.num_pistons,
            continuous=config.action_mode == "continuous",
            max_cycles=config.max_cycles,
        )
        self.env.reset(seed=task["seed"])
        self.world, self.names = self.env.unwrapped, list(self.env.agents)
        self.trajectory = Trajectory(task, [], 0.0, {"episode_id": number, "num_unread_actions": 0})

    @property
    def over(self) -> bool:
        """Whether the episode is over."""
        return not self.env.agents or not self.trajectory.valid

    def _units(self, pixels: float) -> int:
        return round(float(pixels) * self.config.frame_size / (3 * self.world.piston_width))

    def see(self, name: str) -> str:
        """Observation of a piston."""
        world, place, (x, y) = self.world, self.names.index(name), self.world.ball.position
        floor = world.screen_height - world.wall_width
        floor -= world.piston_height - world.piston_head_height
        pistons = [str(self._units(floor - piston.position[1])) for piston in world.pistonList]
        left, own, right = ["wall", *pistons, "wall"][place : place + 3]
        aside = self._units(x - world.wall_width - (place + 0.5) * world.piston_width)
        lowest = self._units(floor - world.piston_radius - world.ball_radius - y)
        across, fall = world.ball.velocity * (world.dt * world.n_pistons)
        most, wide = world.n_piston_positions * world.pixels_per_position, world.piston_width
        return (
            f"Cycle {self.cycle + 1} of {self.config.max_cycles}. Right and up are positive; a "
            f"piston is {self._units(wide)} wide. Heights, from 0 to {self._units(most)}: left "
            f"neighbour {left}, you {own}, right neighbour {right}. The ball is {aside:+d} beside "
            f"you, its lowest point at height {lowest}; it moves {self._units(across):+d} sideways "
            f"and {self._units(-fall):+d} up a cycle."
        )

    def act(self, answers: Mapping[str, str | Exception]) -> float:
        """Move all pistons and return their mean reward; fail if an answer is an error."""
        episode, mode, world = self.trajectory, self.config.action_mode, self.world
        for failed in (each for each in answers.values() if isinstance(each, Exception)):
            episode.metadata["error"] = f"{type(failed).__name__}: {failed}"
            episode.reward = math.nan
            return math.nan
        read = {name: _read(answers[name], mode) for name in self.names}
        moves = {name: value or 0.0 for name, value in read.items()}
        ball = self._units(world.ball.position[0] - world.ball_radius - world.wall_width)
        steps = [
            {"agent_id": name, "observation": self.see(name), "action": _NAMES.get(v, f"{v:g}")}
            | {"response": answers[name], "distance": ball}
            for name, v in moves.items()
        ]
        native = (lambda v: int(v) + 1) if mode == "discrete" else (lambda v: np.float32([v]))
        rewards = joint_step(self.env, {name: native(v) for name, v in moves.items()})
        reward, self.cycle = sum(rewards.values()) / len(rewards), self.cycle + 1
        episode.steps += [step | {"reward": reward} for step in steps]
        episode.reward += reward
        episode.metadata["num_unread_actions"] += list(read.values()).count(None)
        return reward


@register("environments", "pistonball")
class PistonballEnvironment(BaseEnvironment):
    """PettingZoo's Pistonball; the reward is the sum over cycles of the mean over pistons.

    Args:
        config: ``num_agents`` is ``num_pistons``. ``frame_size`` is the resolution of the
            observations: the number of whole units in the width of three pistons, the width of the
            game's images.

    Raises:
        MissingExtraError: PettingZoo is not installed.
    """

    ENV_NAME, CREDIT_FORMAT, CONFIG_CLASS = "pistonball", "markers", PistonballConfig

    def __init__(self, config: PistonballConfig) -> None:
        super().__init__(config)
        llm = config.get_actor_llm()
        self.actor = LLMClient(replace(llm, concurrency=min(llm.concurrency, config.max_workers)))
        self._by_hand, self._acted = _Game(config, 0, {"seed": 0}), {}

    @property
    def agent_names(self) -> list[str]:
        """``piston_0``, at the left wall, to the last."""
        return [f"piston_{k}" for k in range(self.config.num_pistons)]

    def default_policies(self) -> dict[str, str]:
        """The rules, and the position of the piston."""
        return {
            name: f"You are {name}, number {k} of {self.config.num_pistons} pistons, from left to "
            "right. Each moves up and down alone. A ball lies on the pistons; together you roll it "
            "to the left wall. Its way to the left is your reward, and each cycle costs a little."
            for k, name in enumerate(self.agent_names, 1)
        }

    def tasks(self) -> list[dict[str, Any]]:
        """A thousand seeds of initial positions."""
        goal = f"Roll the ball to the left wall in at most {self.config.max_cycles} cycles."
        return [{"seed": seed, "question": goal} for seed in range(1000)]

    def critic_prompt_vars(self, trajectory: Trajectory) -> dict[str, str]:
        """The type of the tasks, and the episode with a line for each cycle."""
        size, lines = self.config.num_pistons, [f"Reward of the episode: {trajectory.reward:.2f}"]
        for start in range(0, len(trajectory.steps), size):
            did: dict[str, list[int]] = {}
            for place, step in enumerate(trajectory.steps[start : start + size]):
                did.setdefault(step["action"], []).append(place)
            facts = f"{step['distance']} from the left wall, reward {step['reward']:.2f}"
            lines.append(f"Cycle {start // size + 1}: ball {facts}. Pistons: {did}")
        return {"task_type": "pistonball", "trajectory": "\n".join(lines)}

    def collect_batch(self, policies: dict[str, str], episodes: Episodes) -> list[Trajectory]:
        """Play episodes together: in each cycle, all pistons of all episodes form one batch."""
        games = [_Game(self.config, *one) for one in episodes.numbered]
        ask = f"Answer with {_ASK[self.config.action_mode]}, and nothing else."
        while playing := [game for game in games if not game.over]:
            turns = [(game, name) for game in playing for name in game.names]
            keys = [episodes.key("actor", g.number, f"{name}/{g.cycle}") for g, name in turns]
            asked = [self.actor.messages(policies[n], f"{g.see(n)}\n{ask}") for g, n in turns]
            answers = episodes.log.ask(self.actor.asked, "actor", keys, asked)
            texts = iter(each if isinstance(each, Exception) else each.text for each in answers)
            for game in playing:
                game.act(dict(zip(game.names, texts, strict=False)))
                if game.over:
                    episodes.on_done(game.trajectory)
        return [game.trajectory for game in games]

    def collect_trajectory(self, policies: dict[str, str], task: dict[str, Any]) -> Trajectory:
        """Play one episode; after a failed call it has an ``error`` and a NaN reward."""
        return self.collect_batch(policies, Episodes([(0, task)], *calls.current()))[0]

    def reset(self, task: dict[str, Any]) -> dict[str, str]:
        """Begin an episode manually, without models; returns each piston's observation."""
        self._by_hand, self._acted = _Game(self.config, 0, task), {}
        return {name: self._by_hand.see(name) for name in self._by_hand.names}

    def step(self, agent_id: str, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Record the action of a piston; when the last has acted, all move and get the reward."""
        waiting = [name for name in self._by_hand.env.agents if name not in self._acted]
        if agent_id not in waiting:
            raise DataError(f"one of {waiting} is to act in this cycle, got {agent_id!r}")
        self._acted[agent_id], reward = action, 0.0
        if len(waiting) == 1:
            reward, self._acted = self._by_hand.act(self._acted), {}
        return self._by_hand.see(agent_id), reward, self._by_hand.over, {}
