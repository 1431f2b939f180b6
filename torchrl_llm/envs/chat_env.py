"""Chat environments: one conversation per row, moved from one turn to the next.

:class:`ChatEnv` starts conversations from a ``query`` and turns the policy's output into the next
prompt. It writes no reward and ends no episode; transforms do this (:mod:`torchrl_llm.rewards`,
:mod:`torchrl_llm.envs.transforms`).

Next: :class:`~torchrl_llm.envs.datasets.DatasetChatEnv` draws the queries from a dataset.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_non_tensor
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import Compose, EnvBase, TransformedEnv

from torchrl_llm.data.chat import Chat
from torchrl_llm.data.column import Column
from torchrl_llm.data.enums import TruncationReason
from torchrl_llm.data.history import History
from torchrl_llm.data.input_modes import formatter_arguments, make_mode
from torchrl_llm.data.row_files import MappedRows, RowLoader, load_rows
from torchrl_llm.data.row_order import RowOrder
from torchrl_llm.data.specs import ColumnSpec
from torchrl_llm.envs.ids import IdCounter
from torchrl_llm.envs.transforms.dataloading import DataLoadingPrimer
from torchrl_llm.envs.transforms.ray_dataloading import RayDataLoadingPrimer
from torchrl_llm.envs.transforms.tokenizer import IncrementalTokenizer
from torchrl_llm.errors import ConfigError, DataError

Mode = Literal["history", "text", "tokens"]


class ChatEnv(EnvBase):
    """Environment of conversations: ``full`` of one turn becomes ``prompt`` of the next turn.

    Reset reads ``query`` and writes ``(input_mode, "prompt")``; step reads ``(input_mode, "full")``
    and writes ``("next", input_mode, "prompt")``. Each row also carries ``"turn"`` (turns of the
    model so far), ``"env_step"`` (steps of the environment so far; turns that only call tools to
    think do not count as steps, see :class:`~torchrl_llm.tools.ToolTransform`) and ``"traj_id"``
    (unique over workers), int64 ``[B]``, and ``"truncation_reason"``, int8 ``[B, 1]``, codes of
    :class:`~torchrl_llm.data.enums.TruncationReason`. ``_step`` and ``_reset`` masks are honoured.

    In history mode the sampled token ids are stored inside the conversations. In text and tokens
    mode they are ``("tokens", "prompt")``, with ``("log_probs", "prompt")`` and ``"trace"``; in
    text mode all three are empty at reset.

    Args:
        input_mode: form of the policy's input: ``"history"``, ``"text"`` or ``"tokens"``.
        batch_size: ``B`` or ``(B,)``, conversations at a time.
        system_prompt: first message of every conversation.
        tokenizer: a Hugging Face tokenizer with a chat template; needed in text and tokens mode and
            for ``with_tokenizer``.
        template_kwargs: ``chat_template``, ``chat_template_name``, ``tools`` or variables of the
            template, for text and tokens mode and for ``with_tokenizer``; otherwise they have no
            effect, and a warning appears.
        system_role: role of the system prompt.
        user_role: role of a ``query`` that is a string.
        policy_role: role of the model's messages; rewards read the messages with this role.
        data_key: the key that reset reads. Its values are strings, lists of message dicts, or
            :class:`~torchrl_llm.data.history.History` rows.
        device: device of the tensors.
        with_tokenizer: append an :class:`~torchrl_llm.envs.transforms.IncrementalTokenizer`, which
            stays the last transform; the result is a ``TransformedEnv``. History mode only.
        worker_id: number of this worker for ``traj_id``, see
            ``IdCounter``.

    Raises:
        ConfigError: for impossible arguments, and at reset without ``query``.
        TemplateError: in text and tokens mode, for a tokenizer without chat template.

    Example:
        >>> env = ChatEnv(batch_size=(1,), system_prompt="Be brief.")
        >>> td = env.reset(TensorDict({"query": "Hi!"}, batch_size=(1,)))
        >>> td["history"].prompt.role
        [['system', 'user']]
        >>> chat = td["history"].prompt.chats[0] + [{"role": "assistant", "content": "Hello"}]
        >>> td["history"].full = History.of([chat])
        >>> td = env.step(td)
        >>> td["next", "history"].prompt.content, td["next", "turn"]
        ([['Be brief.', 'Hi!', 'Hello']], tensor([1]))
    """

    text_key = ("text", "prompt")
    response_key = ("text", "response")
    data_key = "query"

    def __new__(cls, *args: Any, with_tokenizer: bool = False, **kwargs: Any) -> Any:
        """Build the environment, inside an environment with a tokenizer if requested."""
        if with_tokenizer:
            tokenizer = kwargs.pop("tokenizer", None)
            if tokenizer is None:
                raise ConfigError("with_tokenizer=True needs tokenizer=...")
            return cls.with_tokenizer(tokenizer, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        *,
        input_mode: Mode = "history",
        batch_size: int | Sequence[int] | None = None,
        system_prompt: str | None = None,
        tokenizer: Any = None,
        template_kwargs: Mapping[str, Any] | None = None,
        system_role: str = "system",
        user_role: str = "user",
        policy_role: str = "assistant",
        data_key: str | None = None,
        device: torch.device | None = None,
        with_tokenizer: bool = False,
        worker_id: int | None = None,
    ) -> None:
        size = _batch_size(batch_size)
        super().__init__(device=device, batch_size=size)
        self.input_mode = input_mode
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.system_role = system_role
        self.give_system_prompt(system_prompt)
        self.user_role = user_role
        self.policy_role = policy_role
        if data_key is not None:
            self.data_key = data_key
        if self.template_kwargs and input_mode == "history":
            warnings.warn(
                f"template_kwargs {sorted(self.template_kwargs)} have no effect in history mode, "
                "where the policy's wrapper applies the template: pass them there",
                stacklevel=2,
            )
            template_kwargs = None
        self.mode = make_mode(
            input_mode,
            tokenizer=tokenizer,
            template_kwargs=dict(template_kwargs or {}),
            example=self.start("A question?"),
            policy_role=policy_role,
        )
        self._trajectories = IdCounter("trajectory", worker_id)
        self._make_specs(size[0])

    @classmethod
    def with_tokenizer(cls, tokenizer: Any, **kwargs: Any) -> TransformedEnv:
        """A chat environment that also keeps ``("tokens", "prompt")``.

        Args:
            tokenizer: a Hugging Face tokenizer with a chat template.
            kwargs: arguments of :class:`ChatEnv`; history mode only.
        """
        if kwargs.get("input_mode", "history") != "history":
            raise ConfigError("with_tokenizer is for history mode: other modes keep tokens anyway")
        arguments = formatter_arguments(kwargs.pop("template_kwargs", None))
        return _TokenizedEnv(
            cls(tokenizer=tokenizer, **kwargs), IncrementalTokenizer(tokenizer, **arguments)
        )

    @classmethod
    def from_dataloader(cls, dataloader: Iterable[Any], **kwargs: Any) -> DatasetChatEnv:
        """See :meth:`~torchrl_llm.envs.datasets.DatasetChatEnv.from_dataloader`."""
        return DatasetChatEnv.from_dataloader(dataloader, **kwargs)

    def _make_specs(self, size: int) -> None:
        flag = Binary(n=1, shape=(size, 1), dtype=torch.bool, device=self.device)
        done = {name: flag.clone() for name in ("done", "terminated", "truncated")}
        ids = Unbounded(shape=(size,), dtype=torch.int64, device=self.device)
        observation = {
            **self.mode.prompt_specs(size),
            self.data_key: ColumnSpec((size, -1), example_data="A question?"),
            "turn": ids,
            "env_step": ids.clone(),
            "traj_id": ids.clone(),
            "truncation_reason": Unbounded(shape=(size, 1), dtype=torch.int8, device=self.device),
        }
        shape = (size,)
        self.full_observation_spec = Composite(observation, shape=shape, device=self.device)
        self.full_state_spec = self.full_observation_spec.clone()
        self.full_action_spec = Composite(
            self.mode.full_specs(size), shape=shape, device=self.device
        )
        self.full_reward_spec = Composite(shape=shape, device=self.device)
        self.full_done_spec = Composite(done, shape=shape, device=self.device)

    def keep_history(self) -> None:
        """Keep ``("history", "prompt")`` up to date in text and tokens mode too.

        The policy does not read it; transforms that work on messages do. Context strategies call
        this method when they are appended. Call it before the first reset.
        """
        if not self.mode.keeps_history:
            self.mode.keeps_history = True
            self._make_specs(self.batch_size[0])
            self.empty_cache()

    def give_system_prompt(self, text: str | None) -> None:
        """Begin conversations with a different system prompt; call it before the first reset.

        Args:
            text: first message of every conversation; ``None`` for none.
        """
        self.system_prompt = text
        message = {"role": self.system_role, "content": text}
        self._preamble = None if text is None else Chat([message])

    # Reset

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        size = self.batch_size[0]
        queries = None if tensordict is None else tensordict.get(self.data_key, None)
        mask = None if tensordict is None else tensordict.get("_reset", None)
        starts = [True] * size if mask is None else mask.reshape(size, -1).any(-1).tolist()
        if queries is None:
            raise ConfigError(
                f"ChatEnv.reset needs {self.data_key!r}: pass "
                f"TensorDict({{{self.data_key!r}: [...]}}, batch_size={tuple(self.batch_size)}), "
                "or append a DataLoadingPrimer so that conversations can start by themselves"
            )
        items = _rows_of(queries, size)
        chats = [
            self.start(item) if begins else None for item, begins in zip(items, starts, strict=True)
        ]
        out = TensorDict(batch_size=self.batch_size, device=self.device)
        self.mode.reset(out, chats)
        out.set(self.data_key, Column.of(items))
        out.set("turn", torch.zeros(size, dtype=torch.int64, device=self.device))
        out.set("env_step", torch.zeros(size, dtype=torch.int64, device=self.device))
        ids = torch.full((size,), -1, dtype=torch.int64, device=self.device)
        ids[starts] = self._trajectories.take(sum(starts)).to(ids.device)
        out.set("traj_id", ids)
        self._write_flags(out)
        return out

    def start(self, query: Any) -> Chat:
        """The conversation that a row begins with.

        Args:
            query: what reset reads: a string, message dicts, or a conversation.

        Raises:
            DataError: it has a different type, is empty, or has a system message in addition to the
                environment's.
        """
        if isinstance(query, str):
            chat = Chat([{"role": self.user_role, "content": query}])
        elif isinstance(query, Chat):
            chat = query
        elif isinstance(query, Mapping):
            chat = Chat([query])
        elif isinstance(query, (list, tuple)) and all(isinstance(m, Mapping) for m in query):
            chat = Chat(query)
        else:
            raise DataError(
                f"{self.data_key!r} must hold strings, lists of message dicts or History rows, "
                f"got {type(query).__name__}"
            )
        if not chat.messages:
            raise DataError(f"{self.data_key!r} holds an empty conversation")
        if self._preamble is None:
            return chat
        if chat.messages[0].get("role") == self.system_role:
            raise DataError(
                f"{self.data_key!r} holds a conversation with a system message of its own, and "
                "system_prompt is the first message of every conversation; leave one of the two out"
            )
        return self._preamble + chat

    # Step

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        mask = tensordict.get("_step", None)
        stepped = None if mask is None else mask.reshape(self.batch_size[0], -1).any(-1)
        out = TensorDict(batch_size=self.batch_size, device=self.device)
        self.mode.step(tensordict, out, None if stepped is None else stepped.tolist())
        for name in ("turn", "env_step"):
            if (count := tensordict.get(name, None)) is not None:
                out.set(name, count + 1 if stepped is None else count + stepped.to(count.dtype))
        out.set("traj_id", tensordict.get("traj_id"))
        queries = tensordict.get(self.data_key, None)
        if queries is not None:
            out.set(self.data_key, queries.copy())
        self._write_flags(out)
        if stepped is not None:
            self._keep_flags(tensordict, out, stepped)
        return out

    def _write_flags(self, out: TensorDictBase) -> None:
        shape = (self.batch_size[0], 1)
        for name in ("done", "terminated", "truncated"):
            out.set(name, torch.zeros(shape, dtype=torch.bool, device=self.device))
        reason = torch.full(shape, int(TruncationReason.NONE), dtype=torch.int8, device=self.device)
        out.set("truncation_reason", reason)

    @staticmethod
    def _keep_flags(td: TensorDictBase, out: TensorDictBase, stepped: torch.Tensor) -> None:
        for name in ("done", "terminated", "truncated", "truncation_reason"):
            before = td.get(name, None)
            if before is not None:
                out.set(name, torch.where(stepped.unsqueeze(-1), out.get(name), before))

    def _set_seed(self, seed: int | None) -> None:
        """Nothing is random here; a dataset is seeded by its loader."""

    # Resume

    def get_extra_state(self) -> dict[str, Any]:
        """The trajectory counter."""
        return {"trajectories": self._trajectories.state_dict()}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`get_extra_state` was taken."""
        self._trajectories.load_state_dict(state["trajectories"])


