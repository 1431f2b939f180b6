"""Games as environments of conversations: :class:`GameEnv`, and the transform that plays.

A game is a :class:`~torchrl_llm.envs.games.game.Game`; what an answer of the model does in it is
the work of :class:`GameSteps`, which keeps nothing itself: the state of every row is in the
tensordict, as text. A new game is a file with its rules and a subclass of :class:`GameEnv` that
names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded

from torchrl_llm.data.column import Column
from torchrl_llm.data.row_files import MappedRows
from torchrl_llm.data.specs import ColumnSpec
from torchrl_llm.envs.actions import (
    ActionError,
    ActionForm,
    ActionParser,
    make_action_parser,
)
from torchrl_llm.envs.games.game import Game, IllegalAction, Player, play
from torchrl_llm.envs.world import ModelTurn, Reaction, WorldEnv, WorldTransform
from torchrl_llm.errors import ConfigError, DataError

STATE_KEY = "game_state"


@dataclass(frozen=True, kw_only=True)
class Played(Reaction):
    """A reaction with the state after it, as text.

    Args:
        state: the state.
        action: what was done, empty for nothing.
        legal: the rules allow it.
        committed: an action that waits for those of others.
    """

    state: str
    action: str = ""
    legal: bool = True
    committed: str = ""


class GameSteps(WorldTransform):
    """Plays a game with the answers of the model, one game per row.

    In addition to what every :class:`~torchrl_llm.envs.world.WorldTransform` writes:

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
        super().__init__(parser, with_reward=with_reward, accept_cut=accept_cut)
        if not abs(invalid_reward) < float("inf"):
            raise ConfigError(f"invalid_reward must be finite, got {invalid_reward}")
        self.game = game
        self.invalid_reward = invalid_reward
        self.stop_on_invalid = stop_on_invalid

    def react(self, td: TensorDictBase, turns: Sequence[ModelTurn]) -> list[Played]:
        """See :meth:`~torchrl_llm.envs.world.WorldTransform.react`."""
        states = td.get(STATE_KEY, None)
        if states is None:
            raise DataError(f"the rows lack {STATE_KEY!r}, which the environment's data give them")
        texts = states.tolist()
        return [self._play(texts[turn.row], turn) for turn in turns]

    def _play(self, text: str, turn: ModelTurn) -> Played:
        action, for_form = "", 0.0
        try:
            state = self.game.load(text)
            try:
                action, for_form = self.parser.read(self.answer(turn))
                action = self.game.normalize(action)
                outcome = self.game.step(state, action)
            except ActionError as error:
                return self._invalid(text, action, str(error), error.reward)
            except IllegalAction as error:
                return self._invalid(text, action, str(error), for_form)
            told = {**outcome._asdict(), "state": self.game.dump(outcome.state)}
            return Played(**told, action=action, for_form=for_form)
        except Exception as error:  # a game that fails is data, whatever it raised
            told = "The game has failed."
            return Played(observation=told, error=error, state=text, action=action, legal=False)

    def _invalid(self, state: str, action: str, why: str, for_form: float) -> Played:
        return Played(
            observation=why if self.stop_on_invalid else f"{why} {self.parser.help}",
            reward=self.invalid_reward,
            for_form=for_form,
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
        reactions: Sequence[Reaction | None],
    ) -> None:
        """See :meth:`~torchrl_llm.envs.world.WorldTransform.write`."""
        states = td.get(STATE_KEY).tolist()
        actions, legal = [""] * len(states), [True] * len(states)
        for row, played in enumerate(reactions):
            if isinstance(played, Played):
                states[row], actions[row], legal[row] = played.state, played.action, played.legal
        next_td.set(STATE_KEY, Column.of(states))
        write_turn(next_td, actions, legal)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        size = tensordict_reset.batch_size.numel()
        write_turn(tensordict_reset, [""] * size, [True] * size)
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds ``game_action`` and ``game_legal``."""
        return add_turn_specs(observation_spec)


def add_turn_specs(spec: Composite) -> Composite:
    """Add the specs of what :func:`write_turn` writes.

    Args:
        spec: of the observations of ``B`` rows.
    """
    spec["game_action"] = ColumnSpec((*spec.shape, -1), example_data="")
    spec["game_legal"] = Unbounded(shape=spec.shape, dtype=torch.bool, device=spec.device)
    return spec


def write_turn(td: TensorDictBase, actions: Sequence[str], legal: Sequence[bool]) -> None:
    """Write what was done in a step.

    Args:
        td: ``B`` rows.
        actions: of each row, empty for none.
        legal: whether the rules allow it.
    """
    td.set("game_action", Column.of(actions))
    td.set("game_legal", torch.tensor(legal, device=td.device))


class GameEnv(WorldEnv):
    """A game that language models play, one game per row.

    Each row is a seed: it starts a game, whose first observation is the user's message after a
    system prompt with the rules and the form of an answer. From then on the model answers with an
    action, and is told what came of it, until the game ends; see :class:`GameSteps` for what is
    written. All repeats of a row play
    the same game, opponents included as long as the model does the same.

    Three things end an episode: the rules (``terminated``), a limit of the game itself
    (``truncated`` with the reason ``ENV``), and ``max_steps`` turns (reason ``MAX_STEPS``). A turn
    without a legal action is one of these turns, though the game does not move.

    Args:
        game: the rules.
        actions: how an answer says its action: ``"tag"`` (``<move>5</move>``), ``"call"`` (a tool
            call), ``"bare"`` (the whole answer), ``"boxed"``, or a parser of your own or a
            :class:`~torchrl_llm.envs.actions.ParserChain`, whose rewards are added to the game's.
        invalid_reward: reward of a turn without a legal action; the game's own if not given, which
            is as bad as the worst end where such a turn ends the game.
        stop_on_invalid: let such a turn end the game.
        accept_cut: read answers that were cut at their limit of tokens like others.
        dataset: rows with a ``seed``; 65,536 games to train on, or with ``split="test"`` 1,024
            others, if neither this nor ``data_files`` is given.
        data_files: a JSON-lines file of such rows, or several.
        split: ``"train"`` or ``"test"``.
        compute_reward: write the reward.
        system_prompt: instead of the rules and the form of an answer.
        kwargs: ``max_steps`` and ``template_kwargs`` of :class:`~torchrl_llm.envs.world.WorldEnv`,
            and arguments of :class:`~torchrl_llm.envs.DatasetChatEnv`. With ``actions="call"`` in
            history mode give ``env.tool_schemas`` to the policy's wrapper as ``tools``.

    Raises:
        ConfigError: for impossible arguments.
        DataError: for a row without a whole number as ``seed``.

    Example:
        >>> from torchrl_llm.data.history import History
        >>> from torchrl_llm.envs.games import TicTacToe
        >>> env = GameEnv(TicTacToe(player="X"), num_envs=1, shuffle=False)
        >>> td = env.reset()
        >>> chat = td["history"].prompt.chats[0]
        >>> answer = {"role": "assistant", "content": "<move>5</move>"}
        >>> td["history"].full = History.of([chat + [answer]])
        >>> td = env.step(td)["next"]
        >>> print(td["history"].prompt.chats[0][-1]["content"])
        O takes 8.
        1 2 3
        4 X 6
        7 O 9
        You are X. Your move.
    """

    MAX_STEPS: ClassVar[int | None] = 64

    def __init__(
        self,
        game: Game,
        *,
        actions: ActionForm | ActionParser = "tag",
        invalid_reward: float | None = None,
        stop_on_invalid: bool = False,
        accept_cut: bool = False,
        dataset: Any = None,
        data_files: str | Path | list[str | Path] | None = None,
        split: str | None = None,
        compute_reward: bool = True,
        system_prompt: str | None = None,
        **kwargs: Any,
    ) -> None:
        parser = make_action_parser(actions, game.action_name, game.action_help)
        if invalid_reward is None:
            invalid_reward = game.forfeit_reward if stop_on_invalid else game.invalid_reward
        rows = self.read_rows(dataset, data_files, split, columns=("seed",))
        if system_prompt is None:
            system_prompt = f"{game.rules} {parser.help}"
        steps = GameSteps(
            game,
            parser,
            invalid_reward=invalid_reward,
            stop_on_invalid=stop_on_invalid,
            accept_cut=accept_cut,
            with_reward=compute_reward,
        )
        rows = MappedRows(rows, partial(_first_turn, game))
        super().__init__(steps, rows, system_prompt=system_prompt, **kwargs)

    @property
    def steps(self) -> GameSteps:
        """The transform that plays."""
        return next(t for t in self.transform if isinstance(t, GameSteps))

    @property
    def game(self) -> Game:
        """The rules."""
        return self.steps.game

    def demonstrate(self, player: Player, seed: int) -> list[dict[str, Any]]:
        """A game that someone plays, as the conversation of a model that plays it like that.

        What it returns, for many seeds, is data to imitate: the messages are those that the
        environment writes in history mode, answers in the form that it asks for.

        Args:
            player: chooses the actions, all of them legal.
            seed: of the game.

        Returns:
            The messages, from the system prompt to the last action.

        Example:
            >>> from torchrl_llm.envs.games import TicTacToe, expert
            >>> env = GameEnv(TicTacToe(player="X"), num_envs=1, system_prompt="Play.")
            >>> chat = env.demonstrate(expert(0), seed=1)
            >>> [message["role"] for message in chat[:3]], chat[2]["content"]
            (['system', 'user', 'assistant'], '<move>7</move>')
        """
        parser, system = self.steps.parser, self.base_env.system_prompt
        chat = [] if system is None else [{"role": "system", "content": system}]
        told = {"role": self.base_env.user_role}
        for turn in play(self.game, player, seed):
            answer = parser.message(turn.action)
            chat += [{**told, "content": turn.observation}, answer]
            reply = self.steps.reply(ModelTurn(0, answer, False, False), "")
            told = {name: value for name, value in reply.items() if name != "content"}
        return chat


def seed_of(row: Mapping[str, Any]) -> int:
    """The seed of a game, as a drawn row has it.

    Args:
        row: with ``"seed"``.

    Raises:
        DataError: it is no whole number.
    """
    seed = row["seed"]
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise DataError(f"a game needs a whole number as 'seed', got {seed!r}")
    return seed


def _first_turn(game: Game, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a game begins with: the message of the user, and the state as text."""
    state = game.reset(seed_of(row))
    return {**row, "query": game.observe(state), STATE_KEY: game.dump(state)}
