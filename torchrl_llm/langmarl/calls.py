"""Journal of the model calls of a run: questions, answers and costs; and a budget.

Each call has a key that follows from its purpose (``"3/critic/7#0"``: iteration 3, the critic,
episode 7, its first call). A restarted run reads the answers from its journal and does not request
them a second time. :func:`scope` gives calls their role and key; code that uses
:class:`~torchrl_llm.langmarl.LLMClient` does not depend on it.

The file has two JSON lines per call: one at its start, one with its answer. So a call that was in
flight when the process was killed is also counted. ``spent.json`` next to it contains the totals,
so that a budget holds even if lines of the journal are lost.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

from torchrl_llm._checked import Ge, checked
from torchrl_llm._files import plain_file
from torchrl_llm._log import tell_once
from torchrl_llm.errors import CheckpointError, ConfigError, DamagedCheckpointError, TorchRLLLMError
from torchrl_llm.langmarl.local_store import parsed, read_file, sealed, whole_lines
from torchrl_llm.modules.policies.policy_router import derived_seed
from torchrl_llm.rewards.text_models import Messages, TextAnswer, TextModel, Usage

_ASKED = {"key", "role", "model"}
_ANSWER = {"digest", "text", "finish_reason", "cost_usd", *Usage._fields}
# Fields of a line, by event.
_NEEDED = {"begun": _ASKED, "failed": _ASKED, "answered": _ASKED | _ANSWER}


class BudgetUsedUp(TorchRLLLMError, RuntimeError):
    """A run may make no further calls; its results are saved."""


FATAL = (BudgetUsedUp, CheckpointError, ConfigError)
"""Errors that end a run: no budget, no disk space, wrong settings. Others only fail a call."""


@checked
@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of calls, tokens and money over all runs of a folder; ``None`` means no limit.

    Calls are counted before they are made. Tokens and money are known afterwards, so calls in
    flight may exceed their limits.

    Args:
        max_calls: started calls.
        max_total_tokens: input and output tokens.
        max_cost_usd: US dollars.

    Raises:
        ConfigError: a limit below zero.
    """

    max_calls: Annotated[int, Ge(0)] | None = None
    max_total_tokens: Annotated[int, Ge(0)] | None = None
    max_cost_usd: Annotated[float, Ge(0)] | None = None

    def check(self, spent: Spent) -> None:
        """Raise :class:`BudgetUsedUp` if a limit is reached."""
        for name, value in (
            ("max_calls", spent.calls),
            ("max_total_tokens", spent.input_tokens + spent.output_tokens),
            ("max_cost_usd", spent.cost_usd),
        ):
            limit = getattr(self, name)
            if limit is not None and value >= limit:
                raise BudgetUsedUp(f"the budget is used up: {name}={limit:g}, spent {value:g}")


class Prices(NamedTuple):
    """US dollars per million tokens; ``None`` if unknown.

    Attributes:
        input_usd: price of input tokens.
        output_usd: price of output tokens.
    """

    input_usd: float | None = None
    output_usd: float | None = None

    @property
    def known(self) -> bool:
        """Whether both prices are known."""
        return self.input_usd is not None and self.output_usd is not None

    def costs(self, name: str, input_tokens: int, output_tokens: int) -> tuple[float, float]:
        """Total cost in US dollars; unknown prices count as 0, with one warning.

        Args:
            name: name of the model.
            input_tokens: tokens of conversations.
            output_tokens: tokens of answers.
        """
        if not self.known and (input_tokens or output_tokens):
            tell_once(f"nobody has said what tokens of {name!r} cost: they count as 0 USD")
        return (
            input_tokens * (self.input_usd or 0.0) / 1e6,
            output_tokens * (self.output_usd or 0.0) / 1e6,
        )


