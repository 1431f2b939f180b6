"""Table of per-token facts: the definition of each number that is attached to a token.

A fact is one entry of :data:`FACTS`. The entry defines its name, dtype, key in a row, padding,
value for tokens that were not sampled, and how the turns of a trajectory are joined. The token
record, the policies' outputs and readers, the input modes, the packed rows and
:class:`~torchrl_llm.data.replay_buffers.JoinTurns` use the table. :func:`register_fact` adds your
own fact, which is then passed from a backend to a loss.

The ids that truncated sampling kept are several numbers per token and therefore have their own
class, :class:`~torchrl_llm.data.scoring.Support`.

Next: :mod:`torchrl_llm.data.record` stores the wired facts of one conversation.

Shape legend: ``T`` tokens of ``tokens.full``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from torchrl_llm.data.enums import MaskReason, Source
from torchrl_llm.errors import ConfigError, DataError

Side = Literal["left", "right"]

# Names in a row that a fact's node would overwrite.
_TAKEN_NODES = frozenset(
    (
        *("history", "text", "tokens", "masks", "log_probs", "trace", "support", "next"),
        *("attention_mask", "query", "turn", "traj_id", "group_id", "policy_version", "num_turns"),
        *("advantage", "reward", "reward_valid", "error", "_step", "_reset"),
        *("done", "terminated", "truncated", "truncation_reason"),
    )
)
# Key of a record's support in packed rows, next to its facts; most records have no support.
SUPPORT_COLUMNS = ("support_ids", "support_counts")
# A record is pickled as NumPy arrays.
_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64),
)


@dataclass(frozen=True, kw_only=True)
class TokenFact:
    """Definition of one per-token column.

    Args:
        name: its name in the table, in ``Completion.facts`` and in
            :attr:`TokenRecord.facts <torchrl_llm.data.record.TokenRecord>`.
        dtype: dtype of the column.
        key: key of the column in a row, ``(node, column)``, aligned with ``("tokens", "full")``. If
            the column is ``"full"``, text and tokens mode store the prompt's values as ``(node,
            "prompt")``. Any other column has the same key for prompts.
        default: value of tokens that were not sampled or have no value; ``None`` if each token
            always has a value.
        padding: value that fills padded columns. ``prompt`` is padded on the left and ``response``
            on the right; ``full`` and columns aligned with it concatenate the two.
        join: how :class:`~torchrl_llm.data.replay_buffers.JoinTurns` joins the turns of a
            trajectory. ``"turns"`` takes the values of each response from its own turn, and all
            other values from the last turn. ``"last"`` takes the last turn's column.
        wired: whether the fact is part of the token record. A backend then returns it, each turn of
            the conversation keeps the values of earlier turns, and both packed forms of records
            contain it. A fact that is not wired is a column that a transform writes.
        parts: whether policies and ``JoinTurns`` also write ``(node, "response")``, a slice of
            ``(node, "full")``.
        shape: shape of one token's value; ``()`` for a number.

    Raises:
        ConfigError: values contradict each other.

    Example:
        >>> route = TokenFact(
        ...     name="route", dtype=torch.int16, key=("router", "experts"), default=-1, shape=(2,)
        ... )
        >>> route.filled(3).shape, route.prompt_key
        (torch.Size([3, 2]), ('router', 'experts'))
    """

    name: str
    dtype: torch.dtype
    key: tuple[str, str]
    default: float | None = 0
    padding: float = 0
    join: Literal["turns", "last"] = "turns"
    wired: bool = True
    parts: bool = False
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        key = self.key
        for holds, wanted, got in (
            (isinstance(self.name, str) and self.name.isidentifier(), "name: a name", self.name),
            (self.dtype in _DTYPES, f"dtype: one of {list(_DTYPES)}", self.dtype),
            (
                isinstance(key, tuple) and len(key) == 2 and all(isinstance(k, str) for k in key),
                'key: a tuple of two names, such as ("router", "full")',
                key,
            ),
            (self.join in ("turns", "last"), 'join: "turns" or "last"', self.join),
            (
                not self.parts or key[-1] == "full",
                'key: one that ends in "full", since parts=True writes "response" next to it',
                key,
            ),
        ):
            if not holds:
                raise ConfigError(f"a TokenFact needs {wanted}; got {got!r}")

    @property
    def prompt_key(self) -> tuple[str, str]:
        """Key of the values for the next prompt's tokens in text and tokens mode."""
        return (self.key[0], "prompt") if self.key[1] == "full" else self.key

    @property
    def carried(self) -> bool:
        """Whether text and tokens mode pass the fact from turn to turn, next to the ids."""
        # The columns of the trace belong together: a single column would belong to other tokens.
        return self.wired or self.key[0] == "trace"

    def filled(self, length: int) -> Tensor:
        """Return a column of ``length`` default values."""
        return torch.full((length, *self.shape), self.default, dtype=self.dtype)

    def check(self, values: Any, length: int) -> None:
        """Check that ``values`` is a column of this fact.

        Args:
            values: the column.
            length: its number of tokens.

        Raises:
            DataError: ``values`` is not a tensor, or has a different dtype or shape.
        """
        if not isinstance(values, Tensor):
            raise DataError(
                f"the fact {self.name!r} must be a tensor {self._described(length)}, got "
                f"{type(values).__name__}"
            )
        if values.dtype == self.dtype and values.shape == (length, *self.shape):
            return
        advice = (
            f"convert it with .to({self.dtype}), or register the fact with dtype={values.dtype}"
            if values.dtype != self.dtype
            else "return one value for each sampled token, the one that ended the response included"
        )
        raise DataError(
            f"the fact {self.name!r} must be {self._described(length)}, got {values.dtype} "
            f"{list(values.shape)}; {advice}"
        )

    def _described(self, length: int) -> str:
        return f"{self.dtype} {[length, *self.shape]}"


