"""Pairs of a better and a worse answer, tokenized, for training a reward model.

Shape legend: ``N`` rows, ``T`` tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensordict import TensorClass
from torch import Tensor

from torchrl_llm.compat.tokenized_dataset import TensorDictTokenizer, TokenizedDatasetLoader
from torchrl_llm.errors import DataError

DEFAULT_DATASET = "CarperAI/openai_summarize_comparisons"
"""Data that is loaded where no other is named."""


class RewardData(TensorClass["nocast"]):
    """Texts that a reward model scores.

    Args:
        input_ids: int64 ``[N, T]``.
        attention_mask: int64 ``[N, T]``.
        rewards: float32 ``[N, T]``, one per token, if any.
        end_scores: float32 ``[N]``, of the last token, if any.
    """

    input_ids: Tensor
    attention_mask: Tensor
    rewards: Tensor | None = None
    end_scores: Tensor | None = None


class PairwiseDataset(TensorClass["nocast"]):
    """Chosen answers and rejected ones, row by row to the same prompt.

    Args:
        chosen_data: the better ones, ``[N]``.
        rejected_data: the worse ones, ``[N]``.

    Example:
        >>> import tempfile
        >>> from torchrl_llm.assets import embedded_model_path
        >>> row = {"prompt": "2+2", "chosen": "it is 4 I think", "rejected": "it is 5 I think"}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = PairwiseDataset.from_dataset(
        ...         "train", [row], 20, folder, tokenizer=embedded_model_path()
        ...     )
        ...     data.batch_size, data.chosen_data.input_ids.shape
        (torch.Size([1]), torch.Size([1, 20]))
    """

    chosen_data: RewardData
    rejected_data: RewardData

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
    ) -> PairwiseDataset:
        """Tokenize a dataset, or find its memory-mapped copy.

        Args:
            split: see :class:`~torchrl_llm.data.TokenizedDatasetLoader`, as for the others.
            dataset_name: rows with ``prompt``, ``chosen`` and ``rejected``;
                ``CarperAI/openai_summarize_comparisons`` by default.
            max_length: most tokens of a row; longer ones are cut.
            root_dir: where copies are kept.
            from_disk: read with ``datasets.load_from_disk``.
            num_workers: threads that tokenize.
            tokenizer: a tokenizer or its name; gpt2's by default.
        """
        data = TokenizedDatasetLoader(
            split,
            max_length,
            DEFAULT_DATASET if dataset_name is None else dataset_name,
            TensorDictTokenizer,
            pre_tokenization_hook,
            root_dir=root_dir,
            from_disk=from_disk,
            num_workers=num_workers,
            tokenizer=tokenizer,
        ).load()
        half = len(data) // 2  # views of the memory-mapped tensors: nothing is copied
        sides = [RewardData(**part, batch_size=[half]) for part in (data[:half], data[half:])]
        return cls(chosen_data=sides[0], rejected_data=sides[1], batch_size=[half])


def pre_tokenization_hook(
    dataset: Iterable[Mapping[str, Any]], min_length: int = 5
) -> list[dict[str, str]]:
    r"""Texts of comparisons: first all chosen answers, then all rejected ones, each to its prompt.

    Pairs whose answers are equal, or one of them shorter than ``min_length`` words, are left out.

    Args:
        dataset: rows with ``prompt``, ``chosen`` and ``rejected``.
        min_length: least number of words of an answer.

    Returns:
        Rows with ``text``.

    Raises:
        DataError: naming the row that lacks a column or whose answers are no strings.

    Example:
        >>> row = {"prompt": "2+2", "chosen": "it is 4", "rejected": "it is 5"}
        >>> pre_tokenization_hook([row], min_length=3)
        [{'text': '2+2\nit is 4'}, {'text': '2+2\nit is 5'}]
    """
    chosen, rejected = [], []
    for index, row in enumerate(dataset):
        missing = [name for name in ("prompt", "chosen", "rejected") if name not in row]
        if missing:
            raise DataError(f"row {index} lacks the column {missing[0]!r}; it has {sorted(row)}")
        better, worse = row["chosen"], row["rejected"]
        if not isinstance(better, str) or not isinstance(worse, str):
            raise DataError(f"row {index}: the answers must be strings, got {better!r}, {worse!r}")
        if better == worse or min(len(better.split()), len(worse.split())) < min_length:
            continue
        chosen.append({"text": f"{row['prompt']}\n{better}"})
        rejected.append({"text": f"{row['prompt']}\n{worse}"})
    return chosen + rejected
