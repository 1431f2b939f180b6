"""Lua scripts that a :class:`RedisChannel` runs in the server.

Each of them runs as a whole or not at all, and may be run again by a client that never got its
answer. The state is in these keys:

- ``state``: hash of ``run``, ``version``, ``max_size``, ``granted`` (rows that may be claimed),
  ``closed``, ``taken`` (how many deliveries were handed out), ``led`` (when the learner called
  last), and ``mended`` (what was found that neither learner nor worker had written);
- ``queue`` and ``queued``: lists of the deliveries that wait, and of the claims that each uses up;
- ``taken``: the delivery that was handed out last, until the learner asks for the next;
- ``claimed``, ``generated``, ``delivered``, ``sent``, ``seen``: hashes over the workers;
- ``forgotten``: hash of dead workers, their last counts as JSON.

Two numbers are never trusted to a server that may lose them. A worker says with each call how many
rows it holds claims for, and the difference to what is written goes back to (or is taken from) what
is granted. The learner says how many rows are out in all, and what is granted is what of them is
neither claimed nor waiting. So rows that a restart has swallowed are granted again.

Others may write to the server too. A key of another type, and a number that is malformed or that
no learner and no worker writes, are dropped where they are met, and count as missing; ``mended``
tells the learner.
"""

from __future__ import annotations

from pathlib import Path

KEYS = (
    *("state", "queue", "queued", "taken"),
    *("claimed", "generated", "delivered", "sent", "seen", "forgotten"),
)


def _script(name: str) -> str:
    """A script of this folder, after the functions that all of them share."""
    files = (Path(__file__).with_name(f"redis_{each}.lua") for each in ("begin", name))
    return "".join(file.read_text(encoding="utf-8") for file in files)


WORK = _script("work")
"""``ARGV``: worker, rows it holds claims for, and the action with its arguments."""

LEAD = _script("lead")
"""``ARGV``: run, version, size, whether closed, rows out in all, rows to grant in addition, number
of the delivery that was got last, whether another is wanted. Returns whether the state was lost,
rows granted, a key that held something else, number and bytes of the delivery."""

FORGET = _script("forget")
"""``ARGV``: worker. Returns its last counts as JSON."""
