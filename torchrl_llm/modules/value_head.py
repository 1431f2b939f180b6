"""A linear critic on the hidden states of a language model.

Shape legend: ``N`` states, ``D`` hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrl_llm.errors import ConfigError


class ValueHead(nn.Module):
    r"""The value of a state, :math:`V(s) = w^\top h(s) + b`, from the model's last hidden state.

    The state of a token is what stands before it, so :math:`h` is the state that predicts the
    token. Weight and bias begin at zero: the first values are 0 and the first update is not driven
    by noise. Given to :class:`~torchrl_llm.modules.backends.TransformersBackend` (or a
    ``CausalScorer``), it is a part of the scorer and of the policy: ``policy.value_head`` is in the
    policy's ``parameters()`` and ``state_dict()``, but not in the model, so neither in what
    ``save_pretrained`` writes nor in what is sent to a sampler. A run saves it as a part of its
    own: ``TrainingRun(parts={"value_head": policy.value_head, ...})``.

    Values are float32, whatever the model computes in, under autocast too.

    Args:
        hidden_size: ``D``.
        detach: keep the gradient of the value loss out of the model's body.
        device: where the weights are.

    Raises:
        ConfigError: for a size below 1.

    Example:
        >>> head = ValueHead(8)
        >>> head(torch.randn(3, 8))
        tensor([0., 0., 0.], grad_fn=<SqueezeBackward1>)
    """

    def __init__(
        self, hidden_size: int, *, detach: bool = False, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        if hidden_size < 1:
            raise ConfigError(f"hidden_size must be at least 1, got {hidden_size}")
        self.detach = detach
        self.linear = nn.Linear(hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    @classmethod
    def for_model(cls, model: nn.Module, *, detach: bool = False) -> ValueHead:
        """A head for a Hugging Face causal model, on its device.

        Args:
            model: the model, in PEFT or not.
            detach: see the class.

        Raises:
            ConfigError: when the model's configuration does not say how wide its states are.

        Example:
            >>> from torchrl_llm.modules import load_model
            >>> ValueHead.for_model(load_model()).linear.weight.shape
            torch.Size([1, 128])
        """
        size = getattr(model.config.get_text_config(decoder=True), "hidden_size", None)
        if size is None:
            raise ConfigError(
                f"the configuration of {type(model).__name__} has no hidden_size; pass the width "
                "of its last hidden states to ValueHead"
            )
        return cls(size, detach=detach, device=next(model.parameters()).device)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """Values ``[N]`` of the states ``[N, D]``, float32."""
        hidden = hidden_ND.detach() if self.detach else hidden_ND
        with torch.autocast(hidden.device.type, enabled=False):
            return self.linear(hidden.to(self.linear.weight.dtype)).squeeze(-1)