def _batch_size(given: int | Sequence[int] | None) -> torch.Size:
    size = torch.Size((1,) if given is None else (given,) if isinstance(given, int) else given)
    if len(size) != 1 or size[0] < 1:
        raise ConfigError(
            f"batch_size must be B or (B,) with B >= 1, got {tuple(size)}; more dimensions are "
            "those of SerialEnv, ParallelEnv and collectors"
        )
    return size


def _rows_of(queries: Any, size: int) -> list[Any]:
    """One object per row, from any form in which a tensordict returns a column of objects."""
    if isinstance(queries, History):
        return queries.chats
    if isinstance(queries, NonTensorData):
        # If lists are not converted to stacks, tensordict keeps them (or an array) as one object.
        data = queries.data.tolist() if hasattr(queries.data, "tolist") else queries.data
        one_a_row = isinstance(data, list) and len(data) == size
        if one_a_row and not all(isinstance(item, Mapping) for item in data):
            return data
        return [data] * size
    if is_non_tensor(queries):
        return queries.tolist()
    if isinstance(queries, str):
        return [queries] * size
    return list(queries)


class _TokenizedEnv(TransformedEnv):
    """Keeps its tokenizing transform last, so that it encodes the messages of the others."""

    def append_transform(self, transform: Any) -> TransformedEnv:
        """Insert a transform before the tokenizing one."""
        return self.insert_transform(-1, transform)


