"""CPU time of every reader of what a policy wrote, on a megabyte of what a collapsed one writes.

    python test/benchmarks/bench_parsers.py [--size 1000000] [--worst 12]

The readers and the texts are those of test/test_linear_time.py; the aim is 0.5 s each. Beside them
stands the time that it takes to look at each character once (``str.count``), in the same run.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_linear_time import readers, texts

from torchrl_llm.errors import TorchRLLLMError


def cpu_seconds(read, text):
    begun = time.process_time()
    with suppress(TorchRLLLMError):
        read(text)
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1_000_000)
    parser.add_argument("--worst", type=int, default=12)
    options = parser.parse_args()
    readers()["language:response_language"]("It loads its profiles once.")
    gc.collect()
    gc.freeze()
    worst: dict[str, tuple[float, str]] = {}
    looked = 0.0
    for label, text in texts(options.size):
        looked = max(looked, cpu_seconds(lambda text: text.count("\u2603"), text))
        for name, read in readers().items():
            worst[name] = max(worst.get(name, (0.0, "")), (cpu_seconds(read, text), label))
    print(f"one look at each character: {looked * 1e3:.2f} ms")
    for name, (seconds, label) in sorted(worst.items(), key=lambda i: -i[1][0])[: options.worst]:
        print(f"{seconds:7.3f} s  {name:32} {label[:60]}")


if __name__ == "__main__":
    main()
