"""An algorithm: a loss and an advantage estimator, and the transforms that they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

from torch import nn
from torchrl.envs import Transform

from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives import CreditAssigner, TokenLoss

B = TypeVar("B", bound=ReplayBuffer)


class NoModel(TokenScorer):
    """Stands for the model of an algorithm until :meth:`Algorithm.bind` gives it one."""

    def token_scores(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "this algorithm was made without a model: algorithm = algorithm.bind(policy), before "
            "its loss is computed and before it is appended to a buffer"
        )


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A named pair of loss and advantage estimator.

    Any loss can be combined with any advantage estimator. A preset such as
    :func:`~torchrl_llm.algorithms.make_grpo` is only a pair that a paper uses.

    Attributes:
        name: its name.
        loss: the loss over the rows of the buffer.
        credit: the advantage estimator; ``None`` if the loss needs none.
        transforms: transforms that get the rows before ``credit``: first changes of the reward,
            then values.
        scorers: transforms that get the rows last, joined and filtered: log-probs that only the
            loss reads.
        build: function that makes the algorithm with a model, if it was made without one.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> from torchrl_llm.objectives import GRPOLoss, MCAdvantage
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> loss = GRPOLoss(CausalScorer(Qwen2ForCausalLM(config)))
        >>> algorithm = Algorithm(name="mine", loss=loss, credit=MCAdvantage(grpo_size=8))
        >>> buffer = algorithm.append_to(ReplayBuffer())
        >>> [type(transform).__name__ for transform in buffer.transform]
        ['JoinTurns', 'MCAdvantage']
    """

    name: str
    loss: TokenLoss
    credit: CreditAssigner | None = None
    transforms: tuple[Transform, ...] = ()
    scorers: tuple[Transform, ...] = ()
    build: Callable[..., Algorithm] | None = field(default=None, repr=False, compare=False)

    def bind(self, actor: nn.Module | TokenScorer) -> Algorithm:
        """Return the same algorithm with a model, if it was made without one.

        Args:
            actor: the policy, or anything else that scores tokens.

        Returns:
            This algorithm with a loss of the model, and with the transforms of the preset.

        Raises:
            ConfigError: it already has a model.
        """
        if self.build is None:
            raise ConfigError(f"the algorithm {self.name!r} has a model already")
        made = self.build(actor)
        transforms = made.transforms or self.transforms
        return replace(self, loss=made.loss, transforms=transforms, build=None)

    def append_to(self, buffer: B) -> B:
        """Append everything but the loss to a buffer, which then has rows to train on.

        The part that is appended last gets the rows first. So the rows pass through ``transforms``,
        then ``credit``, then a transform that joins the turns of a trajectory into one row, then
        ``scorers``.

        Args:
            buffer: a buffer whose own transforms, if any, come after all of these.

        Returns:
            The same buffer.
        """
        credit = () if self.credit is None else (self.credit,)
        in_order = (*self.transforms, *credit, JoinTurns(), *self.scorers)
        for transform in reversed(in_order):
            buffer.append_transform(transform)
        return buffer
