"""Base class of rewards as transforms: a subclass defines only :meth:`RewardParser.score`.

``score`` gets one response and one answer, without the prompt, so an example in the system prompt
cannot be mistaken for the response. If ``score`` fails, the row gets a NaN reward and
``reward_valid`` false. Advantage estimators exclude the row and never count it as zero.

Next: :mod:`torchrl_llm.rewards.answer_block` has rewards for tasks with an answer block;
:mod:`torchrl_llm.rewards.composite_reward` adds several rewards.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import Transform

from torchrl_llm.data.column import Column
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.failures import ERROR_KEYS, NO_FAILURE, Failure, tell_failures
from torchrl_llm.data.input_modes import InputMode, response_reader
from torchrl_llm.data.ragged import lazy_rows, read_rows
from torchrl_llm.data.specs import ColumnSpec
from torchrl_llm.data.table_cells import plain_cell
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.rewards.reward_components import Component
from torchrl_llm.rewards.reward_runner import Outcome, check_limits
from torchrl_llm.rewards.reward_scorer import RewardScore, Sample

_AUXILIARY_KEY = ("tools", "auxiliary")
_INPUT_MODES = ("history", "text", "tokens")
_CELLS = ("reward", "reward_answer", "reward_think", "reward_right", "success")
_ROW_KEYS = ("reward_valid", "reward_seconds", "error")


def extract_block(text: str, tag: str) -> str | None:
    """Return the contents of the last complete ``<tag>...</tag>`` block, stripped.

    Args:
        text: any text; the run time is linear in its length.
        tag: name of the tag.

    Returns:
        The contents; ``None`` if no block is complete.

    Example:
        >>> extract_block("<answer>1</answer> no: <answer> 2 </answer>", "answer")
        '2'
    """
    end = text.rfind(f"</{tag}>")
    start = -1 if end < 0 else text.rfind(f"<{tag}>", 0, end)
    return None if start < 0 else text[start + len(tag) + 2 : end].strip()


def extract_tags(response: str) -> tuple[str | None, str | None]:
    """Extract the reasoning and the answer of a response.

    An answer inside the reasoning does not count: the search starts after ``</think>``.

    Returns:
        The contents of the last ``<think>`` block and of the last ``<answer>`` block, each ``None``
        if missing. If a response begins inside the reasoning (the prompt contains the opening tag),
        everything before the first ``</think>`` is reasoning.

    Example:
        >>> extract_tags("<think>2+2</think><answer>4</answer>")
        ('2+2', '4')
    """
    before, closed, after = response.rpartition("</think>")
    if not closed:
        return None, extract_block(response, "answer")
    opened = before.rpartition("<think>")
    return opened[2].strip(), extract_block(after, "answer")


class RewardParser(Transform):
    """Base class of rewards: a subclass defines only ``score``.

    At each step, the transform scores the responses of all stepped rows and writes these keys:

    - ``reward``, ``reward_answer``, ``reward_think``, ``reward_right``: float32 ``[B, 1, 1]``; the
      last three are 1.0 or 0.0: whether the response has an answer block, has a reasoning block,
      and is correct (with an :class:`~torchrl_llm.rewards.AnswerBlockParser`, ``reward_right`` is
      the reward of the answer);
    - ``success``: bool ``[B, 1, 1]``; ``reward_valid``: bool ``[B]``; ``reward_seconds``: float32
      ``[B]``, wall-clock time of the score;
    - ``("error", "type")``, ``("error", "message")``, ``("error", "place")`` (file, line and
      function), ``("error", "source")`` (the failed part) and ``("error", "traceback")``: strings,
      empty without an error.

    Rows that are not stepped, and turns that only called tools (``("tools", "auxiliary")``), are
    not scored: their reward is 0.0 and valid, and the episode continues. Turns that an earlier gate
    rejected (``"reward_refused"``) are not scored either and keep the values of the gate.

    Rewards add up, as in TorchRL. A row may already have a reward of this step, from a different
    parser or from the environment. Then floats and seconds are added, success is true if either is
    true, and the row is valid only if both are valid. A
    :class:`~torchrl_llm.rewards.CompositeReward` adds weights and records the value of each
    component.

    If ``score`` raises, or does not return one finite number, the row gets NaN in every float key,
    ``reward_valid=False`` and the error; other rows are not affected. The log shows the first error
    of each kind with its traceback and row.

    Args:
        tokenizer: tokenizer that decodes responses in tokens mode, if no environment decodes them.
        in_keys: the key of the completion, whose first part names the input mode, and the key of
            the answer; ``[(input_mode, "full"), "answer"]`` by default.
        out_keys: new names for ``reward_answer, reward_think, reward_right, reward, success``, in
            this order.
        eos_token: token that is removed from the end of a response before it is scored; by default
            the token of ``tokenizer`` or of the environment's tokenizer.
        set_done_if_answer: end the episode (``done`` and ``terminated``) of rows whose response
            contains an answer block.
        input_mode: ``"history"``, ``"text"`` or ``"tokens"``; by default the environment's.
        num_threads: number of threads for scoring; useful for scores that wait (a judge, a
            sandbox).
        timeout: time limit per row in seconds, after which the row is invalid; needs threads.

    The transform can also be called on rows with a response, outside an environment. It then writes
    ``("next", ...)``, replaces an existing reward (so rows may be scored again), and does not
    change ``done``. If a replay buffer has several reward transforms, each adds to the rewards of
    the earlier ones.

    Example:
        >>> from torchrl_llm.envs import DatasetChatEnv
        >>> class Echo(RewardParser):
        ...     def score(self, response, answer):
        ...         return float(response == answer)
        >>> env = DatasetChatEnv(dataset=[{"query": "Say hi", "answer": "hi"}])
        >>> env = env.append_transform(Echo())
        >>> td = env.reset()
        >>> chat = td["history"].prompt.chats[0] + [{"role": "assistant", "content": "hi"}]
        >>> td["history"].full = type(td["history"].prompt).of([chat])
        >>> env.step(td)["next", "reward"]
        tensor([[[1.]]])
    """

    needs_answer = False
    """Whether the reward compares with an answer, so that rows must have an answer."""
    _adds = True  # to an existing reward of the step

    def __init__(
        self,
        tokenizer: Any = None,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        eos_token: str | None = None,
        set_done_if_answer: bool = True,
        input_mode: str | None = None,
        *,
        num_threads: int = 0,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        check_limits(num_threads, timeout)
        names = ["reward_answer", "reward_think", "reward_right", "reward", "success"]
        out_keys = names if out_keys is None else list(out_keys)
        if len(out_keys) != len(names):
            raise ConfigError(f"out_keys renames {names}, got {out_keys}")
        self._names = dict(zip(names, out_keys, strict=True))
        self.out_keys = out_keys
        self._answer_key: NestedKey = "answer"
        if in_keys is not None:
            if len(in_keys) != 2 or isinstance(in_keys[0], str):
                raise ConfigError(
                    f'in_keys must be [(input_mode, "full"), answer_key], got {list(in_keys)}'
                )
            if input_mode not in (None, in_keys[0][0]):
                raise ConfigError(f"in_keys {in_keys[0]!r} contradicts input_mode={input_mode!r}")
            input_mode, self._answer_key = in_keys[0][0], in_keys[1]
            self.in_keys = list(in_keys)
        if input_mode not in (None, *_INPUT_MODES):
            raise ConfigError(f"input_mode must be one of {_INPUT_MODES}, got {input_mode!r}")
        self.tokenizer = tokenizer
        self.eos_token = getattr(tokenizer, "eos_token", None) if eos_token is None else eos_token
        self.set_done_if_answer = set_done_if_answer
        self._input_mode = input_mode
        self.num_threads = num_threads
        self.timeout = timeout

    @abstractmethod
    def score(self, response: str, answer: Any) -> float | RewardScore:
        """Score one response.

        With ``num_threads``, the method is called from several threads at once, so it must not
        change ``self``.

        Args:
            response: text of the model, without the prompt.
            answer: the row's answer.

        Returns:
            A finite number, or a :class:`RewardScore`. A plain number always counts as an answer,
            and as success if it is above zero.
        """

    # Reading

    def set_container(self, container: Any) -> None:
        """Set the keys that depend on the environment."""
        super().set_container(container)
        if not self.in_keys and self.input_mode is not None:
            self.in_keys = [(self.input_mode, "full"), self._answer_key]

    @property
    def input_mode(self) -> str | None:
        """``"history"``, ``"text"`` or ``"tokens"``; ``None`` before there is an environment."""
        mode = None if self.parent is None else getattr(self.parent, "mode", None)
        return mode.name if self._input_mode is None and mode is not None else self._input_mode

    def _mode(self) -> InputMode:
        if self._input_mode is None and self.parent is not None:
            return self.parent.mode
        if self._input_mode is None:
            raise ConfigError("outside an environment a reward parser needs input_mode")
        mode = getattr(self.parent, "mode", None) if self.parent is not None else None
        if mode is not None and mode.name == self._input_mode:
            return mode
        return response_reader(self._input_mode, self.tokenizer)

    _columns: Sequence[str] | None = None
    """Columns that a score reads; ``None`` if it reads only the response and the answer."""

    def _samples(
        self, td: TensorDictBase, next_td: TensorDictBase
    ) -> list[Sample | Exception | None]:
        """Return one sample per acting row, or an exception if the row has no response."""
        eos, responses = self._eos(), self._responses(td)
        answers = self._answers(td)
        more = repeat(()) if self._columns is None else self._more(td, self._columns)
        samples: list[Sample | Exception | None] = [None] * len(responses)
        acts = set(acting_rows(td, next_td))
        for row, (text, answer, rest) in enumerate(zip(responses, answers, more, strict=False)):
            if row in acts:
                is_text = isinstance(text, str)
                samples[row] = Sample(text.removesuffix(eos), answer, *rest) if is_text else text
        return samples

    def _responses(self, td: TensorDictBase) -> list[str | Exception]:
        return self._mode().responses(td)

    def _answers(self, td: TensorDictBase) -> list[Any]:
        if self._columns is None:
            return needed_column(td, self._answer_key)
        return read_column(td, self._answer_key) or [None] * td.batch_size.numel()

    def _more(self, td: TensorDictBase, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Return further inputs of a scorer: tokens, how the response ended, columns."""
        asked = [self._asked(td, name) for name in columns]
        rows = zip(*asked, strict=True) if asked else repeat(())
        lengths = response_lengths(td) or [None] * td.batch_size.numel()
        for length, reason, cells in zip(lengths, finish_reasons(td), rows, strict=False):
            yield length, reason, dict(zip(columns, cells, strict=True))

    def _asked(self, td: TensorDictBase, name: str) -> list[Any]:
        """Return a column that a scorer reads; ``row`` is a dict of all data columns per row."""
        column = read_column(td, name)
        if column is None and name == "row":
            primer = None if self.parent is None else getattr(self.container, "primer", None)
            own = getattr(primer, "data_keys", ())
            keys = [key for key in td.keys() if key in own or is_non_tensor(td.get(key))]
            cells = (map(plain_cell, read_column(td, key)) for key in keys)
            rows = [dict(zip(keys, row, strict=True)) for row in zip(*cells, strict=True)]
            column = rows or [{}] * td.batch_size.numel()
        if name == "row" and any("finish_reason" in row for row in column):
            raise DataError(
                "the data has a column 'finish_reason', under which a reward of (response, row) "
                "reads how the answer ended: rename that column, or leave it out"
            )
        return needed_column(td, name) if column is None else column

    # Scoring

    def _eos(self) -> str:
        if self.eos_token is not None or self.parent is None:
            return self.eos_token or ""
        return getattr(getattr(self.parent, "tokenizer", None), "eos_token", None) or ""

    def _outcomes(
        self,
        samples: Sequence[Sample | Exception | None],
        td: TensorDictBase,
        next_td: TensorDictBase,
    ) -> list[Outcome]:
        """Return the outcome of each row; the value of an outcome is a score."""
        part = Component(
            self._scorer(),
            run="threads" if self.num_threads else "inline",
            num_workers=self.num_threads or None,
            timeout=self.timeout,
        )
        return part.outcomes(samples)

    def _scorer(self) -> Any:
        """The object that scores, if :meth:`score` is not used."""
        return self

    def _write(self, td: TensorDictBase, next_td: TensorDictBase, *, ends: bool) -> None:
        outcomes = self._outcomes(self._samples(td, next_td), td, next_td)
        tell_failures([outcome.failure for outcome in outcomes], td.__getitem__, len(outcomes))
        self._write_outcomes(outcomes, next_td)
        if ends and self.set_done_if_answer:
            has_answer = [o.value is not None and o.value.has_answer for o in outcomes]
            flag = torch.tensor(has_answer, device=next_td.device).unsqueeze(-1)
            raise_flags(next_td, done=flag, terminated=flag)

    def _write_outcomes(self, outcomes: Sequence[Outcome], next_td: TensorDictBase) -> None:
        nan = float("nan")
        table = [
            (nan, nan, nan, nan, 0.0, 0.0, seconds)
            if score is None
            else (*score[:1], *score[2:], self._right(score), score.success, True, seconds)
            for score, seconds, _ in outcomes
        ]
        columns = torch.tensor(table, dtype=torch.float32, device=next_td.device).t().contiguous()
        cells = dict(zip(_CELLS, columns.view(len(columns), len(outcomes), 1, 1), strict=False))
        failures = [outcome.failure for outcome in outcomes]
        before = next_td if self._adds else next_td.empty()
        valid_before = before.get("reward_valid", None)
        for name, key in self._names.items():
            cell = _added(before, key, cells[name])
            next_td.set(key, cell.bool() if name == "success" else cell)
        valid = columns[5].bool()
        if valid_before is not None:
            valid = valid & valid_before
            failures = _first_failures(before, valid_before.tolist(), failures)
        next_td.set("reward_valid", valid)
        next_td.set("reward_seconds", _added(before, "reward_seconds", columns[6]))
        set_errors(next_td, failures)

    def _right(self, score: RewardScore) -> float:
        """Return the value of ``reward_right`` for a score."""
        return score.success

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        self._write(tensordict, next_tensordict, ends=True)
        return next_tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Score rows outside an environment, for example in a replay buffer.

        Args:
            tensordict: a row, or rows ``[B]``, with response and answer, or a rollout ``[B, T]``.

        Returns:
            The same rows, with the reward's keys under ``"next"``.
        """
        if not tensordict.batch_dims:
            return self.forward(lazy_rows([tensordict]))[0]
        if tensordict.batch_dims > 1:
            flat = self.forward(tensordict.reshape(-1))["next"]
            for key in (*self._names.values(), *_ROW_KEYS):
                value = flat.get(key)
                shape = (*tensordict.batch_size, *value.shape[1:])
                tensordict.set(("next", key), value.reshape(shape))
            return tensordict
        scores = TensorDict(batch_size=tensordict.batch_size, device=tensordict.device)
        auxiliary = tensordict.get(("next", *_AUXILIARY_KEY), None)
        if auxiliary is not None:
            scores.set(_AUXILIARY_KEY, auxiliary)
        if self._follows_another():
            for name in (*self._names.values(), *_ROW_KEYS):
                value = tensordict.get(("next", name), None)
                if value is not None:
                    scores.set(name, value)
        self._write(tensordict, scores, ends=False)
        for key, value in scores.items():
            if key != _AUXILIARY_KEY[0]:
                tensordict.set(("next", key), value)
        return tensordict

    def _follows_another(self) -> bool:
        """Whether a different reward precedes this one in the same replay buffer."""
        # The public property raises an error if the transform is in no environment.
        container = (self.__dict__.get("_container") or (lambda: None))()
        for transform in getattr(container, "transforms", ()):
            if transform is self:
                return False
            if isinstance(transform, RewardParser):
                return True
        return False

    # Specs

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Add the specs of the reward's keys."""
        shape, device = reward_spec.shape, reward_spec.device
        reward_spec["reward_seconds"] = Unbounded(shape=shape, device=device)
        floats = [key for name, key in self._names.items() if name != "success"]
        return add_reward_specs(reward_spec, floats, self._names.get("success"))


