"""Environments from a class with ``reset`` and ``step``: one session per row.

A :class:`Session` is one running world: a few lines of Python, a simulator, a container, a
connection to a server. All sessions of a batch step at once. A failure in one is an error of its
row; the other rows continue. The state is in the session, not in the tensordict, so an episode does
not survive a checkpoint: a resumed run begins new episodes.

Next: :mod:`torchrl_llm.envs.libs.openenv` connects to servers, and
:mod:`torchrl_llm.envs.games.game` has games whose state is in the tensordict.
"""

from __future__ import annotations

import inspect
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
from torchrl_llm.envs.actions import (
    ActionError,
    ActionForm,
    ActionParser,
    Parsed,
    make_action_parser,
)
from torchrl_llm.envs.world import ModelTurn, Reaction, WorldEnv, WorldTransform
from torchrl_llm.errors import BackendError, ConfigError, DataError, ResourceError, WorkerError

OPTIONS_KEY = "reset_options"


class Observed(NamedTuple):
    """Observation of the model after a reset or a step.

    Attributes:
        text: the user's next message; after a reset it may be a list of first messages, as dicts.
        reward: reward of the step, a finite number.
        terminated: the episode has ended.
        truncated: the episode was cut.
        success: the model has solved the task.
    """

    text: str | Sequence[Mapping[str, Any]]
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool = False


class Session(ABC):
    """One running world, with a ``reset`` and a ``step``.

    One thread at a time calls its methods.

    Attributes:
        instructions: the task in a few sentences; the system prompt begins with them.
        action_name: one word for an action, the name of its tag or tool.
        action_help: how the model writes an action, ``"a number from 1 to 9"``.

    Example:
        >>> class Guess(Session):
        ...     instructions = "Guess my number."
        ...     action_help = "a number from 1 to 9"
        ...
        ...     def reset(self, options):
        ...         self.number = options["seed"] % 9 + 1
        ...         return "What is it?"
        ...
        ...     def step(self, action):
        ...         if int(action) == self.number:
        ...             return Observed("Yes.", reward=1.0, terminated=True, success=True)
        ...         return "Higher." if int(action) < self.number else "Lower."
        >>> game = Guess()
        >>> game.reset({"seed": 3}), game.step("7"), game.step("4").reward
        ('What is it?', 'Lower.', 1.0)
        >>> chat = SessionEnv(Guess).reset()["history"].prompt.chats[0]
        >>> print(chat[0]["content"])
        Guess my number. Answer with a number from 1 to 9 and nothing else.
    """

    instructions: ClassVar[str] = ""
    action_name: ClassVar[str] = "action"
    action_help: ClassVar[str] = "your action"

    @abstractmethod
    def reset(self, options: Mapping[str, Any]) -> Observed | str | Sequence[Mapping[str, Any]]:
        """Begin an episode.

        Args:
            options: the row of the data; ``{"seed": 3}`` if the environment has no data.

        Returns:
            The user's first message, or the first messages.

        Raises:
            ResourceError: there is no room for another session. This stops the whole environment;
                any other exception is an error of the row.
        """

    @abstractmethod
    def step(self, action: Any) -> Observed | str:
        """Act.

        Args:
            action: the action that the parser read from the answer, a text; or the result of the
                environment's ``read_action``.

        Returns:
            The user's next message; a plain text has the reward 0 and does not end the episode.

        Raises:
            ActionError: the action is not allowed, and nothing has happened. The model reads the
                message and answers again. Any other exception is an error of the row.
        """

    def close(self) -> None:
        """Release the resources of the session; may be called twice."""