@dataclass
class Spent:
    """Cost of calls.

    Attributes:
        calls: started calls.
        failed: calls that ended with an error.
        lost: calls that started and neither succeeded nor failed, because the process was killed.
        input_tokens: tokens of conversations.
        output_tokens: tokens of answers.
        cost_usd: cost in US dollars.
        seconds: time of waiting for answers.
        retries: number of repeated requests.
        estimated: answers whose token counts are estimates.
    """

    calls: int = 0
    failed: int = 0
    lost: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0
    seconds: float = 0.0
    retries: int = 0
    estimated: int = 0

    def add(self, other: Spent) -> None:
        """Add other costs."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    @classmethod
    def sum_of(cls, several: Iterable[Spent]) -> Spent:
        """The sum of several costs."""
        total = cls()
        for each in several:
            total.add(each)
        return total

    def at_least(self, other: Spent) -> Spent:
        """Elementwise maximum."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return Spent(**{name: max(pair) for name, pair in pairs.items()})


@dataclass(frozen=True)
class Asked:
    """A model with its token prices.

    Attributes:
        model: the model.
        name: its name in the journal.
        prices: its token prices.
        key_variable: environment variable of its API key, for messages.
    """

    model: TextModel
    name: str
    prices: Prices = Prices(None, None)  # noqa: RUF009 (it cannot be changed)
    key_variable: str = ""


