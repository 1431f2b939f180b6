"""An algorithm: a loss and an advantage estimator, and what either of them reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torchrl.envs import Transform

from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.objectives import CreditAssigner, TokenLoss

B = TypeVar("B", bound=ReplayBuffer)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A named pair of loss and advantage estimator.

    Any loss goes with any advantage estimator; a preset such as
    :func:`~torchrl_llm.algorithms.make_grpo` is only a pair that a paper uses.

    Attributes:
        name: what it is called.
        loss: the loss over the rows of the buffer.
        credit: the advantage estimator; ``None`` where the loss needs none.
        transforms: see the rows before it does, in this order: what changes the reward, values.
        scorers: see the rows last, joined and filtered, in this order: log-probs that only the
            loss reads.

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

    def append_to(self, buffer: B) -> B:
        """Append everything but the loss to a buffer, so that rows become rows to train on.

        What is appended last sees the rows first: ``transforms``, then ``credit``, then the turns
        of a trajectory are joined into one row, then ``scorers``.

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
