"""Runs the journeys: what a user does in a day, each in an empty folder with an installed package.

    python test/journeys/run_journeys.py            # all of them, two at a time
    python test/journeys/run_journeys.py 03 05      # those whose names begin so

A journey is a shell script that types only what the documentation says, and checks what came of
it. It never sees the repository: it runs in a folder of its own, with the ``torchrl-llm`` and
``python`` that are first on the path.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
AT_ONCE = 2
LIMIT_S = 600


def hears_ctrl_c() -> None:
    """Undo what whoever runs this in the background has set, and children inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def walk(script: Path) -> tuple[Path, bool, float, str]:
    """Run a journey; whether it went well, its seconds and what it printed."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{script.stem}_") as folder:
        outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        outside |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HERE": str(HERE)}
        outside |= {"RAY_USAGE_STATS_ENABLED": "0", "WANDB_MODE": "offline"}
        try:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", str(script)],
                cwd=folder,
                env=outside,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
                check=False,
                preexec_fn=hears_ctrl_c,
            )
            well, said = done.returncode == 0, done.stdout
        except subprocess.TimeoutExpired as error:
            well, said = False, f"{error.stdout or ''}\nnot done after {LIMIT_S} s"
    return script, well, time.monotonic() - begun, said


def main(wanted: list[str]) -> int:
    """Run the journeys and print a line for each; the exit status."""
    scripts = sorted(HERE.glob("[0-9]*.sh"))
    scripts = [s for s in scripts if not wanted or s.name.startswith(tuple(wanted))]
    failed = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for script, well, seconds, said in pool.map(walk, scripts):
            print(f"{script.stem:32} {'well' if well else 'FAILED':7} {seconds:6.1f} s", flush=True)
            if not well:
                failed += 1
                print("".join(f"    {line}\n" for line in said.splitlines()[-60:]), flush=True)
    return 1 if failed or not scripts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