class CallLog:
    """Journal of the calls of a run, a JSON-lines file.

    Args:
        path: the file; an existing one is read. ``None`` keeps everything in memory.
        budget: limits of the calls.
        before: cost of other runs of the folder, for the budget.
        seed: base of the seeds of models that sample in this process.

    Raises:
        CheckpointError: a line of the file, except the last, cannot be read.

    Example:
        >>> from torchrl_llm.rewards import ScriptedTextModel
        >>> log = CallLog()
        >>> echo = Asked(ScriptedTextModel(lambda messages: messages[-1]["content"]), "echo")
        >>> question = ({"role": "user", "content": "Hello"},)
        >>> with scope(log, "actor", "0/actor/0"):
        ...     ask(echo, question).text
        'Hello'
        >>> [(role, model, spent.calls) for (role, model), spent in log.account().items()]
        [('actor', 'echo', 1)]
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        budget: Budget | None = None,
        before: Spent | None = None,
        seed: int = 0,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.budget, self.before, self.seed = budget or Budget(), before or Spent(), seed
        self.num_reused = 0
        self._lock = threading.Lock()
        self._account: dict[tuple[str, str], Spent] = {}
        self._written: dict[tuple[str, str], Spent] = {}
        self._known: dict[str, dict[str, Any]] = {}
        self._file: IO[bytes] | None = None
        self._sums: IO[bytes] | None = None
        self._sums_size = 0
        if self.path is not None:
            self._read()

    # -- the file ---------------------------------------------------------------------------------

    def reload(self) -> None:
        """Read the file again, once no other process writes to it.

        Raises:
            CheckpointError: as in the constructor.
        """
        self.close()
        self._account, self._known = {}, {}
        if self.path is not None:
            self._read()

    def _read(self) -> None:
        self._account, self._known = _read_account(self.path)
        self._written = {key: replace(spent) for key, spent in self._account.items()}

    def _write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append lines in one write, so that answers of one batch stay together."""
        if self.path is None or not records:
            return
        data = b"".join(json.dumps(sealed(record)).encode() + b"\n" for record in records)
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("a+b", buffering=0)
                whole_lines(self._file)
            while data:
                data = data[os.write(self._file.fileno(), data) :]
            for record in records:
                _of(self._written, record).add(_spent(record))
            self._write_sums()
        except OSError as error:
            self.close()
            raise CheckpointError(f"{self.path} cannot be written: {error.strerror}") from error

    def _write_sums(self) -> None:
        """Overwrite ``spent.json`` in one operation; spaces pad a shorter text."""
        if self._sums is None:
            place = plain_file(_sums_path(self.path))
            handle = os.open(place, os.O_RDWR | os.O_CREAT, 0o666)
            self._sums = os.fdopen(handle, "r+b", buffering=0)
            self._sums_size = os.fstat(handle).st_size
        sums = [[*key, vars(spent)] for key, spent in self._written.items()]
        data = json.dumps(sealed({"spent": sums})).encode().ljust(self._sums_size - 1) + b"\n"
        self._sums_size = len(data)
        if os.pwrite(self._sums.fileno(), data, 0) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the files."""
        for file in (self._file, self._sums):
            if file is not None:
                file.close()
        self._file = self._sums = None

    # -- costs ------------------------------------------------------------------------------------

    def account(self) -> dict[tuple[str, str], Spent]:
        """Costs by role and model."""
        with self._lock:
            return {key: self._account[key] for key in sorted(self._account)}

    def total(self) -> Spent:
        """Total cost of this run."""
        return Spent.sum_of(self.account().values())

    def spent_for(self, prefix: str) -> Spent:
        """Cost of the answers whose keys have a prefix.

        Args:
            prefix: prefix of the keys.
        """
        with self._lock:
            found = [record for key, record in self._known.items() if key.startswith(prefix)]
        return Spent.sum_of(map(_spent, found))

    # -- asking -----------------------------------------------------------------------------------

    def ask(
        self,
        asked: Asked,
        role: str,
        keys: Sequence[str],
        conversations: Sequence[Messages],
        *,
        max_tokens: int | None = None,
    ) -> list[TextAnswer | Exception]:
        """Get answers to conversations from the journal or from the model.

        Args:
            asked: the model.
            role: role of the calls: ``actor``, ``critic``, ``optimizer``, ``judge``.
            keys: distinct keys of the calls.
            conversations: the inputs.
            max_tokens: most tokens of an answer.

        Returns:
            An answer or an exception for each conversation; failures are not reused.

        Raises:
            BudgetUsedUp: the budget is used up; answers received before are in the journal.
            ConfigError: the server denies access or does not have the model, so every call would
                fail.
        """
        digests = [_digest(asked.name, max_tokens, messages) for messages in conversations]
        found = [self._reuse(*pair) for pair in zip(keys, digests, strict=True)]
        open_ = [place for place, each in enumerate(found) if each is None]
        while open_:
            part = self._admit(asked, role, open_)
            calls = _Calls(self, asked, role, [(keys[i], digests[i]) for i in part])
            answers = asked.model.answer(
                [conversations[i] for i in part],
                max_tokens=max_tokens,
                seed=derived_seed(self.seed, keys[part[0]]),
                on_call=calls.told,
            )
            calls.finish(answers)
            _raise_settings(asked, answers)
            for place, answer in zip(part, answers, strict=True):
                found[place] = answer
            open_ = open_[len(part) :]
        return found

    def _reuse(self, key: str, digest: str) -> TextAnswer | None:
        with self._lock:
            record = self._known.get(key)
            if record is None or record["digest"] != digest:
                return None
            self.num_reused += 1
        names = ("input_tokens", "output_tokens", "seconds", "model", "num_retries", "estimated")
        usage = Usage(*(record[name] for name in names))
        return TextAnswer(record["text"], usage, record["finish_reason"])

    def _admit(self, asked: Asked, role: str, places: Sequence[int]) -> list[int]:
        """Count the calls that may be made together, and return them."""
        with self._lock:
            spent = Spent.sum_of((self.before, *self._account.values()))
            self.budget.check(spent)
            most = len(places)
            if self.budget.max_calls is not None:
                most = min(most, self.budget.max_calls - spent.calls)
            if self.budget.max_total_tokens is not None or self.budget.max_cost_usd is not None:
                most = min(most, max(asked.model.concurrency, 1))
            _of(self._account, {"role": role, "model": asked.name}).calls += most
        return list(places[:most])

    def _keep(self, records: Sequence[dict[str, Any]]) -> None:
        with self._lock:
            self._write(records)
            for record in records:
                if record["event"] != "begun":  # calls were counted when they were admitted
                    _of(self._account, record).add(_spent(record))
                if record["event"] == "answered":
                    self._known[record["key"]] = record


class _Calls:
    """Calls in flight: each answer is written once, when it arrives."""

    def __init__(
        self, log: CallLog, asked: Asked, role: str, keys: Sequence[tuple[str, str]]
    ) -> None:
        self._log, self._asked, self._role, self._keys = log, asked, role, keys
        self._begun: set[int] = set()
        self._written: set[int] = set()
        self._error: CheckpointError | None = None

    def told(self, place: int, answer: TextAnswer | Exception | None) -> None:
        try:
            self._log._keep(self._records(place, answer))
        except CheckpointError as error:  # raised at the end, so that other calls can still report
            self._error = error
        if answer is not None:
            self._written.add(place)

    def _records(self, place: int, answer: TextAnswer | Exception | None) -> list[dict[str, Any]]:
        """Records of a call's start, unless already written, and of its answer, if any."""
        begun = [] if place in self._begun else [{"event": "begun", **self._facts(place)}]
        self._begun.add(place)
        return begun if answer is None else [*begun, self._record(place, answer)]

    def _facts(self, place: int) -> dict[str, Any]:
        key, digest = self._keys[place]
        return {"key": key, "digest": digest, "role": self._role, "model": self._asked.name}

    def finish(self, answers: Sequence[TextAnswer | Exception]) -> None:
        if self._error is not None:
            raise self._error
        self._log._keep(
            [
                record
                for place, answer in enumerate(answers)
                if place not in self._written
                for record in self._records(place, answer)
            ]
        )

    def _record(self, place: int, answer: TextAnswer | Exception) -> dict[str, Any]:
        record = self._facts(place)
        if isinstance(answer, Exception):
            return {"event": "failed", **record, "error": f"{type(answer).__name__}: {answer}"}
        usage, asked = answer.usage, self._asked
        cost = sum(asked.prices.costs(asked.name, usage.input_tokens, usage.output_tokens))
        facts = {**usage._asdict(), "model": asked.name, "cost_usd": cost}
        reason = {"finish_reason": answer.finish_reason}
        return {"event": "answered", **record, "text": answer.text, **facts, **reason}


