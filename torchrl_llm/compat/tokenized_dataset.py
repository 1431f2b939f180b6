"""Datasets of text as memory-mapped token ids.

For training on data that lies there: reward models, supervised stages, prompts for
:class:`~torchrl_llm.data.RolloutFromModel`. Conversations that are sampled go another way: an
environment over a dataset (:class:`torchrl_llm.envs.DatasetChatEnv`).

Next: :mod:`torchrl_llm.compat.infinite_loader` (batches), :mod:`torchrl_llm.compat.prompt_data` (a
prompt and its label), :mod:`torchrl_llm.compat.reward_data` (a chosen and a rejected answer),
:mod:`torchrl_llm.data.row_files` (where rows come from).

Shape legend: ``N`` rows, ``T`` tokens of a row.
"""

from __future__ import annotations

import copy
import hashlib
import json
import marshal
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from transformers import AutoTokenizer

from torchrl_llm._imports import require
from torchrl_llm.compat.infinite_loader import create_infinite_iterator, get_dataloader
from torchrl_llm.data.ragged import ragged_rows
from torchrl_llm.data.row_files import load_rows
from torchrl_llm.errors import ConfigError, DataError, TokenizerError

__all__ = [
    "TensorDictTokenizer",
    "TokenizedDatasetLoader",
    "create_infinite_iterator",
    "get_dataloader",
]

Padding = Literal["max_length", "longest", "do_not_pad"] | bool
_ROWS_AT_A_TIME = 1000


