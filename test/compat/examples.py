"""Runs the examples of TorchRL's LLM reference here: all docstrings of the installed ``torchrl``.

``python test/compat/examples.py [page.rst ...]`` takes the examples out of the docstrings of
``torchrl``'s LLM modules (and out of further pages) while it runs, puts the embedded model and
small datasets where an example names others (with the package ``datasets``), and runs each by both
import roots, without engines. It prints a line for each example, and counts, which the page
"Coming from TorchRL" quotes.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

HERE = Path(__file__).parent
LIMIT_S = 20
sys.path.insert(0, str(HERE))
ROOMS = ("data", "modules", "envs", "objectives", "collectors", "weight_update")
# Modules of language models that TorchRL keeps outside its ``llm`` folders.
BESIDE = ("modules/models/llm.py", "envs/custom/llm.py", "data/replay_buffers/samplers/llm.py")
MODEL_NAME = re.compile(
    r"""(["'])(?:gpt2|GPT2|[\w.-]+/(?:Qwen|Llama|opt|gpt|GPT|Mistral)[\w.-]*)\1"""
)
WHY = (
    ("couldn't connect to 'https", "a download"),
    ("uvx", "a download"),
    ("vLLM", "an engine of vLLM"),
    ("vllm", "an engine of vLLM"),
    ("sglang", "a server of SGLang"),
    ("SGLang", "a server of SGLang"),
    ("AcceleratorError", "a GPU"),
    ("CUDA", "a GPU"),
    ("Ray", "Ray"),
    ("ray", "Ray"),
    ("Timeout", "more time than it gets"),
    ("ModuleNotFoundError", "another package"),
    ("ImportError", "another package"),
)
ROWS = {
    "gsm8k": {"question": "What is 2+3?", "answer": "It is 5.\n#### 5"},
    "summarize_comparisons": {
        "prompt": "I am",
        "chosen": "It is true, I",
        "rejected": "No, not I am",
    },
    "summarize_tldr": {"prompt": "I am the king of a land", "label": "A king"},
    "IFEval": {
        "key": 1,
        "prompt": "No commas.",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{}],
    },
    "MATH": {"problem": "What is 2+3?", "solution": r"\boxed{5}", "level": "1", "type": "Algebra"},
}


def examples(source: Path, name: str):
    """Yield (name, [statements]) of each docstring of a module, or of a page."""
    if source.suffix == ".rst":
        yield name, statements(source.read_text())
        return
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            found = statements(ast.get_docstring(node) or "")
            if found:
                yield f"{name}:{getattr(node, 'name', '')}", found


def statements(text: str) -> list[str]:
    """The statements of all ``>>>`` and ``code-block:: python`` of a text, in their order."""
    found = []
    for block in re.findall(r"code-block:: python\n((?:[ \t]*\n|[ \t]+.*\n?)+)", text):
        if ">>>" not in block:
            code = textwrap.dedent(re.sub(r"^\s*:\w+:.*\n", "", block, count=1))
            try:
                parts = ast.parse(code).body
            except SyntaxError:
                found.append(code)
            else:
                found += [ast.get_source_segment(code, part) + "\n" for part in parts]
    try:
        found += [each.source for each in doctest.DocTestParser().get_examples(text)]
    except ValueError:
        lines = re.findall(r"^\s*(?:>>>|\.\.\.)( .*|)$", text, re.MULTILINE)
        found.append("".join(line[1:] + "\n" for line in lines))
    return found


def with_what_is_here(code: str) -> str:
    """The embedded model, a small configuration and the CPU where an example names others."""
    from torchrl_llm.assets import embedded_model_path

    code = MODEL_NAME.sub(repr(str(embedded_model_path())), code)
    code = code.replace("OPTConfig()", "OPTConfig(hidden_size=16, ffn_dim=16, num_hidden_layers=1)")
    return code.replace('"cuda:0"', '"cpu"').replace('"cuda"', '"cpu"').replace(".cuda()", "")


def _embedded(loader):
    """``loader.from_pretrained`` of the embedded model where a name is not a folder here."""
    from torchrl_llm.assets import embedded_model_path

    original = loader.from_pretrained

    def from_pretrained(name, *args, **kwargs):
        return original(name if os.path.isdir(name) else embedded_model_path(), *args, **kwargs)

    loader.from_pretrained = from_pretrained


def _load_dataset(name, *args, split=None, **kwargs):
    from datasets import Dataset, DatasetDict

    row = next(row for part, row in ROWS.items() if part.lower() in name.lower())
    data = Dataset.from_list([row] * 64)
    return data if split else DatasetDict(train=data, test=data, valid1=data)