class SessionSteps(WorldTransform):
    """Drives one session per row, all sessions of a batch at once.

    Args:
        open_session: makes a session for a row that has none or has lost it.
        parser: reads actions.
        read_action: function from a message to an action, instead of the text that ``parser``
            reads; it may raise :class:`~torchrl_llm.envs.actions.ActionError`.
        data_key: key of the first observation of an episode.
        invalid_reward: reward of a turn without a valid action.
        accept_cut: also read answers that were cut at their token limit.
        max_concurrency: maximum number of sessions that run at the same time.
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
        _check_opens(open_session)
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
        except Exception as error:  # a session that does not start is an error of its row
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
        except Exception as error:  # a session that fails is an error of its row
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


def _check_opens(open_session: Any) -> None:
    """Reject, before the first row, an ``open_session`` that could not open any session."""
    try:
        if missing := sorted(getattr(open_session, "__abstractmethods__", ())):
            raise TypeError(f"it does not define {' and '.join(missing)}")
        inspect.signature(open_session).bind()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "open_session must be a Session class or a function that makes a session, callable "
            f"without arguments (functools.partial binds some); got {open_session!r}: {error}"
        ) from error


def _checked(seen: Any, *, begins: bool = False) -> Observed:
    """The observation of a session, in the types of the rows.

    Raises:
        BackendError: it has a different type, which would otherwise be an error of the whole batch
            later.
    """
    observed = seen if isinstance(seen, Observed) else Observed(seen)
    text, wanted = observed.text, "a text or messages" if begins else "a text"
    messages = begins and isinstance(text, Sequence) and len(text) > 0
    readable = isinstance(text, str) or (messages and all(isinstance(m, Mapping) for m in text))
    if not readable or not isinstance(observed.reward, SupportsFloat):
        raise BackendError(
            f"{'reset' if begins else 'step'} of a session must return {wanted}, or an Observed "
            f"with {wanted} and a number as reward; got {seen!r:.200}"
        )
    return observed._replace(reward=float(observed.reward))


def _close(session: Session) -> None:
    try:
        session.close()
    except Exception:  # a session that is broken cannot be closed properly
        return


class SessionEnv(WorldEnv):
    """Conversations with sessions, one session per row.

    Each row begins an episode with its options: the columns of the row, for example
    ``{"seed": 3}``. The session writes the user's messages; the model's answers are the actions.
    Three things end an episode: the session (``terminated``, or ``truncated`` with the reason
    ``ENV``), a failure (an invalid reward), and ``max_steps`` turns.

    Args:
        open_session: a :class:`Session` class, or a function that makes a session; ``WORLD`` if
            not given.
        actions: how an answer writes its action: ``"bare"`` (the whole answer), ``"tag"``,
            ``"boxed"``, ``"call"`` (a tool call), or a parser.
        read_action: function from a message to an action, instead of the text that the parser
            reads.
        instructions: first part of the system prompt, before the form of an answer; by default the
            instructions of the class.
        invalid_reward: reward of a turn without a valid action.
        accept_cut: also read answers that were cut at their token limit.
        max_concurrency: most sessions that run at the same time.
        dataset: rows of options. If neither this nor ``data_files`` is given, the rows are seeds,
            which differ between ``split="test"`` and ``"train"``.
        data_files: a JSON-lines file of such rows, or several.
        split: ``"train"`` or ``"test"``.
        compute_reward: write the reward.
        system_prompt: replaces ``instructions`` and the form of an answer; empty for no system
            prompt.
        kwargs: ``max_steps`` and ``template_kwargs`` of :class:`~torchrl_llm.envs.world.WorldEnv`,
            and arguments of :class:`~torchrl_llm.envs.DatasetChatEnv`.

    Raises:
        ConfigError: ``open_session`` cannot be called without arguments, or is an abstract class.
    """

    MAX_STEPS: ClassVar[int | None] = 32
    # A reset runs the transforms from last to first: the rows are drawn, then the sessions begin.
    WORLD_FIRST = True

    def __init__(
        self,
        open_session: Callable[[], Session] | None = None,
        *,
        actions: ActionForm | ActionParser = "bare",
        read_action: Callable[[Mapping[str, Any]], Any] | None = None,
        instructions: str | None = None,
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
        open_session = self.WORLD if open_session is None else open_session
        about = open_session if hasattr(open_session, "action_help") else Session
        parser = make_action_parser(actions, about.action_name, about.action_help)
        rows = self.read_rows(dataset, data_files, split, columns=())
        if system_prompt is None:
            instructions = about.instructions if instructions is None else instructions
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
            f"rows hold the options of a reset, and {data_key!r} is the world's observation; "
            "rename it"
        )
    return {data_key: "", OPTIONS_KEY: dict(row)}