def read_column(td: TensorDictBase, key: NestedKey) -> list[Any] | None:
    """Return the values of a column, one per row; ``None`` if it is missing.

    Args:
        td: rows ``[B]``.
        key: key of the column.
    """
    values = td.get(key, None)
    if values is None or not is_non_tensor(values):
        return values if values is None else list(values)
    return values.tolist() if values.batch_dims else [values.data] * td.batch_size.numel()


def needed_column(td: TensorDictBase, key: NestedKey) -> list[Any]:
    """Return the values of a column, one per row.

    Args:
        td: rows ``[B]``.
        key: key of the column.

    Raises:
        DataError: when the column is missing.
    """
    column = read_column(td, key)
    if column is not None:
        return column
    own = read_column(td, "row")  # the user's rows, with all their columns
    if own and all(isinstance(row, Mapping) and key in row for row in own):
        return [row[key] for row in own]
    raise DataError(
        f"the rows lack {key!r}, which the reward reads; they have "
        f"{sorted(str(key) for key in td.keys())}"
    )


def finish_reasons(td: TensorDictBase) -> list[FinishReason | None]:
    """Return how each response ended; ``None`` if unknown.

    Args:
        td: rows ``[B]`` after the policy.
    """
    reasons = td.get(("tokens", "finish_reason"), None)
    if reasons is None:
        return [None] * td.batch_size.numel()
    return [FinishReason(reason) for reason in reasons.flatten().tolist()]