def run(codes: list[str], names: dict) -> list[list]:
    """(error or None, what was printed) of each statement; later ones run in spite of an error."""
    import torch
    from run_programs import watched

    torch.manual_seed(0)
    results = []
    for code in codes:
        error = None
        try:
            with watched(LIMIT_S) as printed:
                exec(compile(code, "<example>", "single", dont_inherit=True), names)
        except (Exception, SystemExit) as caught:
            error = f"{type(caught).__name__}: {caught}"[:300]
        results.append([error, printed.getvalue()])
    return results


def main(root: str, out: str, pages: list[str]) -> None:
    """Run all examples by one root and write the results as JSON."""
    import importlib

    import torch
    import torchrl
    from run_programs import after_the_rename
    from tensordict import TensorDict, lazy_stack, set_list_to_stack
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from torchrl_llm.assets import embedded_model_path

    sys.modules.update(vllm=None, ray=None)  # an engine is not started for an example
    logging.disable(logging.WARNING)
    set_list_to_stack(True).set()
    _embedded(AutoTokenizer)
    _embedded(AutoModelForCausalLM)
    with contextlib.suppress(ImportError):
        import datasets

        datasets.load_dataset = _load_dataset
    home = Path(torchrl.__file__).parent
    files = [p for room in ROOMS for p in sorted((home / room / "llm").rglob("*.py"))]
    files += [home / each for each in BESIDE]
    found = {}
    for path in files:
        name = ".".join(path.relative_to(home.parent).with_suffix("").parts)
        defined = [node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name")]
        for example, codes in examples(path, name.removesuffix(".__init__")):
            found[example] = (name.removesuffix(".__init__"), defined, codes)
    for page in pages:
        found |= {name: ("", [], codes) for name, codes in examples(Path(page), Path(page).name)}
    results = {}
    os.chdir(tempfile.mkdtemp())
    for example, (module, defined, codes) in found.items():
        names = {"torch": torch, "TensorDict": TensorDict, "lazy_stack": lazy_stack}
        names |= {
            "__name__": "example",
            "tokenizer": AutoTokenizer.from_pretrained(embedded_model_path()),
        }
        names["model"] = AutoModelForCausalLM.from_pretrained(embedded_model_path())
        if root == "torchrl_llm":
            module = after_the_rename(module)
        for name in defined:  # an example uses what stands beside it
            with contextlib.suppress(ImportError, AttributeError):
                names[name] = getattr(importlib.import_module(module), name)
        codes = [with_what_is_here(code) for code in codes]
        if root == "torchrl_llm":
            codes = [after_the_rename(code) for code in codes]
        results[example] = run(codes, names)
        Path(out).write_text(json.dumps(results))
    os._exit(0)  # what an example left running ends, too


def report(theirs: dict, ours: dict) -> None:
    """Print a line for each example, and the counts."""
    counts: dict[str, int] = {}
    for name, wanted in theirs.items():
        got = ours.get(name, [["did not end", ""]] * len(wanted))
        lost = [g[0] for w, g in zip(wanted, got, strict=True) if g[0] and not w[0]]
        failed = [w[0] for w in wanted if w[0]]
        if lost:
            kind = "needs a change"
        elif not failed:
            kind = "runs"
        else:
            kind = "does not run there"
        why = next(
            (why for part, why in WHY if any(part in e for e in failed)),
            "it is not whole, or fails",
        )
        if kind == "does not run there":
            kind += f": {why}"
        counts[kind] = counts.get(kind, 0) + 1
        print(f"{kind} | {name} | {(lost or failed or [''])[0]}")
        for w, g in zip(wanted, got, strict=True):
            if w[0] is None and g[0] is None and w[1] != g[1] and "--printed" in sys.argv:
                print(f"    torchrl: {w[1]!r}\n    here:    {g[1]!r}")
    print(sum(counts.values()), "examples;", counts)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        main(sys.argv[2], sys.argv[3], sys.argv[4:])
    pages = [str(Path(each).resolve()) for each in sys.argv[1:] if each.endswith(".rst")]
    with tempfile.TemporaryDirectory() as folder:
        outs = {root: f"{folder}/{root}.json" for root in ("torchrl", "torchrl_llm")}
        runs = [
            subprocess.Popen([sys.executable, __file__, "--run", root, out, *pages])
            for root, out in outs.items()
        ]
        if any(process.wait() for process in runs):
            sys.exit("an example ended the process; what it wrote says why")
        report(*(json.loads(Path(out).read_text()) for out in outs.values()))
