"""Transform that fills resets with rows of a dataset: :class:`DataLoadingPrimer`.

It draws a row only for the conversations that start, returns each row ``repeats`` times under one
``group_id``, and can stop and continue at any row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Annotated, Any, Literal

import torch
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)
from torch import Tensor
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform

from torchrl_llm._checked import Ge, checked
from torchrl_llm._ray import RayService, check_service
from torchrl_llm._registry import FullSignature
from torchrl_llm.data.column import Column
from torchrl_llm.data.row_order import RowOrder
from torchrl_llm.data.specs import ColumnSpec
from torchrl_llm.data.stacking import as_nested_tensor, as_padded_tensor
from torchrl_llm.envs.ids import IdCounter
from torchrl_llm.errors import ConfigError, DataError

Row = Mapping[str, Any]
StackMethod = (
    Callable[[list[TensorDictBase]], TensorDictBase]
    | Literal["as_nested_tensor", "as_padded_tensor"]
)


_STACK_METHODS = {"as_nested_tensor": as_nested_tensor, "as_padded_tensor": as_padded_tensor}


class _RowFeed:
    """Endless rows of a data loader, from a position that can be saved."""

    def __init__(
        self, loader: Iterable[Any] | Callable[[], Iterable[Any]], *, lazy: bool, batch_size: Any
    ) -> None:
        self._source, self._lazy, self._batch_size = loader, lazy, batch_size
        self._loader = None if lazy else loader
        self._clear()

    @property
    def loader(self) -> Any:
        if self._loader is None:
            self._loader = self._source()
        return self._loader

    def restart(self, seed: int | None = None) -> None:
        if seed is not None and hasattr(self.loader, "reset"):
            self.loader.reset(seed)
        elif hasattr(self._loader, "reset"):
            self._loader.reset()
        self._clear()

    def _clear(self) -> None:
        self._iterator: Iterator[Any] | None = None
        self._element: list[Row] = []
        self._offset = 0
        self._num_elements = 0
        self.num_epochs = 0
        self._before: Any = None

    def peek(self) -> Row:
        if self._offset == len(self._element):
            self._fetch()
        return self._element[self._offset]

    def take(self) -> Row:
        row = self.peek()
        self._offset += 1
        return row

    def _fetch(self) -> None:
        for attempt in range(2):
            if self._iterator is None:
                self._iterator = iter(self.loader)
                self._num_elements = 0
            before = self.loader.state_dict() if hasattr(self.loader, "state_dict") else None
            try:
                element = next(self._iterator)
            except StopIteration:
                if attempt:
                    break
                self._iterator = None
                self.num_epochs += 1
                continue
            self._before, self._offset = before, 0
            self._num_elements += 1
            self._element = self._rows(element)
            if self._element:
                return
        raise DataError(
            "the data loader has no rows; an iterator that can be read only once cannot start a "
            "second epoch: pass a sequence, a DataLoader, or a dataloader_factory"
        )

    def _rows(self, element: Any) -> list[Row]:
        if is_tensor_collection(element):
            rows = element.unbind(0) if element.batch_dims else (element,)
            return [_row_of_tensordict(row) for row in rows]
        if not isinstance(element, Mapping):
            raise DataError(
                f"a data loader must give dicts or tensordicts, got {type(element).__name__}"
            )
        if not self._is_batch(element):
            return [element]
        lengths = {name: len(values) for name, values in element.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"the columns of a batch must have one length, got {lengths}")
        return [
            dict(zip(element, values, strict=True))
            for values in zip(*element.values(), strict=True)
        ]

    def _is_batch(self, element: Mapping[str, Any]) -> bool:
        # A string is one value; in a batch each column is a list.
        if any(isinstance(value, str) for value in element.values()):
            return False
        if hasattr(self.loader, "batch_size") or self._batch_size is not None:
            return bool(getattr(self.loader, "batch_size", self._batch_size))
        return _holds_columns(element)

    def state_dict(self) -> dict[str, Any]:
        self.peek()  # a position refers to the element that holds the next row
        return self._position()

    def _position(self) -> dict[str, Any]:
        return {"loader": self._before, "element": self._num_elements - 1, "offset": self._offset}

    def __getstate__(self) -> dict[str, Any]:
        # Iterators are not sent to workers; positions are. A factory builds a new loader there.
        return {
            "source": self._source,
            "lazy": self._lazy,
            "batch_size": self._batch_size,
            "position": None if self._iterator is None else self._position(),
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["source"], lazy=state["lazy"], batch_size=state["batch_size"])
        if state["position"] is not None:
            self.load_state_dict(state["position"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._clear()
        if state["loader"] is not None:
            self.loader.load_state_dict(state["loader"])
        else:
            self._iterator = iter(self.loader)
            for _ in range(state["element"]):
                next(self._iterator)
        self._iterator = self._iterator or iter(self.loader)
        self._num_elements = state["element"]
        self._fetch()
        self._offset = state["offset"]


def _holds_columns(element: Mapping[str, Any]) -> bool:
    """Whether an element is a batch (each value has an entry per row), not one row with lists."""
    columns = [value for value in element.values() if getattr(value, "ndim", None) != 0]
    if len(columns) < len(element) or not all(isinstance(v, Sized) for v in columns):
        return False
    first = [value[0] for value in columns if isinstance(value, (list, tuple)) and value]
    if any(isinstance(value, Mapping) and "role" in value for value in first):
        return False  # one conversation
    texts = any(
        isinstance(v, str) or (isinstance(v, list) and v and isinstance(v[0], Mapping))
        for v in first
    )
    return texts and len({len(value) for value in columns}) == 1


def _row_of_tensordict(row: TensorDictBase) -> Row:
    values = {}
    for key, value in row.items():
        if isinstance(value, NonTensorData):
            values[key] = value.data
        else:
            values[key] = value.tolist() if isinstance(value, NonTensorStack) else value
    return values


class DataLoadingPrimer(RayService, Transform):
    """Fills the reset of an environment with rows of a dataset.

    Each row's columns (``query``, ``answer``, ...) become keys of the tensordict, next to
    ``"group_id"``, int64 ``[B]``. All repeats of one drawn row share this id, and no other row has
    it: ids are unique over epochs, workers and resumed runs.

    Args:
        dataloader: an iterable of rows (dicts), of batches of rows (dicts of columns, as a
            ``torch.utils.data.DataLoader`` yields them), or of tensordicts. It is iterated again
            when it ends.
        dataloader_factory: builds the loader when it is first needed; give exactly one of
            ``dataloader`` and this.
        primers: specs of the columns; taken from the first row if not given.
        stack_method: how tensors of the rows are stacked: ``"as_padded_tensor"`` or
            ``"as_nested_tensor"`` (the functions of these names), or a function of a list of row
            tensordicts that gives one tensordict. ``torch.stack`` if not given.
        batch_size: ``B`` of the environment, as in TorchRL; if the loader has no ``batch_size``,
            this argument declares that elements are batches of rows. An element is one row if
            ``loader.batch_size`` is 0 or None, or if a value is a string. If neither decides, an
            element is a batch if all its values are lists or tensors of one length, with a list of
            texts or of conversations among them. The batch size of tensordicts decides it.
        repeats: number of conversations that each row starts, one after the other; ``None`` for 1.
        device: device of the tensors; the environment's if not given.
        group_repeats: all repeats of a row start in the same reset. The batch must be a multiple of
            ``repeats``.
        use_ray_service: make a :class:`RayDataLoadingPrimer`, with its arguments.
        service_backend: ``"ray"`` does the same; ``"direct"`` is the default.
        service_backend_options: must be empty; the options of the actor are separate arguments.
        worker_id: number of this worker, see ``IdCounter``.

    Raises:
        ConfigError: for impossible arguments, and for ``group_repeats`` with a batch that is not a
            multiple of ``repeats``.
        DataError: for a loader that is empty or yields something other than rows.

    ``state_dict()`` holds the position: a loader with ``state_dict`` of its own, such as
    :class:`~torchrl_llm.data.row_files.RowLoader`, continues exactly; any other loader is started
    again and read up to the saved position. This is exact if its order is always the same.

    Example:
        >>> from torchrl_llm.envs import ChatEnv
        >>> rows = [{"query": "1 + 1 =", "answer": "2"}, {"query": "2 + 2 =", "answer": "4"}]
        >>> primer = DataLoadingPrimer(rows, repeats=2, worker_id=0)
        >>> td = ChatEnv(batch_size=(3,)).append_transform(primer).reset()
        >>> list(td["query"]), td["group_id"].tolist()
        (['1 + 1 =', '1 + 1 =', '2 + 2 ='], [0, 0, 1])
    """

    __signature__ = FullSignature()
    group_key = "group_id"

    in_ray = "torchrl_llm.envs.transforms.ray_dataloading.RayDataLoadingPrimer"

    @checked
    def __init__(
        self,
        dataloader: Iterable[Any] | None = None,
        *,
        dataloader_factory: Callable[[], Iterable[Any]] | None = None,
        primers: Composite | None = None,
        stack_method: StackMethod | None = None,
        batch_size: int | torch.Size | None = None,
        repeats: Annotated[int, Ge(1)] | None = None,
        device: torch.device | None = None,
        group_repeats: bool = False,
        use_ray_service: bool = False,
        service_backend: Literal["direct", "ray"] | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
        worker_id: int | None = None,
    ) -> None:
        super().__init__()
        check_service(service_backend_options)
        if (dataloader is None) == (dataloader_factory is None):
            raise ConfigError("pass exactly one of dataloader and dataloader_factory")
        if batch_size is not None and not isinstance(batch_size, int):
            batch_size = torch.Size(batch_size).numel() if len(batch_size) else 0
        self._feed = _RowFeed(
            dataloader if dataloader_factory is None else dataloader_factory,
            lazy=dataloader_factory is not None,
            batch_size=batch_size,
        )
        if isinstance(stack_method, str):
            stack_method = _STACK_METHODS[stack_method]
        self.stack_method = stack_method
        self.repeats = 1 if repeats is None else repeats
        self.group_repeats = group_repeats
        self.dataloader_factory = dataloader_factory
        self._batch_size = batch_size
        self.device = device
        self._primers = primers
        self._groups = IdCounter("group", worker_id)
        self._example: Row | None = None
        self._row: Row | None = None
        self._group_id = -1
        self._repeats_left = 0
        self._num_drawn = 0
        self._first_epoch: int | None = None

    @property
    def dataloader(self) -> Any:
        """The loader; a factory builds it when it is first needed."""
        return self._feed.loader

    @property
    def batch_size(self) -> torch.Size:
        """The given batch size or the loader's, times ``repeats`` if they are grouped."""
        size = self._batch_size
        size = (getattr(self.dataloader, "batch_size", None) if size is None else size) or 0
        if self.group_repeats and self.repeats > 1:
            size = max(size, 1) * self.repeats
        return torch.Size((size,) if size else ())

    # Specs

    @property
    def primers(self) -> Composite:
        """Specs of the columns."""
        size = self.batch_size if self.parent is None else self.parent.batch_size
        return Composite(self._column_specs(size), shape=size, device=self.device)

    @property
    def data_keys(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple((self._first_row() if self._primers is None else self._primers).keys())

    @property
    def num_rows(self) -> int | None:
        """Rows of an epoch; ``None`` if the loader has no length."""
        loader = self._feed.loader
        rows = getattr(loader, "rows", getattr(loader, "dataset", loader))
        return len(rows) if hasattr(rows, "__len__") else None

    @property
    def order(self) -> RowOrder:
        """The order that follows results, to record them.

        Raises:
            ConfigError: the loader has none.
        """
        order = getattr(self.dataloader, "order", None)
        if order is None:
            raise ConfigError(
                "the order of the rows does not follow results; pass an order to RowLoader or to "
                "the environment"
            )
        return order

    @property
    def first_epoch(self) -> int | None:
        """Number of conversations in the first epoch since the data was started over.

        ``None`` until the second epoch begins. Repeats count.
        """
        return self._first_epoch

    def _first_row(self) -> Row:
        # The first row determines the names and specs of the columns for all later rows.
        if self._example is None:
            self._example = self._feed.peek()
        return self._example

    def check_batch(self, size: int) -> None:
        """Raise ``ConfigError`` where ``group_repeats`` cannot be kept for ``size`` rows."""
        if self.group_repeats and size % self.repeats:
            raise ConfigError(
                f"group_repeats needs a batch that is a multiple of repeats={self.repeats}, "
                f"got {size}"
            )

    def _column_specs(self, batch_size: torch.Size) -> dict[str, Any]:
        size = tuple(batch_size)
        specs: dict[str, Any] = {
            self.group_key: Unbounded(shape=size, dtype=torch.int64, device=self.device)
        }
        if self._primers is not None:
            primers = self._primers
            if primers.shape[: len(size)] != batch_size:
                primers = primers.expand(*size, *primers.shape)
            return specs | dict(primers.items())
        for name, value in self._first_row().items():
            if isinstance(value, Tensor):
                shape = (-1,) * value.ndim if self.stack_method else value.shape
                specs[name] = Unbounded(
                    shape=(*size, *shape), dtype=value.dtype, device=self.device
                )
            else:
                specs[name] = ColumnSpec((*size, -1), example_data=value)
        return specs

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the columns and ``group_id``."""
        self.check_batch(observation_spec.shape.numel())
        for name, spec in self._column_specs(observation_spec.shape).items():
            observation_spec[name] = spec
        return observation_spec

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """Adds the columns and ``group_id``: they are input of the step too."""
        for name, spec in self._column_specs(state_spec.shape).items():
            state_spec[name] = spec
        return state_spec

    # Rows

    def reset_dataloader(self, seed: int | None = None) -> DataLoadingPrimer:
        """Start the data from the beginning, and drop repeats that have not started yet.

        Args:
            seed: a new seed, for loaders whose ``reset`` takes one.
        """
        self._feed.restart(seed)
        self._repeats_left = 0
        self._num_drawn, self._first_epoch = 0, None
        return self

    def _draw(self, num: int) -> tuple[list[Row], Tensor]:
        self._first_row()
        rows, ids = [], []
        for _ in range(num):
            if not self._repeats_left:
                self._row = self._feed.take()
                if self._feed.num_epochs and self._first_epoch is None:
                    self._first_epoch = self._num_drawn
                self._group_id = self._groups.next_id()
                self._repeats_left = self.repeats
            self._repeats_left -= 1
            self._num_drawn += 1
            rows.append(self._row)
            ids.append(self._group_id)
        return rows, torch.tensor(ids, dtype=torch.int64, device=self.device)

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        if tensordict is None:
            tensordict = TensorDict(batch_size=self.parent.batch_size, device=self.parent.device)
        mask = tensordict.get("_reset", None)
        size = tensordict.batch_size.numel()
        chosen = range(size) if mask is None else mask.reshape(size, -1).any(-1).nonzero().flatten()
        chosen = list(chosen) if mask is None else chosen.tolist()
        if not chosen:
            return tensordict
        rows, ids = self._draw(len(chosen))
        for name, value in self._columns(rows).items():
            tensordict.set(name, self._place(value, chosen, size))
        tensordict.set(self.group_key, self._place(ids, chosen, size))
        return tensordict

    def _columns(self, rows: list[Row]) -> dict[str, Any]:
        names = self.data_keys
        for row in rows:
            missing = [name for name in names if name not in row]
            if missing:
                raise DataError(f"a row of the dataset lacks {missing[0]!r}; it has {sorted(row)}")
        columns: dict[str, Any] = {}
        tensors = [name for name in names if isinstance(rows[0][name], Tensor)]
        if tensors:
            parts = [TensorDict({name: row[name] for name in tensors}) for row in rows]
            try:
                stacked = (self.stack_method or torch.stack)(parts)
            except RuntimeError as error:
                raise DataError(
                    f"the tensors {tensors} of the rows cannot be stacked; pass "
                    "stack_method=as_padded_tensor for rows of different lengths"
                ) from error
            columns.update((name, stacked.get(name).to(self.device)) for name in tensors)
        for name in names:
            if name not in columns:
                columns[name] = Column.of(row[name] for row in rows)
        return columns

    @staticmethod
    def _place(values: Any, chosen: list[int], size: int) -> Any:
        # Rows that do not start keep their values, because the environment discards these fillers.
        if len(chosen) == size:
            return values
        if isinstance(values, Tensor):
            placed = values.new_zeros((size, *values.shape[1:]))
            placed[chosen] = values
            return placed
        items: list[Any] = [None] * size
        for index, item in zip(chosen, values.tolist(), strict=True):
            items[index] = item
        return Column.of(items)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._carry(tensordict, tensordict_reset)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._carry(tensordict, next_tensordict)

    def _carry(self, source: TensorDictBase, target: TensorDictBase) -> TensorDictBase:
        for name in (*self.data_keys, self.group_key):
            value = source.get(name, None)
            if value is not None and target.get(name, None) is None:
                target.set(name, value.copy() if is_tensor_collection(value) else value)
        return target

    # Resume

    def get_extra_state(self) -> dict[str, Any]:
        """Position in the data, repeats that have not started, and the group counter."""
        return {
            "feed": self._feed.state_dict(),
            "groups": self._groups.state_dict(),
            "row": dict(self._row) if self._repeats_left else None,
            "group_id": self._group_id,
            "repeats_left": self._repeats_left,
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`get_extra_state` was taken."""
        self._feed.load_state_dict(state["feed"])
        self._groups.load_state_dict(state["groups"])
        self._row = state["row"]
        self._group_id, self._repeats_left = state["group_id"], state["repeats_left"]
