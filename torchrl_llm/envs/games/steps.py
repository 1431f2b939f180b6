"""The transform that plays: an answer becomes an action, and what comes of it the next message.

It knows the game only through :class:`~torchrl_llm.envs.games.game.Game` and keeps nothing itself:
the state of every row is in the tensordict, as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import Transform

from torchrl_llm.data.column import Column
from torchrl_llm.data.enums import FinishReason, TruncationReason
from torchrl_llm.envs.games.actions import ActionError, ActionParser
from torchrl_llm.envs.games.game import Game, IllegalAction, Outcome
from torchrl_llm.envs.specs import ColumnSpec
from torchrl_llm.errors import ConfigError, DataError

__all__ = ["STATE_KEY", "GameSteps"]

STATE_KEY = "game_state"
_CUT_OFF = "Your answer was cut off."


class _Played(NamedTuple):
    """What became of one row: an outcome with the state as text, or a failure."""

    outcome: Outcome
    action: str = ""
    legal: bool = True
    error: Exception | None = None


class GameSteps(Transform):
    """Plays a game with the answers of the model, one game a row.

    At each step the action is read from the answer of each row that is stepped, the game moves, and
    what the player is then told is appended to the conversation. It writes

    - ``"reward"``, float32 ``[B, 1, 1]``; ``"success"``, bool ``[B, 1, 1]``; ``"reward_valid"``,
      bool ``[B]``; ``("error", "type")`` and ``("error", "message")``, strings;
    - ``"game_state"``, the state after it, as text;
    - ``"game_action"``, the action, empty where there was none, and ``"game_legal"``, bool ``[B]``;
    - ``"done"``, ``"terminated"``, ``"truncated"`` and ``"truncation_reason"`` where a game ends.

    An answer without an action, with one that the rules forbid, or one that was cut at its limit of
    tokens does not move the game: it costs ``invalid_reward``, the model is told what is wrong, and
    the turn counts as any other. A turn that only called tools to think (``("tools",
    "auxiliary")``) is left alone. A game that fails is a row with a NaN reward, an error and
    ``reward_valid=False``, and ends.

    Args:
        game: the rules.
        parser: reads actions.
        invalid_reward: reward of a turn without a legal action.
        stop_on_invalid: let such a turn end the game.
        accept_cut: read answers that were cut at their limit of tokens like others.
        with_reward: write the reward and what goes with it.
        tool_role: role of the messages that answer a tool call.
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
        tool_role: str = "tool",
    ) -> None:
        super().__init__()
        if not abs(invalid_reward) < float("inf"):
            raise ConfigError(f"invalid_reward must be finite, got {invalid_reward}")
        self.game = game
        self.parser = parser
        self.invalid_reward = invalid_reward
        self.stop_on_invalid = stop_on_invalid
        self.accept_cut = accept_cut
        self.with_reward = with_reward
        self.tool_role = tool_role

    # One row

    def _play(self, text: str, message: Mapping[str, Any] | None, cut: bool) -> _Played:
        action = ""
        try:
            state = self.game.load(text)
            try:
                if message is None:
                    raise ActionError("There is no answer.")
                if cut and not self.accept_cut:
                    raise ActionError(_CUT_OFF)
                action = self.game.normalize(self.parser.parse(message))
                outcome = self.game.step(state, action)
            except (ActionError, IllegalAction) as error:
                return _Played(self._invalid(text, str(error)), action, legal=False)
            return _Played(outcome._replace(state=self.game.dump(outcome.state)), action)
        except Exception as error:  # a game that fails is data, whatever it raised
            failed = Outcome(text, "The game has failed.", float("nan"), terminated=True)
            return _Played(failed, action, legal=False, error=error)

    def _invalid(self, state: str, why: str) -> Outcome:
        observation = why if self.stop_on_invalid else f"{why} {self.parser.help}"
        return Outcome(state, observation, self.invalid_reward, terminated=self.stop_on_invalid)

    def _reply(
        self, message: Mapping[str, Any] | None, text: str, answered: bool
    ) -> dict[str, Any]:
        """The message that tells the outcome; a tool's where it answers a call."""
        calls = () if message is None else message.get("tool_calls") or ()
        if self.parser.form != "call" or not calls or answered:
            return {"role": self.parent.user_role, "content": text}
        reply = {"role": self.tool_role, "content": text, "name": self.parser.name}
        identity = calls[-1].get("id")
        return reply if identity is None else {**reply, "tool_call_id": identity}

    # All rows

    def _rows_to_play(self, td: TensorDictBase, next_td: TensorDictBase, size: int) -> list[int]:
        mask = torch.ones(size, dtype=torch.bool)
        stepped, auxiliary = td.get("_step", None), next_td.get(("tools", "auxiliary"), None)
        if stepped is not None:
            mask &= stepped.reshape(size, -1).any(-1).cpu()
        if auxiliary is not None:
            mask &= ~auxiliary.reshape(size, -1).any(-1).cpu()
        return mask.nonzero().flatten().tolist()

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        size = next_tensordict.batch_size.numel()
        states = tensordict.get(STATE_KEY, None)
        if states is None:
            raise DataError(f"the rows lack {STATE_KEY!r}, which the environment's data give them")
        states = states.tolist()
        mode = self.parent.mode
        messages, cut = mode.turns(tensordict), _was_cut(tensordict, size)
        answered = _calls_answered(next_tensordict, size)
        played: list[_Played | None] = [None] * size
        replies: list[list[dict[str, Any]]] = [[] for _ in range(size)]
        for row in self._rows_to_play(tensordict, next_tensordict, size):
            turn = self._play(states[row], messages[row], cut[row])
            played[row] = turn
            replies[row] = [self._reply(messages[row], turn.outcome.observation, answered[row])]
            states[row] = turn.outcome.state
        mode.append(tensordict, next_tensordict, replies)
        next_tensordict.set(STATE_KEY, Column.of(states))
        self._write_turn(next_tensordict, played)
        _write_ends(next_tensordict, played)
        if self.with_reward:
            _write_reward(next_tensordict, played)
        return next_tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        self._write_turn(tensordict_reset, [None] * tensordict_reset.batch_size.numel())
        return tensordict_reset

    @staticmethod
    def _write_turn(td: TensorDictBase, played: Sequence[_Played | None]) -> None:
        td.set("game_action", Column.of("" if turn is None else turn.action for turn in played))
        legal = [turn is None or turn.legal for turn in played]
        td.set("game_legal", torch.tensor(legal, device=td.device))

    # Specs

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds ``game_action`` and ``game_legal``."""
        shape, device = observation_spec.shape, observation_spec.device
        observation_spec["game_action"] = ColumnSpec((*shape, -1), example_data="")
        observation_spec["game_legal"] = Unbounded(shape=shape, dtype=torch.bool, device=device)
        return observation_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Adds the reward's keys."""
        if not self.with_reward:
            return reward_spec
        shape, device = reward_spec.shape, reward_spec.device
        reward_spec["reward"] = Unbounded(shape=(*shape, 1, 1), device=device)
        reward_spec["success"] = Binary(n=1, shape=(*shape, 1, 1), dtype=torch.bool, device=device)
        reward_spec["reward_valid"] = Unbounded(shape=shape, dtype=torch.bool, device=device)
        text = {name: ColumnSpec((*shape, -1), example_data="") for name in ("type", "message")}
        reward_spec["error"] = Composite(text, shape=shape, device=device)
        return reward_spec