def response_lengths(td: TensorDictBase) -> list[int] | None:
    """Return each response's number of tokens, without padding; ``None`` without tokens.

    Args:
        td: rows after the policy.
    """
    rows = read_rows(td, ("tokens", "response"), None)
    if rows is None:
        return None
    masks = read_rows(td, ("masks", "all_attention_mask"), None)
    full = read_rows(td, ("tokens", "full"), None)
    if masks is None or full is None:
        return [len(row) for row in rows]
    return [
        int(mask[len(mask) - len(row) :].sum()) if len(mask) == len(whole) else len(row)
        for row, mask, whole in zip(rows, masks, full, strict=True)
    ]


def add_reward_specs(
    spec: Composite, floats: Sequence[NestedKey], success: NestedKey | None
) -> Composite:
    """Add the specs of rewards, of their validity and of their errors.

    Args:
        spec: spec of the rewards of ``B`` rows.
        floats: names of the float32 keys ``[B, 1, 1]``.
        success: name of the bool key ``[B, 1, 1]``; ``None`` for no such key.
    """
    size, device = spec.shape, spec.device
    cell = (*size, 1, 1)
    for name in floats:
        spec[name] = Unbounded(shape=cell, device=device)
    if success is not None:
        spec[success] = Binary(n=1, shape=cell, dtype=torch.bool, device=device)
    spec["reward_valid"] = Unbounded(shape=size, dtype=torch.bool, device=device)
    spec["error"] = error_spec(size, device)
    return spec