def _raise_settings(asked: Asked, answers: Sequence[TextAnswer | Exception]) -> None:
    """Raise errors that concern all calls, not a single one."""
    for answer in answers:
        if isinstance(answer, ConfigError):
            key = f" (the key is that of {asked.key_variable})" if asked.key_variable else ""
            raise ConfigError(f"{asked.name!r}: {answer}{key}") from answer


def _of(account: dict[tuple[str, str], Spent], record: Mapping[str, Any]) -> Spent:
    return account.setdefault((record["role"], record["model"]), Spent())


def _spent(record: Mapping[str, Any]) -> Spent:
    if record["event"] == "begun":
        return Spent(calls=1)
    if record["event"] == "failed":
        return Spent(failed=1)
    return Spent(
        input_tokens=record["input_tokens"],
        output_tokens=record["output_tokens"],
        cost_usd=record["cost_usd"],
        seconds=record["seconds"],
        retries=record["num_retries"],
        estimated=int(record["estimated"]),
    )


def _digest(name: str, max_tokens: int | None, messages: Messages) -> str:
    said = [[message["role"], message["content"]] for message in messages]
    text = json.dumps([name, max_tokens, said])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a journal.

    Raises:
        CheckpointError: a line cannot be read and is not the unfinished last line of a killed
            process.
    """
    if not path.exists():
        return
    try:
        opened = plain_file(path).open("rb")
    except OSError as error:
        raise DamagedCheckpointError(
            f"{path} cannot be read: {error.strerror}; remove it; the costs are in "
            f"{_sums_path(path).name}"
        ) from None
    with opened as file:
        for number, line in enumerate(file, 1):
            try:
                record = parsed(line.decode(), f"line {number}")
                ok = record.keys() >= _NEEDED[record["event"]]
            except (DamagedCheckpointError, ValueError, AttributeError, KeyError, TypeError):
                ok = False
            if ok and line.endswith(b"\n"):
                yield record
            elif line.endswith(b"\n"):
                raise DamagedCheckpointError(f"{path}, line {number} is damaged; remove the line")


def _read_account(path: Path) -> tuple[dict[tuple[str, str], Spent], dict[str, dict[str, Any]]]:
    """Costs of the calls of a journal by role and model, and answers by key.

    Each value is at least the value in ``spent.json``, so truncated or removed lines still count.

    Raises:
        CheckpointError: as in :func:`_records`, or ``spent.json`` is damaged.
    """
    account: dict[tuple[str, str], Spent] = {}
    begun: dict[str, Any] = {}
    known: dict[str, dict[str, Any]] = {}
    for record in _records(path):
        _of(account, record).add(_spent(record))
        if record["event"] != "begun":
            begun.pop(record["key"], None)
        elif record["key"] in begun:
            _of(account, record).lost += 1
        if record["event"] == "begun":
            begun[record["key"]] = record
        if record["event"] == "answered":
            known[record["key"]] = record
    for record in begun.values():
        _of(account, record).lost += 1
    for key, paid in _read_sums(path).items():
        spent = account.get(key, Spent())
        account[key] = spent.at_least(paid)
        if spent.calls < paid.calls:
            tell_once(
                f"{path} lacks {paid.calls - spent.calls} calls of {' '.join(key)} that were made: "
                "they count for the budget, and are asked again where they are needed"
            )
    return account, known


def _read_sums(path: Path) -> dict[tuple[str, str], Spent]:
    place = _sums_path(path)
    if not place.exists():
        return {}
    value = parsed(read_file(place), str(place))
    try:
        return {(role, model): Spent(**figures) for role, model, figures in value["spent"]}
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(
            f"{place} is damaged: {error}; remove it to count what is in {path.name}"
        ) from None


def _sums_path(path: Path) -> Path:
    return path.with_name("spent.json")


def spent_in(folder: str | os.PathLike[str], *, but: str | None = None) -> Spent:
    """Cost of the runs of a folder so far.

    Args:
        folder: ``experiment_dir``, with ``runs/<run>/calls.jsonl``.
        but: name of a run that is excluded.

    Raises:
        CheckpointError: a journal cannot be read.
    """
    runs = [run for run in sorted(Path(folder).glob("runs/*")) if run.name != but]
    accounts = [_read_account(run / "calls.jsonl")[0] for run in runs]
    return Spent.sum_of(spent for account in accounts for spent in account.values())


# -- scopes of calls ------------------------------------------------------------------------------


class _Scope:
    def __init__(self, log: CallLog, role: str, key: str) -> None:
        self.log, self.role, self.key, self.count = log, role, key, 0
        self._lock = threading.Lock()
        self._seen: dict[str, int] = {}

    def next_key(self) -> str:
        """Key of the next call of the thread of the scope."""
        with self._lock:
            self.count += 1
            return f"{self.key}#{self.count - 1}"

    def key_of(self, digest: str) -> str:
        """Key of a call of a different thread: from its input, as thread order varies."""
        with self._lock:
            self._seen[digest] = number = self._seen.get(digest, 0) + 1
            return f"{self.key}#{digest}.{number}"


_SCOPE: ContextVar[_Scope | None] = ContextVar("torchrl_llm_calls", default=None)


@contextmanager
def scope(log: CallLog, role: str, key: str) -> Iterator[None]:
    """Record the calls of this thread under a role, in a journal.

    Args:
        log: journal of the calls.
        role: ``actor``, ``critic``, ``optimizer`` or ``judge``, or a different word.
        key: purpose of the calls; each call appends its number.
    """
    token = _SCOPE.set(_Scope(log, role, key))
    try:
        yield
    finally:
        _SCOPE.reset(token)


def current() -> tuple[CallLog, str]:
    """Journal and key of the caller's scope; a new journal if there is no scope."""
    here = _SCOPE.get()
    return (CallLog(), "0") if here is None else (here.log, here.key)


def here() -> _Scope | None:
    """The caller's scope."""
    return _SCOPE.get()


def ask(
    asked: Asked, messages: Messages, *, max_tokens: int | None = None, place: _Scope | None = None
) -> TextAnswer:
    """Get one answer, through the journal if the caller is in a :func:`scope`.

    Args:
        asked: the model.
        messages: the conversation.
        max_tokens: most tokens of the answer.
        place: scope to use if the caller has none, for example in a separate thread.

    Raises:
        Exception: the error of the model.
        BudgetUsedUp: the budget is used up.
    """
    scope_, key = _SCOPE.get(), ""
    if scope_ is not None:
        key = scope_.next_key()
    elif place is not None:
        scope_, key = place, place.key_of(_digest(asked.name, max_tokens, messages))
    if scope_ is None:
        [answer] = asked.model.answer([messages], max_tokens=max_tokens)
        _raise_settings(asked, [answer])
    else:
        [answer] = scope_.log.ask(asked, scope_.role, [key], [messages], max_tokens=max_tokens)
    if isinstance(answer, Exception):
        raise answer
    return answer