def _write_reward(td: TensorDictBase, played: Sequence[_Played | None]) -> None:
    # Rows that are not played keep a neutral reward, as EnvBase gives a row that is not stepped.
    outcomes = [None if turn is None else turn.outcome for turn in played]
    shape = (len(played), 1, 1)
    rewards = [0.0 if outcome is None else outcome.reward for outcome in outcomes]
    td.set("reward", torch.tensor(rewards, device=td.device).view(shape))
    success = [outcome is not None and outcome.success for outcome in outcomes]
    td.set("success", torch.tensor(success, device=td.device).view(shape))
    errors = [None if turn is None else turn.error for turn in played]
    td.set("reward_valid", torch.tensor([e is None for e in errors], device=td.device))
    node = TensorDict(batch_size=td.batch_size, device=td.device)
    node.set("type", Column.of("" if e is None else type(e).__name__ for e in errors))
    node.set("message", Column.of("" if e is None else str(e) for e in errors))
    td.set("error", node)


def _write_ends(td: TensorDictBase, played: Sequence[_Played | None]) -> None:
    def flag(ends: Sequence[bool]) -> Tensor:
        return torch.tensor(ends, device=td.device).unsqueeze(-1)

    terminated = flag([turn is not None and turn.outcome.terminated for turn in played])
    truncated = flag([turn is not None and turn.outcome.truncated for turn in played]) & ~terminated
    ends = {
        "terminated": terminated,
        "truncated": truncated,
        "done": terminated | truncated,
    }
    for name, ended in ends.items():
        before = td.get(name, None)
        td.set(name, ended if before is None else before | ended)
    reason = td.get("truncation_reason")
    fresh = truncated & (reason == TruncationReason.NONE)
    td.set("truncation_reason", reason.masked_fill(fresh, int(TruncationReason.ENV)))


def _calls_answered(td: TensorDictBase, size: int) -> list[bool]:
    """Whether a tool transform in front has answered the calls of this turn."""
    count = td.get(("tools", "num_calls"), None)
    return [False] * size if count is None else (count.reshape(size) > 0).tolist()


def _was_cut(td: TensorDictBase, size: int) -> list[bool]:
    finish = td.get(("tokens", "finish_reason"), None)
    if finish is None:
        return [False] * size
    return (finish.reshape(size) == FinishReason.LENGTH).tolist()