_UNSAMPLED = int(MaskReason.NOT_SAMPLED)
_BUILT_IN = (
    TokenFact(
        name="token_ids",
        dtype=torch.int64,
        key=("tokens", "full"),
        default=None,
        join="last",
        parts=True,
    ),
    TokenFact(
        name="source",
        dtype=torch.int8,
        key=("trace", "source"),
        default=int(Source.TEMPLATE),
        padding=-1,
    ),
    TokenFact(name="turn", dtype=torch.int16, key=("trace", "turn"), default=-1, padding=-1),
    TokenFact(
        name="policy_version",
        dtype=torch.int32,
        key=("trace", "policy_version"),
        default=-1,
        padding=-1,
    ),
    TokenFact(
        name="log_probs", dtype=torch.float32, key=("log_probs", "full"), default=0.0, parts=True
    ),
    TokenFact(
        name="mask_reason",
        dtype=torch.int8,
        key=("trace", "mask_reason"),
        default=_UNSAMPLED,
        padding=_UNSAMPLED,
        wired=False,
    ),
    TokenFact(
        name="attention_mask",
        dtype=torch.bool,
        key=("masks", "all_attention_mask"),
        default=None,
        padding=False,
        join="last",
        wired=False,
    ),
    TokenFact(
        name="assistant_mask",
        dtype=torch.bool,
        key=("masks", "all_assistant_mask"),
        default=False,
        padding=False,
        wired=False,
    ),
    TokenFact(
        name="values", dtype=torch.float32, key=("values", "full"), default=None, wired=False
    ),
    TokenFact(
        name="value_target",
        dtype=torch.float32,
        key=("value_target", "full"),
        default=None,
        wired=False,
    ),
)
_TABLE: dict[str, TokenFact] = {fact.name: fact for fact in _BUILT_IN}

FACTS: Mapping[str, TokenFact] = MappingProxyType(_TABLE)
"""All facts by name: first the built-in facts, then those of :func:`register_fact`."""

RECORD_COLUMNS: tuple[str, ...] = tuple(fact.name for fact in _BUILT_IN if fact.wired)
"""Built-in facts that are fields of :class:`~torchrl_llm.data.record.TokenRecord`, in order."""


