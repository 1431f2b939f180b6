"""Gates before a reward: an invalid answer gets a penalty and a message instead of a score.

:class:`ParseAnswers` rejects answers that a parser cannot read. :class:`CutAnswers` rejects a turn
that was cut, so that its calls were not made. Other cut answers pass, with a penalty if one is set.
Worlds (:mod:`torchrl_llm.envs.world`) reject cut answers themselves, because they read the actions
anyway.

Shape legend: ``B`` rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform

from torchrl_llm._checked import In, checked
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.failures import Failure
from torchrl_llm.data.input_modes import InputMode
from torchrl_llm.envs.actions import ActionError, ActionParser, IncompleteCompletion, call_link
from torchrl_llm.errors import ConfigError
from torchrl_llm.rewards import reward_parser


class ModelTurn(NamedTuple):
    """Turn of the model in one row.

    Attributes:
        row: index of the row.
        message: the message that it wrote; ``None`` if it wrote nothing.
        cut: the answer was cut at its token limit.
        answered: a tool transform has answered the calls of this turn.
    """

    row: int
    message: Mapping[str, Any] | None
    cut: bool
    answered: bool

    def said(self, *, accept_cut: bool) -> Mapping[str, Any]:
        """The message.

        Args:
            accept_cut: accept a message that was cut.

        Raises:
            ActionError: there is no message, or it was cut.
        """
        if self.message is None:
            raise ActionError("There is no answer.")
        if self.cut and not accept_cut:
            raise IncompleteCompletion
        return self.message


def read_turns(td: TensorDictBase, next_td: TensorDictBase, mode: InputMode) -> list[ModelTurn]:
    """The turns of the rows that act in a step.

    Args:
        td: all rows, as the policy left them.
        next_td: the result of the step.
        mode: mode of the environment.
    """
    size = next_td.batch_size.numel()
    messages = mode.turns(td)
    finish = td.get(("tokens", "finish_reason"), None)
    calls = next_td.get(("tools", "num_calls"), None)
    nothing = [False] * size
    cut = nothing if finish is None else FinishReason.cut_rows(finish.reshape(size)).tolist()
    answered = nothing if calls is None else (calls.reshape(size) > 0).tolist()
    rows = reward_parser.acting_rows(td, next_td)
    return [ModelTurn(row, messages[row], cut[row], answered[row]) for row in rows]


class AnswerGate(Transform):
    """Base of the gates: subclasses write ``read`` and name their ``part`` of the reward.

    It checks the turns that the next reward transform would score. A rejected turn is not scored:
    the model reads the reason (unless a tool has already told it), and the turn counts as a step.
    It writes

    - ``part``, float32 ``[B, 1, 1]``: the amount that the gate adds to ``"reward"``, once;
    - ``"reward_refused"``, bool ``[B]``: the turn was rejected, by this gate or an earlier one;
    - ``("error", ...)`` of rejected turns. Their reward, the penalty, is valid.
    """

    part: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()

    @abstractmethod
    def read(self, turn: ModelTurn) -> float:
        """Amount that the gate adds to the reward of a turn that passes.

        Args:
            turn: the model's turn.

        Raises:
            ActionError: the turn is no answer; its ``reward`` is added instead.
        """

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        size = next_tensordict.batch_size.numel()
        turns = read_turns(tensordict, next_tensordict, self.parent.mode)
        values, replies = [0.0] * size, [[] for _ in range(size)]
        errors: dict[int, ActionError] = {}
        for turn in turns:
            try:
                values[turn.row] = self.read(turn)
            except ActionError as error:
                values[turn.row], errors[turn.row] = error.reward, error
                if not turn.answered and turn.message is not None:
                    told = {"role": self.parent.user_role, "content": str(error)}
                    replies[turn.row] = [told]
        if any(replies):
            self.parent.mode.append(tensordict, next_tensordict, replies)
        self._write(next_tensordict, values, errors)
        return next_tensordict

    def _write(
        self, td: TensorDictBase, values: list[float], errors: Mapping[int, ActionError]
    ) -> None:
        size = len(values)
        part = torch.tensor(values, dtype=torch.float32, device=td.device).view(size, 1, 1)
        before = td.get("reward", None)
        td.set(self.part, part)
        td.set("reward", part.clone() if before is None else before.reshape(part.shape) + part)
        refused = torch.tensor([row in errors for row in range(size)], device=td.device)
        earlier = td.get("reward_refused", None)
        td.set("reward_refused", refused if earlier is None else refused | earlier)
        if earlier is None:
            td.set("success", torch.zeros(size, 1, 1, dtype=torch.bool, device=td.device))
            td.set("reward_valid", torch.ones(size, dtype=torch.bool, device=td.device))
            failures = [Failure()] * size
        else:
            failures = reward_parser.written_failures(td)
        for row, error in errors.items():
            failures[row] = Failure.told(type(error).__name__, str(error), source=self.part)
        reward_parser.set_errors(td, failures)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Adds the reward and its part."""
        spec = reward_parser.add_reward_specs(reward_spec, ["reward", self.part], "success")
        spec["reward_refused"] = Unbounded(
            shape=spec.shape, dtype=torch.bool, device=reward_spec.device
        )
        return spec


class CutAnswers(AnswerGate):
    """Subtracts a penalty from the scores of answers that were cut at their token limit.

    If the calls of a turn were not made because it was cut, the turn has no answer; it is rejected
    like a failed action.

    Args:
        penalty: penalty of a cut answer, written as ``"reward_cut"``.
        accept_cut: whether the environment makes the calls of cut answers.

    Raises:
        ConfigError: the penalty is negative or not finite.
    """

    part = "reward_cut"

    @checked
    def __init__(
        self, penalty: Annotated[float, In("[0, inf)")] = 0.0, *, accept_cut: bool = False
    ) -> None:
        super().__init__()
        self.penalty, self.accept_cut = float(penalty), accept_cut

    def read(self, turn: ModelTurn) -> float:
        """The penalty's part of the reward; zero if the answer was not cut."""
        cost = -self.penalty if turn.cut and self.penalty else 0.0
        if turn.cut and turn.answered and not self.accept_cut:
            error = IncompleteCompletion()
            error.reward = cost
            raise error
        return cost


class ParseAnswers(AnswerGate):
    """Rejects answers that a parser cannot read, and adds the parser's reward for the form.

    The next reward transform reads the whole answer of a turn that passes.

    Args:
        parser: reads the text of answers. Its reward is written as ``"reward_parser"``.

    Raises:
        ConfigError: the parser reads tool calls.
    """

    part = "reward_parser"

    def __init__(self, parser: ActionParser) -> None:
        super().__init__()
        if (calls := call_link(parser)) is not None:
            raise ConfigError(
                f"{type(calls).__name__} reads an action, and a plain task has none: give the "
                "agent the tool, or a parser of text"
            )
        self.parser = parser

    def read(self, turn: ModelTurn) -> float:
        """The parser's reward."""
        if turn.message is None:
            return 0.0  # the reward reports what is missing
        try:
            return self.parser.read(turn.message).reward
        except ActionError as error:
            told = ActionError(f"{error} {self.parser.help}")
            told.reward = error.reward
            raise told from error
