"""The score of a reward model as a reward.

Any sequence classifier with one output can be used: from ``torchrl-llm train reward``, from TRL, or
from the hub. Next: :class:`torchrl_llm.modules.HFRewardModelWrapper` scores rows of token ids.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from torchrl_llm._checked import Ge, checked
from torchrl_llm._registry import register
from torchrl_llm.data.row_transform import pieces_under_budget
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import DataError, TemplateError, TokenizerError
from torchrl_llm.modules import HFRewardModelWrapper, load_reward_model, load_tokenizer
from torchrl_llm.modules.model_loading import check_reward_model, context_length
from torchrl_llm.rewards.reward_scorer import BatchScorer, Sample


@register("rewards", "model")
class ModelReward(BatchScorer):
    """The score of a reward model for the conversation up to the response.

    The conversation is rendered with the chat template of the reward model, not of the policy. All
    rows of a step are scored together, without gradients. A row that is too long, or whose score is
    not finite, gets an invalid reward, never zero. The constructor checks the configuration in the
    folder; the weights are loaded at the first score.

    Args:
        name: a folder or a hub name of a classifier with ``num_labels=1``.
        token_budget: tokens per forward, including padding; the score does not depend on it.
        max_seq_len: largest number of tokens of a conversation; by default the context length of
            the model.
        dtype: dtype of the weights.
        device: device of the model; ``"auto"`` uses CUDA if available.
        chat_template_name: a family of templates to use instead of the tokenizer's own.
        tools: schemas of the tools in the prompts; recipes pass the tools that their prompts
            describe. They are ignored if the template does not support tools.

    Raises:
        ConfigError: when the model does not exist, or is not a reward model.

    Example:
        >>> import tempfile
        >>> from torchrl_llm.data import History
        >>> from torchrl_llm.modules import load_reward_model, load_tokenizer
        >>> folder = tempfile.mkdtemp()
        >>> load_reward_model().save_pretrained(folder)
        >>> files = load_tokenizer().save_pretrained(folder)
        >>> reward = ModelReward(folder)
        >>> reward.score_chats([[{"role": "user", "content": "2+2?"},
        ...     {"role": "assistant", "content": "4"}]])[0] != 0
        True
    """

    columns = ("history",)

    @checked
    def __init__(
        self,
        name: str,
        *,
        token_budget: Annotated[int, Ge(1)] = 16384,
        max_seq_len: Annotated[int, Ge(2)] | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: str = "auto",
        chat_template_name: str | None = None,
        tools: Sequence[Any] | None = None,
    ) -> None:
        check_reward_model(name)
        self.name, self.token_budget, self.dtype, self.device = name, token_budget, dtype, device
        context = context_length(name)
        self.max_seq_len = min((n for n in (max_seq_len, context) if n), default=None)
        self.chat_template_name, self.tools = chat_template_name, tools
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_lock", "_formatter", "_model")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    @cached_property
    def _formatter(self) -> ChatFormatter:
        tokenizer = load_tokenizer(self.name)
        return ChatFormatter(tokenizer, chat_template_name=self.chat_template_name)

    @cached_property
    def _model(self) -> HFRewardModelWrapper:
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        device = auto if self.device == "auto" else self.device
        model = load_reward_model(self.name, dtype=self.dtype, device=device)
        model.config.use_cache = False  # read each key only once
        return HFRewardModelWrapper(model, inference_mode=True)

    def score_batch(self, samples: Sequence[Sample]) -> list[float | Exception]:
        """Compute the scores; see :class:`ModelReward`."""
        return self.score_chats([sample.columns["history"].full.chats[0] for sample in samples])

    def score_chats(self, chats: Sequence[Any]) -> list[float | Exception]:
        """Score conversations.

        Args:
            chats: messages, the last of them the response.

        Returns:
            For each conversation, a number or the failure.
        """
        with self._lock:
            encoded = [self._encoded(chat) for chat in chats]
            found: list[Any] = list(encoded)
            rows = [row for row, ids in enumerate(encoded) if isinstance(ids, Tensor)]
            rows.sort(key=lambda row: -len(encoded[row]))  # to reduce padding
            lengths = [len(ids) if isinstance(ids, Tensor) else 0 for ids in encoded]
            for piece in pieces_under_budget(rows, lengths, self.token_budget):
                scores = self._model.score_ids([encoded[row] for row in piece])
                for row, score in zip(piece, scores.tolist(), strict=True):
                    found[row] = score
            return found

    def _encoded(self, chat: Any) -> Tensor | Exception:
        try:
            tools = self.tools if self._formatter.probe.call is not None else None
            ids = self._formatter.encode_demonstration(chat, tools=tools).token_ids
        except (DataError, TemplateError, TokenizerError) as error:
            return error
        if self.max_seq_len is not None and len(ids) > self.max_seq_len:
            return DataError(
                f"the conversation has {len(ids)} tokens for the reward model {self.name!r}, which "
                f"takes {self.max_seq_len}"
            )
        return ids
