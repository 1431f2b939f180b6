"""Writes the page "On one GPU" of the documentation from the results of the check.

    python test/gpu/page.py            # from the results in test/gpu/figures
    python test/gpu/page.py DIR        # takes the finished sections of DIR into that folder first

What was never measured says so; nothing on the page is typed by hand but its sentences.
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

# Of a fact; longer ones, as the outcome of each test, are in the JSON file alone.
_LONGEST = 160
_WRAPPER = TextWrapper(110, break_on_hyphens=False)
_INTRO = """\
On one GPU
==========

.. This page is written by test/gpu/page.py. Do not edit it.

``python test/gpu/check.py --budget-s 480 --out DIR`` runs these sections on one GPU and ends
within its budget. Each figure comes from that command. What has not been measured yet says so.

A machine without a network gets its packages from ``bash test/gpu/wheels.sh DIR``: the
dependencies of this package and the other sides of the comparisons, in wheels, without torch and
transformers.

``python test/gpu/check.py --tiny --device cpu --out DIR`` rehearses all sections on a CPU.
"""
_SECTIONS = {
    "facts": (
        "The card",
        "Card, versions, and the two ceilings: a large matrix product and a large copy.",
    ),
    "right": (
        "Fast paths against slow twins",
        "``pytest -m gpu``: the chunked head, the layouts of rows, decoding, gradient "
        "checkpointing, LoRA, ``torch.compile`` and FSDP2 against plain PyTorch, values "
        "and gradients, in float32 and bfloat16; exact resume; errors out of memory. The "
        "memory that ``torchrl-llm memory`` predicts is to be within 10 % of the measured "
        "peak.",
    ),
    "main_job": (
        "The main job",
        "README's command: seconds, and accuracy on 512 held-out sums.",
    ),
    "step": (
        "Loss and backward",
        "64 rows of log-normal length up to 2,048 tokens, Qwen2.5 shapes with random "
        "weights in bfloat16, a vocabulary of 151,936. Aims: tokens a second at least "
        "0.97 of a bare packed loop's, 1.5 times TRL's and 4 times TorchRL's; at most "
        "half of TRL's memory.",
    ),
    "head": (
        "The head alone",
        "8,192 tokens, a vocabulary of 151,936 and 1,536 channels, forward and backward. "
        "Aims: memory at most 1.15 of the weight's gradient, time at most 1.1 of the "
        "fastest other way.",
    ),
    "generate": (
        "Sampling with transformers",
        "64 prompts x 512 tokens at the shape of Qwen2.5-0.5B. Aims: twice the tokens a "
        "second of ``generate``, at least those of ``generate_batch``.",
    ),
    "whole": (
        "Whole steps",
        "Ten GRPO steps at the shape of Qwen2.5-0.5B with the transformers sampler. Aims: "
        "at most 5 % of a step outside of the model, no host-device synchronisation in a "
        "micro-batch of the loss.",
    ),
    "sleep": (
        "One memory for trainer and vLLM",
        "An engine that shares the trainer's weights gives back its cache of 4 GiB. Aims: the "
        "memory is free, the weights stay where they are, the tokens after waking are those "
        "before, and a step that was taken meanwhile is the engine's.",
    ),
    "vllm": (
        "With vLLM",
        "Sampling with an engine in the trainer's process, and the tests that need one.",
    ),
}


def page(results: dict[str, dict[str, Any]]) -> str:
    """The page.

    Args:
        results: of each section that is done what its JSON file holds.
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
    shown = "not told" if value is None else f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    aim = f"{figure['aim']} ({'met' if figure['met'] else 'missed'})" if "aim" in figure else ""
    return figure["name"], shown, figure["unit"], aim


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The sections of a folder that came to their end on a GPU; a rehearsal has no figures."""
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