def register_fact(fact: TokenFact) -> TokenFact:
    """Add a fact to the table.

    Register the fact before environments and policies are built. Do this in every process that
    samples, collects or trains, for example in a module that all of them import. Registering the
    same entry again has no effect.

    Args:
        fact: the entry.

    Returns:
        The entry.

    Raises:
        ConfigError: another fact has the same name or key, the node is reserved in rows, or a wired
            fact has no default.

    Example:
        >>> fact = TokenFact(name="surprise", dtype=torch.float32, key=("surprise", "full"))
        >>> register_fact(fact) is FACTS["surprise"]
        True
        >>> unregister_fact("surprise")
    """
    if not isinstance(fact, TokenFact):
        raise ConfigError(f"register_fact takes a TokenFact, got {type(fact).__name__}")
    known = _TABLE.get(fact.name)
    if known == fact:
        return known
    if known is not None or fact.name in SUPPORT_COLUMNS:
        raise ConfigError(
            f"a fact is already called {fact.name!r}; choose a different name, or remove it "
            f"with unregister_fact({fact.name!r})"
        )
    owner = next((other.name for other in _TABLE.values() if other.key == fact.key), None)
    if owner is not None or fact.key[0] in _TAKEN_NODES:
        used = f"the fact {owner!r} has it" if owner else f"rows use {fact.key[0]!r} themselves"
        raise ConfigError(
            f"the fact {fact.name!r} cannot have the key {fact.key}: {used}; choose a node of its "
            f"own, such as ({fact.name!r}, 'full')"
        )
    if fact.wired and fact.default is None:
        raise ConfigError(
            f"the fact {fact.name!r} is wired and has no default, which tokens that were not "
            "sampled need; pass default=..."
        )
    _TABLE[fact.name] = fact
    return fact


def unregister_fact(name: str) -> None:
    """Remove a registered fact from the table; existing rows keep its column.

    Args:
        name: name of the fact.

    Raises:
        ConfigError: there is no fact of this name, or it is built in.
    """
    if name not in _TABLE or _TABLE[name] in _BUILT_IN:
        raise ConfigError(
            f"no fact {name!r} is registered; registered are {[f.name for f in _registered()]}"
        )
    del _TABLE[name]


def _registered() -> list[TokenFact]:
    return list(_TABLE.values())[len(_BUILT_IN) :]


def added_facts() -> list[TokenFact]:
    """Return the registered facts that are part of the token record."""
    return [fact for fact in _registered() if fact.wired]


def carried_facts() -> list[TokenFact]:
    """Return the facts that text and tokens mode pass from turn to turn."""
    return [fact for fact in _TABLE.values() if fact.carried]


def find_fact(name: str) -> TokenFact:
    """Return a fact by name.

    Args:
        name: the registered name.

    Raises:
        DataError: there is no fact of this name.
    """
    fact = _TABLE.get(name)
    if fact is None:
        raise DataError(
            f"the per-token fact {name!r} is not registered in this process; call register_fact("
            f"TokenFact(name={name!r}, ...)) before environments and policies are built. Known are "
            f"{list(_TABLE)}"
        )
    return fact


def by_node(columns: Mapping[tuple[str, str], Any]) -> dict[str, dict[str, Any]]:
    """Group values under two-part keys into one mapping per node.

    Args:
        columns: any values, by ``(node, column)``.

    Example:
        >>> by_node({("trace", "turn"): 1, ("trace", "source"): 2, ("log_probs", "full"): 3})
        {'trace': {'turn': 1, 'source': 2}, 'log_probs': {'full': 3}}
    """
    nodes: dict[str, dict[str, Any]] = {}
    for (node, column), value in columns.items():
        nodes.setdefault(node, {})[column] = value
    return nodes


def node_dtypes(node: str) -> dict[str, torch.dtype]:
    """Return the token-aligned columns of a node and their dtypes.

    Args:
        node: ``"tokens"``, ``"log_probs"``, ``"trace"``, ``"masks"`` or the node of a registered
            fact.

    Example:
        >>> node_dtypes("log_probs")
        {'prompt': torch.float32, 'response': torch.float32, 'full': torch.float32}
    """
    return {
        column: fact.dtype
        for fact in _TABLE.values()
        if fact.key[0] == node
        for column in (("prompt", "response", "full") if fact.parts else fact.key[1:])
    }


def padding_of(node: str, column: str) -> tuple[float, Side]:
    """Return the padding value of a dense column, and the side of the padding.

    Args:
        node: name of the node in a row.
        column: its column; ``prompt`` and ``response`` are padded with the value of ``full``.

    Example:
        >>> padding_of("trace", "turn"), padding_of("log_probs", "prompt")
        ((-1, 'right'), (0, 'left'))
    """
    asked = (node, "full" if column in ("prompt", "response") else column)
    side: Side = "left" if column == "prompt" else "right"
    return next((fact.padding for fact in _TABLE.values() if fact.key == asked), 0), side
