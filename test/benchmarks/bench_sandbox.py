"""A sandboxed call against bubblewrap itself, and pieces of a session against fresh interpreters.

    python test/benchmarks/bench_sandbox.py

The other side of the first row starts ``bwrap`` with the same namespaces and the same interpreter
by ``subprocess.run`` and nothing else: no limits, no filter, no watching. Wall-clock time counts
here, since most of the work is done by other processes; beside it stands the CPU time of all.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

from torchrl_llm.sandbox import BubblewrapSandbox, Limits, SubprocessSandbox

CODE = "print(6 * 7)"


def bare(python):
    line = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    line = line if os.geteuid() == 0 else []
    line += ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr"]
    for folder in ("/bin", "/lib", "/lib64"):
        line += ["--symlink", f"usr{folder}", folder]
    line += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/sandbox", "--chdir", "/sandbox"]
    line += [python, "-E", "-s", "-B", "-c", CODE]
    return lambda: subprocess.run(line, capture_output=True, env={}, cwd="/", check=True)


def milliseconds(work):
    start, used = time.perf_counter(), sum(os.times()[:4])
    work()
    return 1000 * (time.perf_counter() - start), 1000 * (sum(os.times()[:4]) - used)


def main(repeats: int = 40) -> None:
    warnings.simplefilter("ignore")
    sandbox, plain = BubblewrapSandbox(), SubprocessSandbox()
    session = sandbox.open_session(Limits(cpu_s=60))
    sides = {
        "bwrap alone": bare(sandbox.python),
        "BubblewrapSandbox.run_python": lambda: sandbox.run_python(CODE),
        "SubprocessSandbox.run_python": lambda: plain.run_python(CODE),
        "a piece of a session": lambda: session.run(CODE),
    }
    times = {name: [] for name in sides}
    for _ in range(repeats):
        for name, work in sides.items():
            times[name].append(milliseconds(work))
    walls = {name: [wall for wall, _ in values] for name, values in times.items()}
    for name, values in times.items():
        cpu = statistics.mean(used for _, used in values)
        wall = walls[name]
        print(
            f"{name:32s} median {statistics.median(wall):7.2f} ms   best {min(wall):7.2f} ms"
            f"   CPU {cpu:6.1f} ms"
        )
    pairs = zip(walls["BubblewrapSandbox.run_python"], walls["bwrap alone"], strict=True)
    over = [ours - other for ours, other in pairs]
    print(f"above bubblewrap itself: median {statistics.median(over):.1f} ms")
    with ThreadPoolExecutor(64) as pool:
        start = time.perf_counter()
        results = list(pool.map(lambda _: sandbox.run_python(CODE), range(64)))
    assert all(result.stdout == "42\n" for result in results)
    print(f"64 at once: {time.perf_counter() - start:.2f} s")
    session.close()


if __name__ == "__main__":
    main()
