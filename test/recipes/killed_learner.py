"""A page that notes the rows that it trains on, and may be killed in the middle of a step.

python killed_learner.py NOTES STEP grpo-async.py KEY=VALUE ...
"""

import json
import os
import runpy
import signal
import sys
from pathlib import Path

from torchrl_llm.trainers import BatchSource

notes, step, page, *arguments = sys.argv[1:]
fill, left = BatchSource.fill, [int(step)]


def noted(self):
    rows = fill(self)
    left[0] -= 1
    trained = [[int(row["group_id"]), int(row["traj_id"])] for row in self._buffer[:]]
    with Path(notes).open("a") as out:
        out.write(json.dumps(trained) + "\n")
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return rows


BatchSource.fill = noted
sys.argv = [page, *arguments]
sys.path.insert(0, str(Path(page).parent))
runpy.run_path(page, run_name="__main__")
