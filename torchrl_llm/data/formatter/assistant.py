"""Ids of a whole conversation and which of them the assistant wrote: for text that nobody sampled.

For supervised training. Rows of reinforcement learning keep the sampled ids and their trace, and
are never encoded again.

Shape legend: ``T`` tokens of the conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_llm.data.formatter.formatter import ChatFormatter
from torchrl_llm.errors import TemplateError


def assistant_mask(
    formatter: ChatFormatter, messages: Sequence[Mapping[str, Any]], *, include_header: bool = False
) -> tuple[Tensor, Tensor]:
    r"""Token ids of a conversation and a mask of the assistant's turns.

    A turn is what a policy would have sampled: its content and its end-of-turn token. The header
    before it and the line break that a template writes behind it are not.

    Args:
        formatter: encodes; holds tokenizer and template.
        messages: the conversation.
        include_header: mark everything that each assistant message adds to the ids of the messages
            before it, header and line break too, as picoRL's ``tokenize_with_assistant_mask`` does.

    Returns:
        int64 ``[T]`` ids and a bool ``[T]`` mask.

    Raises:
        TemplateError: ``include_header`` with a template that writes earlier messages differently
            once later ones follow (that strips old reasoning, for instance), so that a message has
            no span of its own.

    Example:
        >>> from transformers import AutoTokenizer
        >>> from torchrl_llm.assets import embedded_model_path
        >>> formatter = ChatFormatter(AutoTokenizer.from_pretrained(embedded_model_path()))
        >>> chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
        >>> ids, mask = assistant_mask(formatter, chat)
        >>> formatter.decode(ids[mask])
        'Yo<|im_end|>'
        >>> ids, mask = assistant_mask(formatter, chat, include_header=True)
        >>> formatter.decode(ids[mask])
        '<|im_start|>assistant\nYo<|im_end|>\n'
    """
    whole = formatter.encode(messages, add_generation_prompt=False)
    if not include_header:
        return whole.token_ids, whole.assistant
    mask = torch.zeros_like(whole.assistant)
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        start, end = (
            _prefix_length(formatter, messages[:count], whole.token_ids)
            for count in (index, index + 1)
        )
        mask[start:end] = True
    return whole.token_ids, mask


def _prefix_length(
    formatter: ChatFormatter, messages: Sequence[Mapping[str, Any]], whole: Tensor
) -> int:
    if not messages:
        return 0
    ids = formatter.encode(messages, add_generation_prompt=False).token_ids
    if not torch.equal(ids, whole[: ids.shape[0]]):
        raise TemplateError(
            f"the ids of the first {len(messages)} messages are not how the conversation begins: "
            "this chat template writes them differently when more follow; use "
            "include_header=False, which needs no prefixes"
        )
    return ids.shape[0]