class TensorDictTokenizer:
    """Makes token ids of the text in a sample.

    Args:
        tokenizer: a Hugging Face tokenizer. Without a padding token it pads with its end of
            sequence; masks come from lengths.
        max_length: most tokens of a row.
        key: where a sample has its text.
        padding: ``"max_length"``, ``"longest"`` (or ``True``), or ``False`` for rows as they are.
        truncation: cut rows at ``max_length``.
        return_tensordict: return a tensordict; else a dict of lists.
        device: of the tensordict.

    Raises:
        ConfigError: for an unknown padding, or a device without a tensordict.
        TokenizerError: when padding needs an id that the tokenizer does not have.

    Example:
        >>> from torchrl_llm.assets import embedded_model_path
        >>> tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
        >>> process = TensorDictTokenizer(tokenizer, max_length=6)
        >>> td = process({"text": ["1+2", "3"]})
        >>> td["input_ids"].shape, td["attention_mask"].tolist()
        (torch.Size([2, 6]), [[1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]])
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        key: str = "text",
        padding: Padding = "max_length",
        truncation: bool = True,
        return_tensordict: bool = True,
        device: Any = None,
    ) -> None:
        if padding not in (True, False, "max_length", "longest", "do_not_pad"):
            raise ConfigError(f"padding must be 'max_length', 'longest' or a bool, got {padding!r}")
        if device is not None and not return_tensordict:
            raise ConfigError("device has no effect with return_tensordict=False")
        if max_length < 1:
            raise ConfigError(f"max_length must be at least 1 token, got {max_length}")
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.key = key
        self.padding = padding
        self.truncation = truncation
        self.return_tensordict = return_tensordict
        self.device = device

    def __call__(self, sample: Mapping[str, Any]) -> TensorDictBase | dict[str, Any]:
        """Tokenize one sample, or a batch of them.

        Args:
            sample: its ``key`` holds a string, or a list of strings.

        Returns:
            ``input_ids`` and ``attention_mask``, int64 ``[T]`` or ``[N, T]``; ragged rows where
            they are not padded.
        """
        texts = self._column(sample, self.key)
        single = isinstance(texts, str)
        rows = self._encode([texts] if single else list(texts))
        return self._finish(rows, {}, single, self.tokenizer.padding_side)

    def _column(self, sample: Mapping[str, Any], key: str) -> str | Sequence[str]:
        if key not in sample:
            raise DataError(f"a sample lacks {key!r}; it has {sorted(sample)}")
        value = sample[key]
        if isinstance(value, str):
            return value
        values = list(value) if isinstance(value, Iterable) else [value]
        wrong = [v for v in values if not isinstance(v, str)]
        if wrong or not values:
            got = type(wrong[0]).__name__ if wrong else "none at all"
            raise DataError(f"{key!r} must hold strings, got {got}")
        return values

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [self._cut(ids) for ids in self.tokenizer(texts)["input_ids"]]

    def _cut(self, ids: list[int]) -> list[int]:
        if not self.truncation:
            return ids
        left = self.tokenizer.truncation_side == "left"
        return ids[-self.max_length :] if left else ids[: self.max_length]

    def _finish(
        self, rows: list[list[int]], more: Mapping[str, list[Any]], single: bool, side: str
    ) -> TensorDictBase | dict[str, Any]:
        masks = [[1] * len(ids) for ids in rows]
        padded = self.padding not in (False, "do_not_pad")
        if padded:
            target = max((len(ids) for ids in rows), default=0)
            target = max(target, self.max_length if self.padding == "max_length" else 0)
            pad = _pad_id(self.tokenizer)
            rows = [_filled(ids, target, pad, side) for ids in rows]
            masks = [_filled(mask, target, 0, side) for mask in masks]
        columns = {"input_ids": rows, "attention_mask": masks, **more}
        if not self.return_tensordict:
            return {name: column[0] for name, column in columns.items()} if single else columns
        # Ids by their type, for a row may be empty.
        kinds = {"input_ids": torch.int64, "attention_mask": torch.int64}
        tensors = {
            name: [torch.tensor(value, dtype=kinds.get(name)) for value in column]
            for name, column in columns.items()
        }
        if single:
            return TensorDict({k: v[0] for k, v in tensors.items()}, device=self.device)
        if not padded:
            return ragged_rows(tensors).to(self.device)
        dense = {name: torch.stack(column) for name, column in tensors.items()}
        return TensorDict(dense, batch_size=[len(rows)], device=self.device)


def _pad_id(tokenizer: Any) -> int:
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if pad is None:
        raise TokenizerError("padding needs a tokenizer with a pad or an eos token")
    return pad


def _filled(ids: list[int], length: int, value: int, side: str) -> list[int]:
    gap = [value] * (length - len(ids))
    return gap + ids if side == "left" else ids + gap


class TokenizedDatasetLoader:
    """Tokenizes a dataset once and keeps it memory-mapped on disk.

    The copy lies under ``root_dir``, in a folder named after dataset, split, length and a digest
    of everything that decides its content (the file's size and time, tokenizer, functions): other
    data, another tokenizer or another hook make another copy. It is written aside and moved, so
    that what is there is whole.

    Args:
        split: name of the split; a local file or list is one split. Of a split whose name begins
            with ``valid`` only the first ``valid_size`` rows are taken.
        max_length: most tokens of a row.
        dataset_name: what :func:`~torchrl_llm.data.row_files.load_rows` reads: a dataset on the
            hub, a JSON-lines file, a list of dicts; or with ``from_disk`` a folder that
            ``datasets`` saved.
        tokenizer_fn: class of the process function, called as
            ``tokenizer_fn(tokenizer, max_length=max_length)``, such as
            :class:`TensorDictTokenizer`. Rows for which it writes ``valid_sample`` as false are
            left out.
        pre_tokenization_hook: rows to rows, before they are tokenized.
        root_dir: where copies are kept; ``~/.cache/torchrl_llm/data`` by default.
        from_disk: read with ``datasets.load_from_disk``.
        valid_size: most rows of a validation split.
        num_workers: threads that tokenize, each with a copy of the tokenizer; none by default, for
            a fast tokenizer uses several cores by itself.
        tokenizer_class: class that loads the tokenizer; ``AutoTokenizer`` by default.
        tokenizer_model_name: what it loads; ``"gpt2"`` by default.
        tokenizer: a tokenizer, or its name, instead of these two.

    Raises:
        ConfigError: for a tokenizer that is given twice.
        DataError: for data that is missing, malformed, or of which no row is left.

    Example:
        >>> from torchrl_llm.assets import embedded_model_path
        >>> rows = [{"text": "1+2"}, {"text": "3"}]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     loader = TokenizedDatasetLoader(
        ...         "train", 4, rows, TensorDictTokenizer, root_dir=folder,
        ...         tokenizer=embedded_model_path(),
        ...     )
        ...     loader.load()["attention_mask"].sum(1).tolist()
        [3, 1]
    """

    def __init__(
        self,
        split: str,
        max_length: int,
        dataset_name: Any,
        tokenizer_fn: Callable[..., Callable[[Mapping[str, Any]], Any]],
        pre_tokenization_hook: Callable[[Any], Sequence[Mapping[str, Any]]] | None = None,
        root_dir: str | Path | None = None,
        from_disk: bool = False,
        valid_size: int = 2000,
        num_workers: int | None = None,
        tokenizer_class: Any = None,
        tokenizer_model_name: str | None = None,
        *,
        tokenizer: Any = None,
    ) -> None:
        if tokenizer is not None and (tokenizer_class, tokenizer_model_name) != (None, None):
            raise ConfigError("pass tokenizer, or tokenizer_class and tokenizer_model_name")
        if tokenizer is None or isinstance(tokenizer, (str, Path)):
            load = AutoTokenizer if tokenizer_class is None else tokenizer_class
            name = tokenizer or tokenizer_model_name or "gpt2"
            tokenizer = load.from_pretrained(name, trust_remote_code=False)
        self.split = split
        self.max_length = max_length
        self.dataset_name = dataset_name
        self.tokenizer_fn = tokenizer_fn
        self.pre_tokenization_hook = pre_tokenization_hook
        home = Path.home() / ".cache" / "torchrl_llm" / "data"
        self.root_dir = home if root_dir is None else Path(root_dir).expanduser()
        self.from_disk = from_disk
        self.valid_size = valid_size
        self.num_workers = num_workers or 0
        self.tokenizer = tokenizer

    @property
    def folder(self) -> Path:
        """Where the copy is, or will be."""
        named = isinstance(self.dataset_name, (str, Path))
        name = Path(self.dataset_name).name.partition(".")[0] if named else "rows"
        return self.root_dir / name / self.split / f"{self.max_length}-{self._digest()}"

    def load(self) -> TensorDict:
        """The tokenized data, ``[N]``, memory-mapped; made first where there is no copy yet."""
        folder = self.folder
        if not folder.exists():
            self._store(self._tokenized(), folder)
        return TensorDict.load_memmap(folder)

    # -- making a copy ----------------------------------------------------------------------------

    def _rows(self) -> Sequence[Mapping[str, Any]]:
        if self.from_disk:
            feature = f"loading {self.dataset_name!r} from disk"
            datasets = require("datasets", extra="data", feature=feature)
            try:
                rows = datasets.load_from_disk(str(self.dataset_name))[self.split]
            except (OSError, KeyError) as error:
                raise DataError(
                    f"cannot read the split {self.split!r} of {self.dataset_name!r}: {error}"
                ) from error
        else:
            rows = load_rows(self.dataset_name, split=self.split)
        if self.split.startswith("valid"):
            rows = [rows[i] for i in range(min(self.valid_size, len(rows)))]
        return rows if self.pre_tokenization_hook is None else self.pre_tokenization_hook(rows)

    def _tokenized(self) -> TensorDictBase:
        rows = self._rows()
        starts = range(0, len(rows), _ROWS_AT_A_TIME)
        samples = (
            _columns([rows[i] for i in range(start, min(start + _ROWS_AT_A_TIME, len(rows)))])
            for start in starts
        )
        parts = list(self._map(samples))
        if sum(len(part) for part in parts) == 0:
            raise DataError(
                f"no row of {self.dataset_name!r}, split {self.split!r}, is left to train on"
            )
        return torch.cat(parts)

    def _map(self, samples: Iterable[dict[str, list]]) -> Iterable[TensorDictBase]:
        if self.num_workers < 2:
            process = self.tokenizer_fn(self.tokenizer, max_length=self.max_length)
            return (_valid_rows(process(sample)) for sample in samples)
        own = threading.local()  # a tokenizer must not be called by two threads at once

        def work(sample: dict[str, list]) -> TensorDictBase:
            if not hasattr(own, "process"):
                tokenizer = copy.deepcopy(self.tokenizer)
                own.process = self.tokenizer_fn(tokenizer, max_length=self.max_length)
            return _valid_rows(own.process(sample))

        with ThreadPoolExecutor(self.num_workers) as pool:
            return list(pool.map(work, samples))

    @staticmethod
    def _store(data: TensorDictBase, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
        try:
            data.memmap(aside)
            aside.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster, with the same content
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    # -- the name of a copy -----------------------------------------------------------------------

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for part in (
            _source_id(self.dataset_name),
            self.split,
            self.valid_size if self.split.startswith("valid") else None,
            self.from_disk,
            _tokenizer_id(self.tokenizer),
            _function_id(self.tokenizer_fn),
            _function_id(self.pre_tokenization_hook),
        ):
            digest.update(repr(part).encode())
        return digest.hexdigest()[:12]


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    wrong = next((row for row in rows if not isinstance(row, Mapping)), None)
    if wrong is not None:
        raise DataError(f"a row of the dataset must be a dict, got {type(wrong).__name__}")
    names = rows[0].keys()
    missing = next(((i, n) for i, row in enumerate(rows) for n in names if n not in row), None)
    if missing is not None:
        raise DataError(f"row {missing[0]} lacks the column {missing[1]!r}")
    return {name: [row[name] for row in rows] for name in names}


def _valid_rows(data: Any) -> TensorDictBase:
    if not isinstance(data, TensorDictBase):
        columns = {name: torch.as_tensor(value) for name, value in dict(data).items()}
        data = TensorDict(columns, batch_size=[len(next(iter(columns.values())))])
    valid = data.get("valid_sample", None)
    return data if valid is None else data[valid].exclude("valid_sample")


def _source_id(source: Any) -> Any:
    if isinstance(source, (str, Path)):
        path = Path(source).expanduser()
        if not path.exists():
            return str(source)
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        stats = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        return stats
    digest = hashlib.sha256()
    for row in (source[i] for i in range(len(source))):
        digest.update(json.dumps(row, default=str, sort_keys=True).encode())
    return digest.hexdigest()


def _tokenizer_id(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else None
    if content is None:
        content = backend.to_str()
    sides = (tokenizer.padding_side, tokenizer.truncation_side)
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return hashlib.sha256(content.encode()).hexdigest(), sides, ids


def _function_id(function: Any) -> Any:
    if function is None:
        return None
    target = function.__call__ if isinstance(function, type) else function
    code = getattr(target, "__code__", None)
    body = None if code is None else hashlib.sha256(marshal.dumps(code)).hexdigest()
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return getattr(function, "__module__", None), name, body
