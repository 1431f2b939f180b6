"""Types wrong inputs as real processes, and prints what a user reads: a table of all of them.

    python test/journeys/wrong_inputs.py               # all of them, two at a time
    python test/journeys/wrong_inputs.py data reward   # those of a group, or with a word

Each runs in a folder of its own, outside the repository, with the ``torchrl-llm`` and ``python``
that are first on the path. A command that is refused after heavy imports is forked from a process
that has done them. It fails where an input is accepted, where a traceback goes through this
package, or where what was said leaves out what helps. Seconds are printed, and never fail.

The inputs are in ``wrong_cases.py``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from wrong_cases import CASES, FILES, Case, Kind

AT_ONCE = 2
LIMIT_S = 300
HEAVY = (
    "torchrl_llm.cli.train",
    "torchrl_llm.recipes.builders",
    "torchrl_llm.recipes.grpo_config",
    "transformers.models.llama.modeling_llama",
)
OUTSIDE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "offline"}
SHOWN = 230
TRACEBACK = "Traceback (most recent call last)"
# Lines of progress, of other libraries' notices and of what a run says before it is refused.
NOISE = re.compile(r"^\s*$|it/s|s/it|\[torchrl\]\[INFO\]|UserWarning|FutureWarning|warnings\.warn")


class Outcome(NamedTuple):
    """What became of a case."""

    case: Case
    said: str
    code: int
    seconds: float
    cpu: float | None
    wrong: list[str]


def lay_out(folder: Path) -> None:
    """Write the files that the cases name, and models that are no good, into a folder."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    where = "import torchrl_llm as t, pathlib as p; print(p.Path(t.__file__).parent)"
    package = subprocess.check_output(["python", "-c", where], text=True, cwd=folder).strip()
    shipped = Path(package) / "assets" / "embedded"
    for name in ("no_template", "no_weights", "no_tokenizer", "encoder", "broken_config"):
        shutil.copytree(shipped, folder / name)
    (folder / "empty_folder").mkdir()
    (folder / "no_template" / "chat_template.jinja").unlink()
    (folder / "no_weights" / "model.safetensors").unlink()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "no_tokenizer" / file).unlink()
    config = json.loads((folder / "encoder" / "config.json").read_text())
    config |= {"model_type": "vit", "architectures": ["ViTModel"]}
    (folder / "encoder" / "config.json").write_text(json.dumps(config))
    (folder / "broken_config" / "config.json").write_text('{"model_type": "llama", ')


def type_in(case: Case, files: Path) -> Outcome:
    """Run a case as a process; what it said, its exit code and its seconds."""
    of_a_shell = re.search("[&|]", case.command) or not case.command.startswith("torchrl-llm")
    run = as_typed if of_a_shell or case.kind is Kind.KEY else forked
    with tempfile.TemporaryDirectory(prefix="wrong_") as name:
        folder, output = Path(name) / "here", Path(name) / "said"
        shutil.copytree(files, folder)
        begun = time.monotonic()
        code, cpu = run(case.command, folder, output)
        seconds = time.monotonic() - begun
        said = output.read_text(encoding="utf-8", errors="replace")
        said = said.replace(f"{folder}/", "").replace(f"{folder}", ".")
    return Outcome(case, said, code, seconds, cpu, complaints(case, said, code))


def as_typed(command: str, folder: Path, output: Path) -> tuple[int, float]:
    """Run a command in a shell; its exit code and CPU seconds."""
    with output.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        limit = threading.Timer(LIMIT_S, os.killpg, (process.pid, 9))
        limit.start()
        _, status, used = os.wait4(process.pid, 0)
        limit.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, used.ru_utime + used.ru_stime


def forked(command: str, folder: Path, output: Path) -> tuple[int, None]:
    """Run a command in a fork; its exit code."""
    process = multiprocessing.get_context("forkserver").Process(
        target=begin, args=(shlex.split(command), folder, output)
    )
    process.start()
    process.join(LIMIT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode, None


def begin(words: list[str], folder: Path, output: Path) -> None:
    """Be the process that a command line would have begun."""
    os.chdir(folder)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = words
    from torchrl_llm.cli import main

    sys.exit(main())


def complaints(case: Case, said: str, code: int) -> list[str]:
    """What is wrong with how an input was answered."""
    found = []
    if case.kind is Kind.GOES_ON:
        found += [f"exit code {code} instead of 0"] * (code != 0)
    elif code == 0:
        found.append("accepted")
    elif code < 0:
        found.append(f"killed by signal {-code}")
    if TRACEBACK in said:
        ours = re.search(r'File "[^"\n]*torchrl_llm/', said)
        if case.kind not in (Kind.THEIRS, Kind.PYTHON):
            found.append("a traceback")
        elif case.kind is Kind.THEIRS and ours:
            found.append("a traceback through this package")
    elif case.kind is Kind.THEIRS:
        found.append("no traceback of the user's own code")
    found += [f"does not say /{p}/" for p in case.says if not re.search(p, " ".join(said.split()))]
    return found


def shortened(outcome: Outcome) -> str:
    """What was said, in about two lines: the paragraph of the error, or the notice."""
    lines = [line.strip() for line in outcome.said.splitlines() if not NOISE.search(line)]
    text = " ".join(lines)
    for pattern in (
        r"(?:torchrl_llm\.errors\.)?\b\w*Error: (?!.*\w+Error: ).*",
        *outcome.case.says,
    ):
        if match := re.search(pattern, text):
            text = (
                text[match.start() :] if "Error" in pattern else text[max(0, match.start() - 60) :]
            )
            break
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def show(outcome: Outcome) -> None:
    """Print the line of the table."""
    case, kind = outcome.case, outcome.case.kind
    mark = f" ({kind.value})" if kind.value else ""
    print(f"$ {case.command}")
    print(f"    {shortened(outcome)}{mark}")
    cpu = "" if outcome.cpu is None else f", CPU {outcome.cpu:.2f} s"
    print(f"    exit code {outcome.code}, {outcome.seconds:.1f} s{cpu}")
    for complaint in outcome.wrong:
        print(f"    WRONG: {complaint}")
    if outcome.wrong:
        print("".join(f"    | {line[:300]}\n" for line in outcome.said.splitlines()[-40:]))
    sys.stdout.flush()


def _is_wanted(case: Case, wanted: list[str], groups: set[str]) -> bool:
    return any(case.group == w if w in groups else w in case.command for w in wanted)


def main(wanted: list[str]) -> int:
    """Type the inputs and print the table; the exit status."""
    os.environ |= OUTSIDE
    os.environ.pop("PYTHONPATH", None)
    multiprocessing.get_context("forkserver").set_forkserver_preload([*HEAVY])
    groups = {case.group for case in CASES}
    cases = [c for c in CASES if not wanted or _is_wanted(c, wanted, groups)]
    with tempfile.TemporaryDirectory(prefix="wrong_files_") as name:
        files = Path(name) / "files"
        files.mkdir()
        lay_out(files)
        outcomes, group = [], ""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for outcome in pool.map(lambda case: type_in(case, files), cases):
                if outcome.case.group != group:
                    group = outcome.case.group
                    print(f"\n{group}\n")
                show(outcome)
                outcomes.append(outcome)
    failed = [outcome for outcome in outcomes if outcome.wrong]
    print(f"\n{len(outcomes)} wrong inputs, {len(failed)} not answered as they should be")
    if keys := [outcome.cpu for outcome in outcomes if outcome.case.kind is Kind.KEY]:
        median, most = statistics.median(keys), max(keys)
        print(f"refusals of keys: median/maximum CPU seconds {median:.2f}/{most:.2f}")
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
