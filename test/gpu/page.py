"""Writes the page "On one GPU" of the documentation from the results of the check.

    python test/gpu/page.py            # from the results in test/gpu/figures
    python test/gpu/page.py DIR        # copies the finished sections of DIR into that folder first

All figures on the page come from these results. A section without results says "Not measured yet".
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from textwrap import TextWrapper
from typing import Any

FIGURES = Path(__file__).parent / "figures"
PAGE = Path(__file__).parents[2] / "docs" / "source" / "on_one_gpu.rst"

# Of a fact; longer ones, such as the outcome of each test, are only in the JSON file.
_LONGEST = 160
_WRAPPER = TextWrapper(110, break_on_hyphens=False)
_INTRO = """\
On one GPU
==========

.. This page is written by test/gpu/page.py. Do not edit it.

``python test/gpu/check.py --budget-s 480 --out DIR`` runs these sections on one GPU within the
given seconds. Each figure comes from that command.

For a machine without a network, ``bash test/gpu/wheels.sh DIR`` downloads wheels of the
dependencies and of the compared libraries, without torch and transformers.

``python test/gpu/check.py --tiny --device cpu --out DIR`` rehearses all sections on a CPU.
"""
_SECTIONS = {
    "facts": (
        "The card",
        "Card, versions, and two upper bounds: the speed of a large matrix product and of a "
        "large copy.",
    ),
    "right": (
        "Fast paths against slow twins",
        "``pytest -m gpu``: the chunked head, the layouts of rows, decoding, gradient "
        "checkpointing, LoRA, ``torch.compile`` and FSDP2 against plain PyTorch, values "
        "and gradients, in float32 and bfloat16; exact resume; out-of-memory errors. Aim: the "
        "forecast of ``torchrl-llm memory`` is within 10 % of the measured peak.",
    ),
    "main_job": (
        "The main job",
        "``torchrl-llm train grpo``: seconds, and accuracy on 512 held-out sums.",
    ),
    "step": (
        "Loss and backward",
        "64 rows of log-normal length up to 2,048 tokens, Qwen2.5 shapes with random "
        "weights in bfloat16, a vocabulary of 151,936. Aims: tokens per second at least "
        "0.97 of a bare packed loop's, 1.5 times TRL's and 4 times TorchRL's; at most "
        "half of TRL's memory.",
    ),
    "head": (
        "The head alone",
        "8,192 tokens, a vocabulary of 151,936 and 1,536 channels, forward and backward. "
        "Aims: memory at most 1.15 of the weight's gradient, time at most 1.1 of the "
        "fastest alternative.",
    ),
    "generate": (
        "Sampling with transformers",
        "64 prompts x 512 tokens with the shapes of Qwen2.5-0.5B. Aims: twice the tokens per "
        "second of ``generate``, at least as many as ``generate_batch``.",
    ),
    "whole": (
        "Whole steps",
        "Ten GRPO steps with the shapes of Qwen2.5-0.5B and the transformers sampler. Aims: "
        "at most 5 % of a step outside the model, no host-device synchronisation in a "
        "micro-batch of the loss.",
    ),
    "sleep": (
        "One memory for trainer and vLLM",
        "An engine that shares the trainer's weights frees its cache of 4 GiB while it sleeps. "
        "Aims: the memory is free, the weights keep their addresses, the engine samples the "
        "same tokens after waking, and it has the weights of a step taken meanwhile.",
    ),
    "vllm": (
        "With vLLM",
        "Sampling with an engine in the trainer's process, and the tests that need one.",
    ),
}


def page(results: dict[str, dict[str, Any]]) -> str:
    """The text of the page.

    Args:
        results: name of each finished section to the content of its JSON file.
    """
    parts = [_INTRO]
    for name, (title, what) in _SECTIONS.items():
        parts += [title, "-" * len(title), "", *_WRAPPER.wrap(what), ""]
        entry = results.get(name)
        parts += ["Not measured yet.", ""] if entry is None else _measured(entry)
    return "\n".join(parts).rstrip() + "\n"


def _measured(entry: dict[str, Any]) -> list[str]:
    lines = []
    if entry["figures"]:
        lines += [".. list-table::", "   :header-rows: 1", "   :widths: 58 16 12 14", ""]
        for first, *others in [("figure", "value", "unit", "aim"), *map(_cells, entry["figures"])]:
            lines += [f"   * - {first}", *(f"     - {cell}".rstrip() for cell in others)]
        lines.append("")
    facts = {fact: str(value) for fact, value in entry["facts"].items()}
    lines += [f"- {fact}: ``{value}``" for fact, value in facts.items() if len(value) <= _LONGEST]
    return [*lines, "", f"{entry['on']}; the section took {entry['seconds']:.0f} s.", ""]


def _cells(figure: dict[str, Any]) -> tuple[str, ...]:
    value = figure["value"]
    shown = "none" if value is None else f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    aim = f"{figure['aim']} ({'met' if figure['met'] else 'missed'})" if "aim" in figure else ""
    return figure["name"], shown, figure["unit"], aim


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The sections of a folder that finished on a GPU; rehearsals on a CPU are left out."""
    entries = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {
        name: entry
        for name, entry in entries.items()
        if entry.get("status") == "done" and not entry["on"].startswith("CPU")
    }


def main() -> None:
    if len(sys.argv) > 1:
        FIGURES.mkdir(exist_ok=True)
        for name in read_results(Path(sys.argv[1])):
            shutil.copy(Path(sys.argv[1]) / f"{name}.json", FIGURES)
    PAGE.write_text(page(read_results(FIGURES)))


if __name__ == "__main__":
    main()