def error_spec(size: torch.Size, device: torch.device | None) -> Composite:
    """Return the spec of the keys that :func:`set_errors` writes.

    Args:
        size: batch size.
        device: device of the rows.
    """
    text = {name: ColumnSpec((*size, -1), example_data="") for name in ERROR_KEYS}
    return Composite(text, shape=size, device=device)


def write_errors(td: TensorDictBase, failures: Sequence[Failure], before: TensorDictBase) -> None:
    """Write ``"error"`` and log the first failure of each kind.

    Args:
        td: ``B`` rows.
        failures: failure of each row.
        before: the same rows after the policy.
    """
    set_errors(td, failures)
    tell_failures(failures, before.__getitem__, len(failures))


def set_errors(td: TensorDictBase, failures: Sequence[Failure], name: str = "error") -> None:
    """Write failures as a node of strings.

    Args:
        td: ``B`` rows.
        failures: failure of each row.
        name: name of the node.
    """
    node = TensorDict(batch_size=td.batch_size, device=td.device)
    rows = (failure if failure.kind else NO_FAILURE for failure in failures)
    for key, texts in zip(ERROR_KEYS, zip(*rows, strict=True), strict=True):
        node.set(key, Column.of(texts))
    td.set(name, node)


def _first_failures(
    td: TensorDictBase, valid: Sequence[bool], failures: Sequence[Failure]
) -> list[Failure]:
    """Return the failures of an earlier reward where it failed, otherwise the given failures."""
    refused = td.get("reward_refused", None)
    if (all(valid) and refused is None) or td.get("error", None) is None:
        return list(failures)
    rows = zip(written_failures(td), failures, valid, strict=True)
    return [new if fine and (new.kind or not before.kind) else before for before, new, fine in rows]


