"""Remote worlds: one session per row, started at reset; all sessions of a batch step at once.

A :class:`Session` is one running world (a connection to a server, a simulator, a container). What
goes wrong in one is an error of its row; the others go on. Its state is over there, so an episode
does not survive a checkpoint: a resumed environment begins new ones.

Next: :mod:`torchrl_llm.envs.libs.openenv` and :mod:`torchrl_llm.envs.libs.mlgym` are two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, SupportsFloat

from tensordict import TensorDictBase

from torchrl_llm._checked import Ge, checked
from torchrl_llm.data.column import Column
from torchrl_llm.data.row_files import MappedRows
from torchrl_llm.envs.actions import ActionError, ActionParser, Parsed
from torchrl_llm.envs.world import ModelTurn, Reaction, WorldEnv, WorldTransform
from torchrl_llm.errors import BackendError, ConfigError, DataError, ResourceError, WorkerError

OPTIONS_KEY = "reset_options"


class Observed(NamedTuple):
    """What a world shows after a reset or a step.

    Attributes:
        text: what the model is told; after a reset it may be the first messages, as dicts.
        reward: of the step.
        terminated: the episode has ended.
        truncated: the episode was cut.
        success: the model has done what is asked for.
    """

    text: str | Sequence[Mapping[str, Any]]
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool = False


class Session(ABC):
    """One running world. Its methods are called by one thread at a time, each with a time limit."""

    @abstractmethod
    def reset(self, options: Mapping[str, Any]) -> Observed:
        """Begin an episode.

        Args:
            options: what the row says, ``{"seed": 3}`` for example.

        Raises:
            ResourceError: there is no room for another session, which is an error of the whole
                environment; anything else is one of the row.
        """

    @abstractmethod
    def step(self, action: Any) -> Observed:
        """Act.

        Args:
            action: what the environment's ``read_action`` made of an answer.

        Raises:
            ActionError: this world does not know the action, and nothing has happened.
        """

    def close(self) -> None:
        """Let go of it; may be called twice."""


class SessionSteps(WorldTransform):
    """Drives one session per row, those of a batch at once.

    Args:
        open_session: makes a session; called where a row has none, or lost it.
        parser: reads actions.
        read_action: message to action, instead of the text that ``parser`` reads; it may raise
            :class:`~torchrl_llm.envs.actions.ActionError`.
        data_key: where the first observation of an episode goes.
        invalid_reward: reward of a turn without an action that the world takes.
        accept_cut: read answers that were cut at their limit of tokens like others.
        max_concurrency: sessions that work at a time.
        with_reward: see :class:`~torchrl_llm.envs.world.WorldTransform`.
    """

    @checked
    def __init__(
        self,
        open_session: Callable[[], Session],
        parser: ActionParser,
        *,
        read_action: Callable[[Mapping[str, Any]], Any] | None = None,
        data_key: str = "query",
        invalid_reward: float = -0.1,
        accept_cut: bool = False,
        max_concurrency: Annotated[int, Ge(1)] = 64,
        with_reward: bool = True,
    ) -> None:
        super().__init__(parser, with_reward=with_reward, accept_cut=accept_cut)
        self.open_session = open_session
        self.read_action = read_action
        self.data_key = data_key
        self.invalid_reward = invalid_reward
        self.max_concurrency = max_concurrency
        self._sessions: dict[int, Session] = {}
        self._lost: dict[int, Exception] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Sessions belong to the process that opened them.
        return {**super().__getstate__(), "_sessions": {}, "_lost": {}}

    def _at_once(self, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        if len(items) < 2:
            return [work(item) for item in items]
        with ThreadPoolExecutor(min(len(items), self.max_concurrency)) as pool:
            return list(pool.map(work, items))

    # Reset

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        if tensordict is None or tensordict.get(OPTIONS_KEY, None) is None:
            raise ConfigError(f"the rows lack {OPTIONS_KEY!r}, which the environment's data give")
        size = tensordict.batch_size.numel()
        mask = tensordict.get("_reset", None)
        begins = [True] * size if mask is None else mask.reshape(size, -1).any(-1).tolist()
        rows = [row for row, begin in enumerate(begins) if begin]
        options = tensordict.get(OPTIONS_KEY).tolist()
        texts = tensordict.get(self.data_key).tolist()
        told = self._at_once(self._begin, [(row, options[row]) for row in rows])
        for row, text in zip(rows, told, strict=True):
            texts[row] = text
        return tensordict.set(self.data_key, Column.of(texts))

    def _begin(self, item: tuple[int, Mapping[str, Any]]) -> str | Sequence[Mapping[str, Any]]:
        row, options = item
        self._lost.pop(row, None)
        try:
            if row not in self._sessions:
                self._sessions[row] = self.open_session()
            return _checked(self._sessions[row].reset(options), begins=True).text
        except ResourceError:
            raise
        except Exception as error:  # a world that does not start is an error of its row
            self._drop(row, error)
            return "There is nothing here."

    def _drop(self, row: int, error: Exception) -> None:
        self._lost[row] = error
        session = self._sessions.pop(row, None)
        if session is not None:
            _close(session)

    # Step

    def react(self, td: TensorDictBase, turns: Sequence[ModelTurn]) -> list[Reaction]:
        """See :meth:`~torchrl_llm.envs.world.WorldTransform.react`."""
        return self._at_once(self._act, turns)

    def _act(self, turn: ModelTurn) -> Reaction:
        session = self._sessions.get(turn.row)
        if session is None:
            lost = self._lost.get(turn.row)
            error = lost or WorkerError("this row has no session: reset it, also after a resume")
            return Reaction(observation="There is nothing here.", error=error)
        try:
            read = self.parser.read if self.read_action is None else self.read_action
            action, for_form = read(self.answer(turn)), 0.0
            if isinstance(action, Parsed):
                action, for_form = action
            seen = _checked(session.step(action))
        except ActionError as error:
            told = f"{error} {self.parser.help}"
            return Reaction(observation=told, reward=self.invalid_reward, for_form=error.reward)
        except Exception as error:  # a world that fails is an error of its row
            self._drop(turn.row, error)
            return Reaction(observation="The world has failed.", error=error)
        text, *rest = seen
        told = dict(zip(Observed._fields[1:], rest, strict=True))
        return Reaction(observation=text, for_form=for_form, **told)

    def close(self) -> None:
        """Close all sessions; a reset opens new ones."""
        for row in list(self._sessions):
            _close(self._sessions.pop(row))
        super().close()


def _checked(seen: Any, *, begins: bool = False) -> Observed:
    """What a world showed, in the types that rows are made of.

    Raises:
        BackendError: it is something else, which would be an error of the whole batch later.
    """
    texts = isinstance(seen, Observed) and (
        isinstance(seen.text, str)
        or (
            begins
            and isinstance(seen.text, Sequence)
            and len(seen.text) > 0
            and all(isinstance(message, Mapping) for message in seen.text)
        )
    )
    if not texts or not isinstance(seen.reward, SupportsFloat):
        wanted = "a text or messages" if begins else "a text"
        raise BackendError(
            f"a session must show an Observed with {wanted} and a number as reward, got "
            f"{seen!r:.200}"
        )
    return seen._replace(reward=float(seen.reward))


def _close(session: Session) -> None:
    try:
        session.close()
    except Exception:  # a session that is broken cannot be closed properly
        return


class SessionEnv(WorldEnv):
    """Conversations with remote worlds, one per row.

    Each row begins an episode with its options: the columns of the row, ``{"seed": 3}`` for one.
    The user's first message is what the world shows, and so is each next one. Three things end an
    episode: the world (``terminated``, or ``truncated`` with the reason ``ENV``), a failure (an
    invalid reward), and ``max_steps`` turns.

    Args:
        open_session: makes a session.
        parser: reads actions.
        read_action: message to action, instead of the text that ``parser`` reads.
        instructions: system prompt before the form of an answer.
        invalid_reward: reward of a turn without an action that the world takes.
        accept_cut: read answers that were cut at their limit of tokens like others.
        max_concurrency: sessions that work at a time.
        dataset: rows of options; seeds if neither this nor ``data_files`` is given, others with
            ``split="test"`` than with ``"train"``.
        data_files: a JSON-lines file of such rows, or several.
        split: ``"train"`` or ``"test"``.
        compute_reward: write the reward.
        system_prompt: instead of ``instructions`` and the form of an answer; empty for none.
        kwargs: ``max_steps`` and ``template_kwargs`` of :class:`~torchrl_llm.envs.world.WorldEnv`,
            and arguments of :class:`~torchrl_llm.envs.DatasetChatEnv`.
    """

    MAX_STEPS: ClassVar[int | None] = 32
    # A reset passes the transforms last to first: the rows are drawn, then the worlds begin.
    WORLD_FIRST = True

    def __init__(
        self,
        open_session: Callable[[], Session],
        parser: ActionParser,
        *,
        read_action: Callable[[Mapping[str, Any]], Any] | None = None,
        instructions: str = "",
        invalid_reward: float = -0.1,
        accept_cut: bool = False,
        max_concurrency: int = 64,
        dataset: Any = None,
        data_files: str | Path | list[str | Path] | None = None,
        split: str | None = None,
        compute_reward: bool = True,
        system_prompt: str | None = None,
        data_key: str = "query",
        **kwargs: Any,
    ) -> None:
        rows = self.read_rows(dataset, data_files, split, columns=())
        if system_prompt is None:
            system_prompt = f"{instructions} {parser.help}".strip()
        steps = SessionSteps(
            open_session,
            parser,
            read_action=read_action,
            data_key=data_key,
            invalid_reward=invalid_reward,
            accept_cut=accept_cut,
            max_concurrency=max_concurrency,
            with_reward=compute_reward,
        )
        super().__init__(
            steps,
            MappedRows(rows, partial(_as_options, data_key)),
            system_prompt=system_prompt or None,
            data_key=data_key,
            **kwargs,
        )


def _as_options(data_key: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    if data_key in row:
        raise DataError(
            f"rows hold the options of a reset, and {data_key!r} is what the world shows; rename it"
        )
    return {data_key: "", OPTIONS_KEY: dict(row)}