def _with_query(
    make_row: Callable[[Mapping[str, Any]], Mapping[str, Any]], row: Mapping[str, Any]
) -> Mapping[str, Any]:
    """A row with its column ``text`` renamed to ``query``, TorchRL's name."""
    made = make_row(row)
    if "text" not in made or "query" in made:
        return made
    return {"query" if name == "text" else name: value for name, value in made.items()}


class _Loader:
    """Marks a data loader that is used unchanged."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader


class DatasetChatEnv(TransformedEnv):
    """A :class:`ChatEnv` whose conversations start from the rows of a dataset.

    It is a ``TransformedEnv`` over a :class:`~torchrl_llm.envs.ChatEnv` with a
    :class:`~torchrl_llm.envs.transforms.DataLoadingPrimer`; append further transforms to it.
    Subclasses turn the rows of a file into ``query`` and ``answer`` in :meth:`make_row`.

    Args:
        dataset: a sequence of dicts, a JSON-lines file, several of these, or the id of a dataset
            on the hub; see :func:`~torchrl_llm.data.row_files.load_rows`.
        shuffle: whether each epoch has a different order.
        name: configuration of a hub dataset.
        split: split of a hub dataset; ``train`` if not given.
        num_envs: ``B``, conversations at a time.
        repeats: number of conversations that each row starts; they share a ``group_id``.
        batch_size_dl: number of rows that ``collate_fn`` gets at a time.
        seed: seed of the order; ``set_seed`` starts the data from the beginning with a different
            seed.
        group_repeats: all repeats of a row start in the same reset; ``num_envs`` must be a multiple
            of ``repeats``.
        tokenizer: see :class:`ChatEnv`.
        device: device of the tensors.
        template_kwargs: see :class:`ChatEnv`.
        apply_template: has no effect, as in TorchRL; if it is true, a warning appears. In history
            mode the policy applies its template; with ``input_mode="text"`` texts are templated.
        collate_fn: function from a list of rows to one dict of columns.
        input_mode: ``"history"``, ``"text"`` or ``"tokens"``.
        data_key: the column that holds the user's message, ``"query"`` by default. If neither this
            nor ``collate_fn`` is given, a column ``"text"`` is renamed to ``"query"``, because
            policies write to ``"text"``.
        primers: specs of the columns, taken from the first row if not given.
        system_prompt: first message; the class's ``SYSTEM_PROMPT`` if not given.
        worker_id: number of this worker, see ``IdCounter``.
        ray_backend: draw the rows from one actor for all environments with the same
            ``dataloader_actor_name``, see
            :class:`~torchrl_llm.envs.transforms.RayDataLoadingPrimer`.
        dataloader_actor_name: name of that actor.
        order: an order of the rows that follows results, instead of passes over all rows; see
            :mod:`torchrl_llm.data.row_order`.

    ``state_dict()`` holds the position in the data and all counters, for an exact resume.

    Raises:
        DataError: for data that is missing, malformed or lacks a column.
        ConfigError: for impossible arguments.

    Example:
        >>> rows = [{"query": f"{n} + 1 =", "answer": str(n + 1)} for n in range(4)]
        >>> env = DatasetChatEnv(dataset=rows, shuffle=False, num_envs=2)
        >>> env.reset()["history"].prompt.content
        [['0 + 1 ='], ['1 + 1 =']]
    """

    SYSTEM_PROMPT: str | None = None
    COLUMNS: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        dataset: Any,
        shuffle: bool = True,
        name: str | None = None,
        split: str | None = None,
        num_envs: int = 1,
        repeats: int | None = None,
        batch_size_dl: int = 1,
        seed: int | None = None,
        group_repeats: bool = False,
        tokenizer: Any = None,
        device: torch.device | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        apply_template: bool | None = False,
        collate_fn: Callable[[list[Mapping[str, Any]]], Mapping[str, Any]] | None = None,
        input_mode: Mode = "history",
        data_key: str | None = None,
        primers: Composite | None = None,
        system_prompt: str | None = None,
        worker_id: int | None = None,
        ray_backend: bool = False,
        dataloader_actor_name: str | None = None,
        order: RowOrder | None = None,
    ) -> None:
        if dataloader_actor_name is not None and not ray_backend:
            raise ConfigError("dataloader_actor_name has no effect without ray_backend=True")
        if apply_template:
            warnings.warn(
                "apply_template has no effect: in history mode the policy applies its template; "
                'input_mode="text" gives prompts to which it has been applied',
                stacklevel=2,
            )
        if isinstance(dataset, _Loader):
            loader = dataset.loader
        else:
            rows = load_rows(dataset, columns=self.COLUMNS, name=name, split=split)
            named = data_key is not None or collate_fn is not None
            loader = RowLoader(
                MappedRows(rows, self.make_row if named else partial(_with_query, self.make_row)),
                shuffle=shuffle,
                seed=seed,
                batch_size=batch_size_dl,
                collate_fn=collate_fn,
                order=order,
            )
        make_primer: Callable[..., DataLoadingPrimer] = DataLoadingPrimer
        if ray_backend:
            make_primer = partial(RayDataLoadingPrimer, actor_name=dataloader_actor_name)
        primer = make_primer(
            loader,
            primers=primers,
            repeats=repeats,
            device=device,
            group_repeats=group_repeats,
            worker_id=worker_id,
        )
        primer.check_batch(num_envs)
        data_key = "query" if data_key is None else data_key
        if data_key not in primer.data_keys:
            raise DataError(
                f"the rows lack the column {data_key!r}; they have {sorted(primer.data_keys)}"
            )
        base_env = ChatEnv(
            input_mode=input_mode,
            batch_size=(num_envs,),
            system_prompt=self.SYSTEM_PROMPT if system_prompt is None else system_prompt,
            tokenizer=tokenizer,
            template_kwargs=template_kwargs,
            data_key=data_key,
            device=device,
            worker_id=worker_id,
        )
        super().__init__(base_env, Compose(primer))

    @staticmethod
    def make_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a row of the dataset in the environment's form; by default the row itself."""
        return row

    @classmethod
    def from_dataloader(
        cls,
        dataloader: Iterable[Any],
        *,
        batch_size: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> DatasetChatEnv:
        """An environment over an existing data loader.

        Args:
            dataloader: see :class:`~torchrl_llm.envs.transforms.DataLoadingPrimer`.
            batch_size: ``B`` or ``(B,)``, conversations at a time; 1 if not given.
            kwargs: the constructor's arguments, except the arguments that build the loader.

        Raises:
            ConfigError: for an argument that only the loader could use.
        """
        own = "dataset shuffle name split batch_size_dl seed collate_fn order"
        if unused := sorted(set(own.split()) & set(kwargs)):
            raise ConfigError(f"{unused} would have no effect: the data loader decides these")
        size = _batch_size(batch_size)
        return cls(dataset=_Loader(dataloader), num_envs=size[0], **kwargs)

    @property
    def primer(self) -> DataLoadingPrimer:
        """The transform that draws the rows."""
        return next(t for t in self.transform if isinstance(t, DataLoadingPrimer))

    def reset_dataloader(self) -> DatasetChatEnv:
        """Start the data from the beginning."""
        self.primer.reset_dataloader()
        return self

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Start the data from the beginning, in the order of another seed.

        Returns:
            The seed for the next environment.
        """
        self.primer.reset_dataloader(seed)
        return super().set_seed(seed, static_seed=static_seed)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """State of the transforms (position in the data, counters) and of the base environment."""
        return {
            "transform": self.transform.state_dict(*args, **kwargs),
            "base_env": self.base_env.state_dict(*args, **kwargs),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self.transform.load_state_dict(state_dict["transform"], **kwargs)
        self.base_env.load_state_dict(state_dict["base_env"], **kwargs)