def written_failures(td: TensorDictBase) -> list[Failure]:
    """Read what :func:`write_errors` wrote, one failure per row.

    Args:
        td: ``B`` rows.
    """
    columns = (td.get(("error", name)).tolist() for name in ERROR_KEYS)
    return [Failure(*row) for row in zip(*columns, strict=True)]


def _added(td: TensorDictBase, name: NestedKey, values: Tensor) -> Tensor:
    """Add values to the existing values of a key, if there are any."""
    before = td.get(name, None)
    if before is None:
        return values
    if before.numel() != values.numel():
        raise DataError(
            f"a reward of one number per row is added to what the rows have in {name!r}, which is "
            f"{tuple(before.shape)}; a CompositeReward adds up rewards of tokens and of responses"
        )
    return before.reshape(values.shape).to(values) + values


def raise_flags(td: TensorDictBase, **flags: Tensor) -> None:
    """Set flags in addition to the flags that are already set.

    Args:
        td: rows.
        flags: maps a name to a bool tensor.
    """
    for name, flag in flags.items():
        before = td.get(name, None)
        td.set(name, flag if before is None else before | flag)


def acting_rows(td: TensorDictBase, next_td: TensorDictBase) -> list[int]:
    """Return the stepped rows whose turn was not rejected and did not only call tools.

    Args:
        td: all rows after the policy.
        next_td: the next state.
    """
    size = next_td.batch_size.numel()
    mask = torch.ones(size, dtype=torch.bool)
    stepped, auxiliary = td.get("_step", None), next_td.get(_AUXILIARY_KEY, None)
    if stepped is not None:
        mask &= stepped.reshape(size, -1).any(-1).cpu()
    if auxiliary is not None:
        mask &= ~auxiliary.reshape(size, -1).any(-1).cpu()
    if (refused := next_td.get("reward_refused", None)) is not None:
        mask &= ~refused.reshape(size).cpu()
    return mask.nonzero().flatten().tolist()
