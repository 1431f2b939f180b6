"""Prompts with a label, tokenized: what a model continues and what a person wrote there.

Next: :class:`~torchrl_llm.data.RolloutFromModel` lets a model answer them.

Shape legend: ``N`` rows, ``T`` tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorClass, TensorDictBase
from torch import Tensor

from torchrl_llm.compat.tokenized_dataset import (
    Padding,
    TensorDictTokenizer,
    TokenizedDatasetLoader,
)
from torchrl_llm.errors import DataError, TokenizerError

DEFAULT_DATASET = "CarperAI/openai_summarize_tldr"
"""Data that is loaded where no other is named."""


class PromptData(TensorClass["nocast"]):
    """Prompts and their labels, padded on the right.

    Args:
        input_ids: int64 ``[N, T]``, prompt and label.
        attention_mask: int64 ``[N, T]``.
        prompt_rindex: int64 ``[N]``, index of the prompt's last token.
        labels: int64 ``[N, T]``.
        logits: of a model, if any.
        loss: of a model, if any.

    Example:
        >>> ids = torch.tensor([[5, 6, 7, 8]])
        >>> data = PromptData(ids, torch.ones_like(ids), torch.tensor([1]), batch_size=[1])
        >>> data.mask_label(pad_token_id=0).input_ids
        tensor([[5, 6, 0, 0]])
    """

    input_ids: Tensor
    attention_mask: Tensor
    prompt_rindex: Tensor
    labels: Tensor | None = None
    logits: Tensor | None = None
    loss: Tensor | None = None

    def mask_label(self, pad_token_id: int = 50256) -> PromptData:
        """The prompts alone, in rows of the same length.

        Args:
            pad_token_id: stands where the label was; gpt2's by default.
        """
        places = torch.arange(self.input_ids.shape[-1], device=self.input_ids.device)
        inside = places <= self.prompt_rindex.unsqueeze(-1)
        return type(self)(
            input_ids=self.input_ids.masked_fill(~inside, pad_token_id),
            attention_mask=inside.to(torch.int64),
            prompt_rindex=self.prompt_rindex,
            loss=self.loss,
            batch_size=self.batch_size,
        )

    @classmethod
    def from_dataset(
        cls,
        split: str,
        dataset_name: Any = None,
        max_length: int = 550,
        root_dir: str | Path | None = None,
        from_disk: bool = False,
        num_workers: int | None = None,
        *,
        tokenizer: Any = None,
    ) -> PromptData:
        """Tokenize a dataset, or find its memory-mapped copy.

        Args:
            split: see :class:`~torchrl_llm.data.TokenizedDatasetLoader`, as for the others.
            dataset_name: rows with ``prompt`` and ``label``;
                ``CarperAI/openai_summarize_tldr`` by default.
            max_length: most tokens of a row; longer ones are left out.
            root_dir: where copies are kept.
            from_disk: read with ``datasets.load_from_disk``.
            num_workers: threads that tokenize.
            tokenizer: a tokenizer or its name; gpt2's by default.
        """
        data = TokenizedDatasetLoader(
            split,
            max_length,
            DEFAULT_DATASET if dataset_name is None else dataset_name,
            PromptTensorDictTokenizer,
            root_dir=root_dir,
            from_disk=from_disk,
            num_workers=num_workers,
            tokenizer=tokenizer,
        ).load()
        return cls(**data, labels=data["input_ids"], batch_size=data.batch_size)


class PromptTensorDictTokenizer(TensorDictTokenizer):
    """Makes token ids of a prompt followed by its label, always padded on the right.

    Both are tokenized as one text. ``prompt_rindex`` is the index of the last token that lies in
    the prompt altogether, -1 where there is none; ``valid_sample`` is true for rows that hold a
    prompt and a label and fit into ``max_length``.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        max_length: most tokens of a row.
        key: where a sample has its prompt; the label is under ``"label"``.
        padding: see :class:`~torchrl_llm.data.TensorDictTokenizer`, as for the others.
        truncation: cut rows at ``max_length``, on the right.
        return_tensordict: return a tensordict; else a dict of lists.
        device: of the tensordict.

    Raises:
        TokenizerError: for a tokenizer that cannot say where a token stood in the text.

    Example:
        >>> from transformers import AutoTokenizer
        >>> from torchrl_llm.assets import embedded_model_path
        >>> tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
        >>> process = PromptTensorDictTokenizer(tokenizer, max_length=6)
        >>> td = process({"prompt": ["1+2=", "1+2+3+4="], "label": ["3", "10"]})
        >>> td["prompt_rindex"].tolist(), td["valid_sample"].tolist()
        ([3, 5], [True, False])
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        key: str = "prompt",
        padding: Padding = "max_length",
        truncation: bool = True,
        return_tensordict: bool = True,
        device: Any = None,
    ) -> None:
        super().__init__(tokenizer, max_length, key, padding, truncation, return_tensordict, device)
        if not getattr(tokenizer, "is_fast", False):
            raise TokenizerError(
                "where a prompt ends can only be told with a fast tokenizer, "
                f"got {type(tokenizer).__name__}"
            )

    def __call__(self, sample: Mapping[str, Any]) -> TensorDictBase | dict[str, Any]:
        """Tokenize one sample, or a batch of them.

        Args:
            sample: strings, or lists of them, under ``key`` and ``"label"``.

        Returns:
            ``input_ids``, ``attention_mask``, ``prompt_rindex`` and ``valid_sample``.
        """
        prompts, labels = self._column(sample, self.key), self._column(sample, "label")
        single = isinstance(prompts, str)
        if single != isinstance(labels, str) or (not single and len(prompts) != len(labels)):
            raise DataError("a sample must hold one label for each prompt")
        prompts, labels = ([prompts], [labels]) if single else (list(prompts), list(labels))
        texts = [prompt + label for prompt, label in zip(prompts, labels, strict=True)]
        encoded = self.tokenizer(texts, return_offsets_mapping=True)
        rows, rindex, valid = [], [], []
        for prompt, ids, offsets in zip(
            prompts, encoded["input_ids"], encoded["offset_mapping"], strict=True
        ):
            behind = (i for i, (_, end) in enumerate(offsets) if end > len(prompt))
            size = next(behind, len(ids))
            valid.append(len(ids) <= self.max_length and 0 < size < len(ids))
            rows.append(ids[: self.max_length] if self.truncation else ids)
            rindex.append(min(size, len(rows[-1])) - 1)
        return self._finish(rows, {"prompt_rindex": rindex, "valid_sample": valid}, single, "right")
