"""Batches of a tokenized dataset, each pass in another order.

Next: :mod:`torchrl_llm.compat.tokenized_dataset` makes the data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrl_llm.errors import ConfigError, DataError


def create_infinite_iterator(iterator: Iterable[Any]) -> Iterator[Any]:
    """Iterate again and again.

    Args:
        iterator: what can be iterated more than once (a loader, a list), not a generator.

    Raises:
        DataError: when a pass gives nothing, which would go on for ever.

    Example:
        >>> endless = create_infinite_iterator([1, 2])
        >>> [next(endless) for _ in range(5)]
        [1, 2, 1, 2, 1]
    """
    while True:
        empty = True
        for item in iterator:
            empty = False
            yield item
        if empty:
            raise DataError("there is nothing (more) to iterate over; a generator runs out")


class _Batches:
    """Batches of a dataset, each pass in another order; what is left over is dropped."""

    def __init__(
        self, data: Any, batch_size: int, device: Any, prefetch: int, seed: int | None
    ) -> None:
        self.data = data
        self.batch_size = batch_size
        self.device = device
        self.prefetch = prefetch
        seed = int(torch.randint(2**31, ())) if seed is None else seed
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.data) // self.batch_size

    def _batch(self, index: Tensor) -> Any:
        return self.data[index].to(self.device)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.data), generator=self.generator)
        parts = iter(order[: len(self) * self.batch_size].split(self.batch_size))
        if not self.prefetch:
            yield from map(self._batch, parts)
            return
        with ThreadPoolExecutor(self.prefetch) as pool:
            waiting: deque = deque()
            for index in parts:
                waiting.append(pool.submit(self._batch, index))
                if len(waiting) > self.prefetch:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()


def get_dataloader(
    batch_size: int,
    block_size: int,
    tensorclass_type: Any,
    device: Any,
    dataset_name: Any = None,
    infinite: bool = True,
    prefetch: int = 0,
    split: str = "train",
    root_dir: str | Path | None = None,
    from_disk: bool = False,
    num_workers: int | None = None,
    *,
    tokenizer: Any = None,
    seed: int | None = None,
) -> Iterable[Any]:
    """Batches of a tokenized dataset.

    Args:
        batch_size: rows of a batch; what is left over at the end of a pass is dropped.
        block_size: most tokens of a row.
        tensorclass_type: :class:`~torchrl_llm.data.PromptData`,
            :class:`~torchrl_llm.data.PairwiseDataset` or another class with their ``from_dataset``.
        device: where batches go.
        dataset_name: the data; that of the class by default.
        infinite: go on with another pass for ever.
        prefetch: batches that are read ahead, each by a thread.
        split: split of the data.
        root_dir: see :class:`~torchrl_llm.data.TokenizedDatasetLoader`, as for the next four.
        from_disk: read with ``datasets.load_from_disk``.
        num_workers: threads that tokenize.
        tokenizer: a tokenizer or its name; gpt2's by default.
        seed: of the order; drawn from torch's generator by default.

    Returns:
        Instances of the class, ``[batch_size]``.

    Raises:
        ConfigError: for a negative ``prefetch``.
        DataError: when the data holds less than a batch.

    Example:
        >>> import tempfile
        >>> from torchrl_llm.assets import embedded_model_path
        >>> from torchrl_llm.data import PromptData
        >>> rows = [{"prompt": f"{n}+1=", "label": str(n + 1)} for n in range(6)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     batches = get_dataloader(
        ...         4, 8, PromptData, "cpu", rows, root_dir=folder, tokenizer=embedded_model_path()
        ...     )
        ...     next(batches).prompt_rindex.tolist()
        [3, 3, 3, 3]
    """
    if prefetch < 0:
        raise ConfigError(f"prefetch must not be negative, got {prefetch}")
    data = tensorclass_type.from_dataset(
        split=split,
        dataset_name=dataset_name,
        max_length=block_size,
        root_dir=root_dir,
        from_disk=from_disk,
        num_workers=num_workers,
        tokenizer=tokenizer,
    )
    if batch_size < 1 or len(data) < batch_size:
        raise DataError(f"{len(data)} rows make no batch of {batch_size}")
    batches = _Batches(data, batch_size, device, prefetch, seed)
    return create_infinite_iterator(batches) if infinite else batches
