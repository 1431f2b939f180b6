"""The column ``("history", field)`` of an environment: its spec, reading and writing it.

History mode lives by it; text and tokens mode keep it beside their ids where a transform asks for
messages (:meth:`~torchrl_llm.envs.ChatEnv.keep_history`).
"""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite

from torchrl_llm.data.column import Chat
from torchrl_llm.data.containers import ChatHistory
from torchrl_llm.data.history import History
from torchrl_llm.data.input_modes.input_mode import missing_key
from torchrl_llm.data.specs import ColumnSpec
from torchrl_llm.errors import DataError


def history_spec(field: str, chat: Chat, size: int) -> Composite:
    """The spec of ``("history", field)``.

    Args:
        field: ``"prompt"`` or ``"full"``.
        chat: the example that specs return.
        size: rows.
    """
    column = ColumnSpec((size, -1), example_data=chat)
    history = Composite(messages=column, shape=(size,), data_cls=History)
    return Composite({field: history}, shape=(size,), data_cls=ChatHistory)


def read_chats(td: TensorDictBase, field: str) -> list[Chat]:
    """The conversations, one a row.

    Args:
        td: rows ``[B]``.
        field: ``"prompt"`` or ``"full"``.

    Raises:
        DataError: there are none.
    """
    history = td.get(("history", field), None)
    if history is None and field == "prompt":
        raise DataError(
            "the rows lack ('history', 'prompt'), which the environment keeps up to date; step "
            "rows that come from its reset or from its last step"
        )
    if history is None:
        raise missing_key(("history", field))
    return history.chats


def write_chats(out: TensorDictBase, chats: list[Chat]) -> None:
    """Set ``("history", "prompt")``, and nothing else under ``"history"``.

    Args:
        out: rows ``[B]``; changed in place.
        chats: one a row.
    """
    node = TensorDict._new_unsafe(
        source={"prompt": History.of(chats)}, batch_size=torch.Size([len(chats)])
    )
    out.set("history", ChatHistory._from_tensordict(node))
