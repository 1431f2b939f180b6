"""A policy without a model: scripted answers, for tests, examples and dry runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl_llm.modules.backends.fake import FakeBackend, Rule, Script
from torchrl_llm.modules.policies.llm_wrapper import LLMWrapperBase


class FakeWrapper(LLMWrapperBase):
    """Answers by script or rule, or by sampling from a tiny bigram model.

    Args:
        answers: see :class:`~torchrl_llm.modules.backends.fake.FakeBackend`, or a backend that
            exists already.
        tokenizer: a fast tokenizer; needed but in tokens mode.
        vocab_size: number of ids; by default the tokenizer's.
        eos_token_ids: ids that end a response; by default the tokenizer's.
        max_length: most tokens of prompt and response.
        **options: those of :class:`~torchrl_llm.modules.policies.llm_wrapper.LLMWrapperBase`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.ragged import ragged_rows
        >>> policy = FakeWrapper([7, 8], input_mode="tokens", vocab_size=16, eos_token_ids=(2,))
        >>> td = TensorDict(tokens=ragged_rows({"prompt": [torch.tensor([5])]}), batch_size=[1])
        >>> policy(td)["tokens"].get("full", as_list=True)
        [tensor([5, 7, 8, 2])]
    """

    def __init__(
        self,
        answers: Script | Rule | FakeBackend | None = None,
        *,
        tokenizer: Any = None,
        vocab_size: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        max_length: int | None = 4096,
        **options: Any,
    ) -> None:
        backend = answers
        if not isinstance(backend, FakeBackend):
            backend = FakeBackend(
                answers,
                tokenizer=tokenizer,
                vocab_size=vocab_size,
                eos_token_ids=eos_token_ids,
                max_length=max_length,
            )
        super().__init__(backend, tokenizer=tokenizer, **options)
        self._options = options

    def _construction(self) -> dict[str, Any]:
        return {"answers": self.backend, "tokenizer": self.tokenizer, **self._options}
