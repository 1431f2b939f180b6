"""State of one rank out of a checkpoint, also where another number of ranks goes on.

What is a rank's own are its collector, buffer, counters and random generators. With as many ranks
as before each takes up its own. With another number all that was begun must be done, as it is
between two steps that train whole groups. Then each begins afresh, at the place in the data that
all have reached together, with what its estimator knows and with its own counters; those of ranks
that are no more are kept, so that one that comes again later gives out no id twice.
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
    """What a rank continues after.

    Args:
        saved: states of the ranks that wrote the checkpoint, in their order.
        retired: states of ranks that were fewer afterwards, in their order.
        fresh: state of this rank as it is now, at its beginning.
        rank: number of this rank.
        world: how many there are now.
        is_shared: whether other ranks than the first collect rows as well.

    Returns:
        The state; those that are retired from now on; and what is to be told, if anything.

    Raises:
        CheckpointError: there are more or fewer, and one had begun what is not done.
    """
    known = [*saved, *retired]
    if world == len(saved):
        return saved[rank], list(retired), None
    notice = f"the checkpoint is of {len(saved)} ranks, and {world} go on"
    if not is_shared and not any(state["parts"] for state in saved[1:]):
        mine = known[rank] if rank < len(known) else fresh
        return {**mine, "parts": mine["parts"] if rank == 0 else {}}, known[world:], notice
    for number, state in enumerate(saved):
        if begun := next(_begun(state), None):
            raise CheckpointError(
                f"rank {number} of {len(saved)} had begun what is not trained yet ({begun}), and "
                f"now there are {world} ranks: go on with {len(saved)}"
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
    """What a rank has begun and not done."""
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
    """A state with other values at some of its places."""
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
    """What is the same in all ranks, or does not depend on their number."""
    in_collector = path[:2] == ("parts", "collector") and len(path) == 3 and path[2] != "rollout"
    is_version = isinstance(value, Mapping) and value.keys() == {"version"}
    is_part = path in (("parts", "buffer", "transforms"), ("parts", "curriculum"))
    return in_collector or is_version or is_part


def _trackers(saved: Sequence[State]) -> dict[tuple[str, ...], Any]:
    """What the ranks know of prompts, together."""
    found: dict[tuple[str, ...], Any] = {}
    for state in saved:
        for path, value in _nodes(state, lambda path, _: path[-2:] == ("tracker", "known")).items():
            found[path] = {**value, **found.get(path, {})}
    return found


def _drawn(place: State) -> tuple[int, int]:
    """How far a loader has come: the same number for all ranks that have drawn equally many."""
    loader = place.get("loader", place)
    known = isinstance(loader, Mapping) and {"epoch", "index"} <= loader.keys()
    return (loader["epoch"], loader["index"]) if known else (place["element"], place["offset"])
