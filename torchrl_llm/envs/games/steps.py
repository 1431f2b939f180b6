"""The transform that plays games.

It knows a game only through :class:`~torchrl_llm.envs.games.game.Game` and keeps nothing itself:
the state of every row is in the tensordict, as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded

from torchrl_llm.data.column import Column
from torchrl_llm.data.specs import ColumnSpec
from torchrl_llm.envs.actions import ActionError, ActionParser
from torchrl_llm.envs.games.game import Game, IllegalAction
from torchrl_llm.envs.world import CUT_OFF, ModelTurn, Reaction, WorldTransform
from torchrl_llm.errors import ConfigError, DataError

STATE_KEY = "game_state"


@dataclass(frozen=True, kw_only=True)
class _Played(Reaction):
    """A reaction with the state after it, as text."""

    state: str
    action: str = ""
    legal: bool = True


class GameSteps(WorldTransform):
    """Plays a game with the answers of the model, one game a row.

    Beside what every :class:`~torchrl_llm.envs.world.WorldTransform` writes:

    - ``"game_state"``, the state after the turn, as text;
    - ``"game_action"``, the action, empty where there was none, and ``"game_legal"``, bool ``[B]``.

    An answer without an action, with one that the rules forbid, or one that was cut at its limit of
    tokens does not move the game: it costs ``invalid_reward``, the model is told what is wrong, and
    the turn counts as any other.

    Args:
        game: the rules.
        parser: reads actions.
        invalid_reward: reward of a turn without a legal action.
        stop_on_invalid: let such a turn end the game.
        accept_cut: read answers that were cut at their limit of tokens like others.
        with_reward: see :class:`~torchrl_llm.envs.world.WorldTransform`.

    Raises:
        ConfigError: for an ``invalid_reward`` that is not finite.
    """

    def __init__(
        self,
        game: Game,
        parser: ActionParser,
        *,
        invalid_reward: float = -0.1,
        stop_on_invalid: bool = False,
        accept_cut: bool = False,
        with_reward: bool = True,
    ) -> None:
        super().__init__(parser, with_reward=with_reward)
        if not abs(invalid_reward) < float("inf"):
            raise ConfigError(f"invalid_reward must be finite, got {invalid_reward}")
        self.game = game
        self.invalid_reward = invalid_reward
        self.stop_on_invalid = stop_on_invalid
        self.accept_cut = accept_cut

    def react(self, td: TensorDictBase, turns: Sequence[ModelTurn]) -> list[_Played]:
        """See :meth:`~torchrl_llm.envs.world.WorldTransform.react`."""
        states = td.get(STATE_KEY, None)
        if states is None:
            raise DataError(f"the rows lack {STATE_KEY!r}, which the environment's data give them")
        texts = states.tolist()
        return [self._play(texts[turn.row], turn) for turn in turns]

    def _play(self, text: str, turn: ModelTurn) -> _Played:
        action = ""
        try:
            state = self.game.load(text)
            try:
                action = self._action(turn)
                outcome = self.game.step(state, action)
            except (ActionError, IllegalAction) as error:
                return self._invalid(text, action, str(error))
            return _Played(
                observation=outcome.observation,
                reward=outcome.reward,
                terminated=outcome.terminated,
                truncated=outcome.truncated,
                success=outcome.success,
                state=self.game.dump(outcome.state),
                action=action,
            )
        except Exception as error:  # a game that fails is data, whatever it raised
            told = "The game has failed."
            return _Played(observation=told, error=error, state=text, action=action, legal=False)

    def _action(self, turn: ModelTurn) -> str:
        if turn.message is None:
            raise ActionError("There is no answer.")
        if turn.cut and not self.accept_cut:
            raise ActionError(CUT_OFF)
        return self.game.normalize(self.parser.parse(turn.message))

    def _invalid(self, state: str, action: str, why: str) -> _Played:
        return _Played(
            observation=why if self.stop_on_invalid else f"{why} {self.parser.help}",
            reward=self.invalid_reward,
            terminated=self.stop_on_invalid,
            state=state,
            action=action,
            legal=False,
        )

    # Columns

    def write(
        self,
        td: TensorDictBase,
        next_td: TensorDictBase,
        turns: Sequence[ModelTurn],
        reactions: Sequence[Reaction],
    ) -> None:
        """See :meth:`~torchrl_llm.envs.world.WorldTransform.write`."""
        states = td.get(STATE_KEY).tolist()
        actions, legal = [""] * len(states), [True] * len(states)
        for turn, played in zip(turns, reactions, strict=True):
            states[turn.row] = played.state
            actions[turn.row], legal[turn.row] = played.action, played.legal
        next_td.set(STATE_KEY, Column.of(states))
        _write_turn(next_td, actions, legal)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        size = tensordict_reset.batch_size.numel()
        _write_turn(tensordict_reset, [""] * size, [True] * size)
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds ``game_action`` and ``game_legal``."""
        shape, device = observation_spec.shape, observation_spec.device
        observation_spec["game_action"] = ColumnSpec((*shape, -1), example_data="")
        observation_spec["game_legal"] = Unbounded(shape=shape, dtype=torch.bool, device=device)
        return observation_spec


def _write_turn(td: TensorDictBase, actions: Sequence[str], legal: Sequence[bool]) -> None:
    td.set("game_action", Column.of(actions))
    td.set("game_legal", torch.tensor(legal, device=td.device))
