"""What a user types first, in an environment after ``pip install -e .`` that has no extra.

    python test/plain_install.py

Every registered name is made or says which extra it needs. The commands on the first screens of the
README and the documentation are read from the pages and run, shortened: a recipe for one step, on
the model of the package. Those of :data:`ASKS` end with the name of an extra, all others well.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from without_extras import MAKE, ROOT, wrong_names

PAGES = ["README.rst", "docs/source/index.rst", "docs/source/quickstart.rst"]
AT_ONCE = 2
LIMIT_S = 240

# Part of a command to the extras that it may ask for: all that it needs, one at a time.
ASKS = {
    "lora.enabled=true": {"peft", "data"},
    "model.quantization=": {"quantization", "peft", "data"},
    "env=gsm8k": {"data"},
    "env=math": {"data", "math"},
    "env=ifeval": {"data", "ifeval"},
    "backend=vllm": {"vllm"},
    "grpo-async": {"ray"},
    "reward=math": {"math"},
    "agent.program=": {"gateway"},
    "pipeline-rl": {"redis"},
}
# What the first screens say in words.
ALSO = [
    "torchrl-llm --help",
    "torchrl-llm train",
    "torchrl-llm train grpo --help",
    "torchrl-llm train grpo data=qa.csv reward=exact",
    "torchrl-llm train grpo data=qa.csv reward=math",
    "torchrl-llm train grpo env=countdown",
    "torchrl-llm train grpo env=tic_tac_toe",
    "torchrl-llm train grpo env=math",
    "torchrl-llm train grpo env=ifeval",
    "torchrl-llm train grpo loss=gspo advantage=leave_one_out correction.type=tis",
    "torchrl-llm doctor grpo data=qa.csv reward=exact",
    "torchrl-llm train dpo",
    "torchrl-llm train dpo data=pairs.jsonl loss=simpo",
    "torchrl-llm evaluate tasks=[arithmetic] eval.num_prompts=8",
    "torchrl-llm plot outputs/...",
    "torchrl-llm memory grpo",
    "torchrl-llm train reward data=pairs.jsonl",
    "torchrl-llm list",
    "torchrl-llm train langmarl num_iterations=3",
    "torchrl-llm train pico",
    "torchrl-llm train pipeline-rl",
]
STEP = {
    "grpo": "train.max_steps=1 train.prompts_per_batch=2 eval.num_prompts=4 "
    "inference_model.max_tokens=8",
    "sft": "train.max_steps=1",
    "dpo": "train.max_steps=1",
    "reward": "train.max_steps=1",
    "pico": "steps=1 warmup=1 eval_problems=8",
}


def commands(page: str) -> list[str]:
    """Commands of a page, continued lines joined and remarks taken off; no printed output."""
    text = re.sub(r"\\\n\s*", "", (ROOT / page).read_text(encoding="utf-8"))
    text = re.sub(r"\.\. testoutput::\n\n(?: .*\n)+", "", text)
    found = re.findall(r"^ {3,}(?:pip install .*&& )?((?:torchrl-llm|torchrun) .*)$", text, re.M)
    return [line.partition("   #")[0].strip() for line in found]


def program(page: str) -> str:
    """The Python that a page shows first, on the model of the package."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.search(r"^ +from torchrl_llm import GRPO\n(?:(?: .*)?\n)+?(?=\S)", text, re.M)[0]
    code = "\n".join(line.removeprefix("    ") for line in found.splitlines())
    small = '\n    train={"max_steps": 1}, inference_model={"max_tokens": 8},'
    return re.sub(r'\n +"Qwen[^"]*",', small, code)


def shortened(command: str, run: str, number: int) -> list[str]:
    """The words of a command that takes seconds; ``run`` stands for ``outputs/...``."""
    command = command.replace("outputs/grpo/<date>/<time>", run).replace("outputs/...", run)
    command = re.sub(r" model\.name=\S+", "", command).replace("per-node 8", "per-node 2")
    words = shlex.split(command)
    recipe = re.search(r"train (\w+)(?= [a-z]|$)(?!-)", command)
    if recipe and "--help" not in words:
        words += [*STEP.get(recipe[1], "").split(), f"hydra.run.dir=outputs/{number}"]
    return words


def files(folder: Path) -> None:
    """Tables that the pages name."""
    rows = "\n".join(f"{number}+1?,{number + 1}" for number in range(8))
    (folder / "qa.csv").write_text(f"question,answer\n{rows}\n")
    pair = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
    (folder / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 8)
    (folder / "agent.py").write_text("def run(row, client):\n    return 1.0\n")
    chat = {"prompt": "1+1?", "completion": "2"}
    (folder / "chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 8)
    pair = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
    (folder / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 8)
    prompt, check = 'def f():\n    """One."""\n', "def check(f):\n    assert f() == 1\n"
    task = {"prompt": prompt, "entry_point": "f", "canonical_solution": "    return 1\n"}
    tasks = [json.dumps({"task_id": f"T/{n}", **task, "test": check}) for n in range(8)]
    (folder / "HumanEval.jsonl.gz").write_bytes(gzip.compress("\n".join(tasks).encode()))


def run(words: list[str], folder: Path) -> tuple[int, str, float]:
    """Exit status of a program, what it printed, and its seconds."""
    begun, bin = time.monotonic(), Path(sys.executable).parent
    outside = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "BROWSER": "true"}
    outside |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            env=outside,
            input="2 + 3\n",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        status, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        status, said = -1, f"{error.stdout or ''}\nnot done after {LIMIT_S} s"
    return status, said, time.monotonic() - begun


def well(command: str, status: int, said: str) -> bool:
    """Whether a command did what it should in an environment without extras."""
    asked = set(re.findall(r"torchrl_llm\[([\w-]+)\]", said.replace("\n", "")))
    allowed = set().union(*(extras for part, extras in ASKS.items() if part in command))
    if not allowed:
        return status == 0
    return status == 1 and bool(asked) and asked <= allowed and "Traceback" not in said


def main() -> int:
    """Run everything; print a line for each command, and all that a failed one said."""
    typed = dict.fromkeys([each for page in PAGES for each in commands(page)] + ALSO)
    first = "torchrl-llm train grpo"
    assert first in typed
    failed = 0
    with tempfile.TemporaryDirectory(prefix="plain_") as name, ThreadPoolExecutor(AT_ONCE) as pool:
        folder = Path(name)
        files(folder)

        def tell(command: str, good: bool, said: str, seconds: float) -> None:
            nonlocal failed
            failed += not good
            print(f"{'well' if good else 'FAILED':7} {seconds:5.1f} s  {command}", flush=True)
            if not good:
                print("".join(f"    {line}\n" for line in said.splitlines()[-30:]), flush=True)

        names = pool.submit(run, [sys.executable, "-W", "ignore", "-c", MAKE], folder)
        status, said, seconds = run(shortened(first, "", 0), folder)
        tell(first, well(first, status, said), said, seconds)
        jobs = {c: shortened(c, "outputs/0", n) for n, c in enumerate(typed, 1) if c != first}
        jobs["GRPO(...) of the README"] = [sys.executable, "-c", program("README.rst")]
        done = pool.map(lambda words: run(words, folder), jobs.values())
        for command, (status, said, seconds) in zip(jobs, done, strict=True):
            tell(command, well(command, status, said), said, seconds)
        status, said, seconds = names.result()
        wrong = [said] if status else wrong_names(json.loads(said.splitlines()[-1]))
        tell("every registered name", not wrong, "\n".join(wrong), seconds)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
