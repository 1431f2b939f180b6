"""State of one rank from a checkpoint, also for a different number of ranks.

Each rank has its own collector, buffer, counters and random generators. With the same number of
ranks, each restores its own state. With a different number, no work may be unfinished; this is the
case between two steps that train whole groups. Then each rank starts fresh, at the data position
that all have reached together, with the knowledge of its estimator and its own counters. The
counters of removed ranks are kept, so that a rank that returns later does not assign an id twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase

from torchrl_llm.data.wire import PackedRows
from torchrl_llm.errors import CheckpointError

State = Mapping[str, Any]


def rank_state(
    saved: Sequence[State],
    retired: Sequence[State],
    fresh: State,
    *,
    rank: int,
    world: int,
    is_shared: bool = True,
) -> tuple[State, list[State], str | None]:
    """State from which a rank continues.

    Args:
        saved: states of the ranks that wrote the checkpoint, in their order.
        retired: states of ranks that were removed later, in their order.
        fresh: present state of this rank, at its start.
        rank: number of this rank.
        world: present number of ranks.
        is_shared: whether ranks other than the first also collect rows.

    Returns:
        The state, the states that are retired from now on, and a message, if any.

    Raises:
        CheckpointError: the number of ranks differs, and one has unfinished work.
    """
    known = [*saved, *retired]
    if world == len(saved):
        return saved[rank], list(retired), None
    notice = f"the checkpoint is of {len(saved)} ranks, and {world} resume"
    if not is_shared and not any(state["parts"] for state in saved[1:]):
        mine = known[rank] if rank < len(known) else fresh
        return {**mine, "parts": mine["parts"] if rank == 0 else {}}, known[world:], notice
    for number, state in enumerate(saved):
        if begun := next(_begun(state), None):
            raise CheckpointError(
                f"rank {number} of {len(saved)} has unfinished work ({begun}), and now "
                f"there are {world} ranks: resume with {len(saved)}"
            )
    nearest = saved[rank % len(saved)]
    places = [_nodes(state, _is_place) for state in saved]
    farthest = {path: max((each[path] for each in places), key=_drawn) for path in places[0]}
    uneven = any(_drawn(each[path]) != _drawn(farthest[path]) for each in places for path in each)
    taken = _nodes(nearest, _is_of_run) | _trackers(saved) | farthest
    if rank < len(known):
        taken |= _nodes(known[rank], _is_counter) | {("rng",): known[rank]["rng"]}
    if uneven:
        notice += "; they had drawn unequally many prompts, and those that some had not are skipped"
    return _replaced(fresh, taken), known[world:], notice


def _begun(state: State) -> Iterator[str]:
    """The unfinished work of a rank."""
    for path, value in _walk(state["parts"]):
        name = path[-1]
        waits = isinstance(value, PackedRows) and value.num_rows and "tracker" not in path
        if (waits and path[-2:] != ("buffer", "rows")) or isinstance(value, TensorDictBase):
            yield f"rows in {'.'.join(path)}"
        if name in ("repeats_left", "carried") and value:
            yield f"{name} is {value}"


def _walk(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if path:
        yield path, value
    if isinstance(value, Mapping):
        items: Any = value.items()
    else:
        items = enumerate(value) if isinstance(value, (list, tuple)) else ()
    for name, inner in items:
        yield from _walk(inner, (*path, str(name)))


def _nodes(state: State, wanted: Callable[[tuple[str, ...], Any], bool]) -> dict[Any, Any]:
    return {path: value for path, value in _walk(state) if wanted(path, value)}


def _replaced(value: Any, by: Mapping[tuple[str, ...], Any], path: tuple[str, ...] = ()) -> Any:
    """A state with some values replaced."""
    value = by.get(path, value)
    if isinstance(value, Mapping):
        return {name: _replaced(inner, by, (*path, str(name))) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(v, by, (*path, str(i))) for i, v in enumerate(value))
    return value


def _is_counter(path: tuple[str, ...], value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == {"worker_id", "count"}


def _is_place(path: tuple[str, ...], value: Any) -> bool:
    is_feed = isinstance(value, Mapping) and value.keys() == {"loader", "element", "offset"}
    return is_feed or (isinstance(value, Mapping) and {"epoch", "index"} <= value.keys())


def _is_of_run(path: tuple[str, ...], value: Any) -> bool:
    """Whether a value is the same in all ranks, or does not depend on their number."""
    in_collector = path[:2] == ("parts", "collector") and len(path) == 3 and path[2] != "rollout"
    is_version = isinstance(value, Mapping) and value.keys() == {"version"}
    is_part = path in (("parts", "buffer", "transforms"), ("parts", "curriculum"))
    return in_collector or is_version or is_part


def _trackers(saved: Sequence[State]) -> dict[tuple[str, ...], Any]:
    """The merged knowledge of the ranks about prompts."""
    found: dict[tuple[str, ...], Any] = {}
    for state in saved:
        for path, value in _nodes(state, lambda path, _: path[-2:] == ("tracker", "known")).items():
            found[path] = {**value, **found.get(path, {})}
    return found


def _drawn(place: State) -> tuple[int, int]:
    """Position of a loader: the same for all ranks that have drawn equally many prompts."""
    loader = place.get("loader", place)
    known = isinstance(loader, Mapping) and {"epoch", "index"} <= loader.keys()
    return (loader["epoch"], loader["index"]) if known else (place["element"], place["offset"])
