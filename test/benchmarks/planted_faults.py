"""Eighty faults planted one at a time: does the suite find each?

Each line of the table replaces one piece of the package's source by a faulty one and names the
tests that should fail. A fault names no file: its ``old`` text stands once in the package, wherever
that is, and a test file is found by its base name (every file of that name is run). A piece that
was written anew gets the same fault in its new words.

    python test/benchmarks/planted_faults.py [--only 3,7] [--jobs N] [--list]

The repository's files are copied into a temporary folder for each worker, and the faults are
planted there. First the named tests run without a fault; a test that fails then proves nothing and
is left out. FOUND: a test fails, or hangs until its time is over. MISSED: all pass. BROKEN: the
fault or its tests cannot be found or run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "torchrl_llm"
MARKERS = "not (vllm or ray or redis or browser or mcp or gpu or slow)"
TEST_S = 45  # one test; a fault may make it wait for ever
FAULT_S = 300  # all tests of a fault
BASE_S = 1200  # all tests without a fault


class Fault(NamedTuple):
    """A piece of source text, its faulty replacement, and base names of the tests to find it."""

    number: int
    what: str
    old: str
    new: str
    tests: str


# fmt: off
# ruff: noqa: E501
FAULTS = [Fault(i, *line) for i, line in enumerate([
    # functional
    ("sample deviation divides by G, population's by G - 1", '(groups.count - int(normalize == "sample"))', '(groups.count - int(normalize != "sample"))', "test_advantages.py"),
    ("GAE discounts one step too few", "(gamma * lmbda) ** shift", "(gamma * lmbda) ** (shift - 1)", "test_gae.py"),
    ("k3 adds the log-ratio", "log_ratio.expm1() - log_ratio", "log_ratio.expm1() + log_ratio", "test_kl.py"),
    ("PPO's bounds swapped", "ratio.clamp(1.0 - low, 1.0 + high) * advantage", "ratio.clamp(1.0 - high, 1.0 + low) * advantage", "test_clipped.py"),
    ("masked weights become 1 instead of 0", "weights.where((weights >= minimum) & (weights <= maximum), 0.0)", "weights.where((weights >= minimum) & (weights <= maximum), 1.0)", "test_ratios.py"),
    ("prompt mean divides by sequences", "return 1.0 / (lengths_N * num_groups)", "return 1.0 / (lengths_N * num_sequences)", "test_reduce.py"),
    ("a packed token does not see itself", "own = torch.ones(block.width, block.width, dtype=torch.bool, device=device).tril()", "own = torch.ones(block.width, block.width, dtype=torch.bool, device=device).tril(-1)", "test_packing.py"),
    ("chunked head forgets the largest logit", "log_probs = (picked - log_sum).clamp_(max=0.0)", "log_probs = (picked - log_total).clamp_(max=0.0)", "test_chunked_head.py"),
    # data
    ("a response gets the number of the next turn", "return prompt.num_turns - begun", "return prompt.num_turns - begun + 1", "test_record.py"),
    ("messages from inside a conversation count as its beginning", ".all(1) & (starts[:, 0] % width == 0)", ".all(1)", "test_message_grid.py"),
    ("sampled tokens counted at the wrong end of the row", "(source[-response.shape[0] :] == Source.SAMPLED)", "(source[: response.shape[0]] == Source.SAMPLED)", "test_waves.py"),
    ("names of weights are not in their digest", '(f"{name}|{data.dtype}|', '(f"{data.dtype}|', "test_fingerprint.py"),
    # formatter
    ("the closing token counts as said", "return Ending(ids[:at], ids[at:], closer)", "return Ending(ids[: at + 1], ids[at + 1 :], closer)", "test_respond.py"),
    ("injected role markers are looked for in the wrong part", "self._roles.intersection(body)", "self._roles.intersection(ending.tail)", "test_respond.py"),
    ("ids held already are encoded twice", "if ids[:n] == held[-n:]), 0)", "if ids[:n] == held[-n:]), 0) * 0", "test_continuation.py test_formatter.py"),
    # replay_buffers
    ("rewards of joined turns averaged", "return torch.stack(rewards).sum(0)", "return torch.stack(rewards).mean(0)", "test_join.py"),
    ("a turn is joined though the last old id changed", "return torch.equal(prompt[: old.shape[0]], old)", "return torch.equal(prompt[: old.shape[0] - 1], old[:-1])", "test_join.py"),
    ("groups given up one too early", "while len(self._groups) > self.max_queued_groups:", "while len(self._groups) >= self.max_queued_groups:", "test_group.py"),
    # modules: policies
    ("scores shifted by one place", "torch.cat([zero, row]) if length else row", "torch.cat([row, zero]) if length else row", "test_wrapper.py"),
    ("a response cut by its length counts as a tool call", 'message.get("tool_calls") and completion.finish_reason == FinishReason.STOP', 'message.get("tool_calls") and completion.finish_reason == FinishReason.LENGTH', "test_wrapper.py"),
    ("a batch below the minimum waits for ever", "if size >= self.min_batch_size or now >= first.arrived + self.timeout_s:", "if size >= self.min_batch_size:", "test_batching.py"),
    # modules: backends
    ("nucleus leaves out the token that crosses p", "dropped = mass - units >= mass[:, -1:]", "dropped = mass >= mass[:, -1:]", "test_fake.py test_transformers.py"),
    ("an end at the last allowed token is a length cut", "stopped = (stops <= limits).tolist()", "stopped = (stops < limits).tolist()", "test_fake.py test_transformers.py"),
    ("a token is scored at its own place", "index - self.starts[self.row] - 1", "index - self.starts[self.row]", "test_layouts.py"),
    ("a server that encoded another prompt is believed", "return choice, list(known[0]) == list(prompt)", "return choice, True", "test_openai.py"),
    # modules: remote
    ("the newest weights are refused", "return version >= self.minimum", "return version > self.minimum", "test_replica.py"),
    # weights
    ("the oldest file is the newest", 'path = max(Path(folder).glob(', 'path = min(Path(folder).glob(', "test_shared_files.py"),
    ("the last version goes with the one before", "self._path(self._sequence - _KEPT)", "self._path(self._sequence - _KEPT + 1)", "test_shared_files.py"),
    ("the canary looks at the moves that were followed", "torch.where(parts_A < _FOLLOWED,", "torch.where(parts_A > _FOLLOWED,", "test_canary_rule.py"),
    # envs
    ("overlong responses are rewarded", "penalties = self.coeff * overlong_penalty(", "penalties = -self.coeff * overlong_penalty(", "test_overlong.py"),
    ("an episode has one step too many", "cut = count >= self.max_steps", "cut = count > self.max_steps", "test_step_counter.py"),
    ("only truncated rows are asked again", "open_rows &= ~truncated.reshape(size, -1).any(-1).cpu()", "open_rows &= truncated.reshape(size, -1).any(-1).cpu()", "test_thinking.py"),
    ("a prompt is repeated once too often", "self._repeats_left = self.repeats\n", "self._repeats_left = self.repeats + 1\n", "test_dataloading.py"),
    ("minimax takes the worst move", "return max(-_value(put(", "return min(-_value(put(", "test_tic_tac_toe.py"),
    # tools
    ("calls are skipped after a success", "if executor.stop_on_error and not result.ok:", "if executor.stop_on_error and result.ok:", "test_executor.py"),
    ("private addresses are public", "address.is_global and not address.is_multicast", "not address.is_multicast", "test_browser_rules.py"),
    ("True, as Python spells it, is no boolean", 'value.strip().lower() if kind == "boolean" else value', "value", "test_call_arguments.py"),
    # rewards
    ("of several numbers any is the answer", "return values.pop() if len(values) == 1 else None", "return values.pop() if values else None", "test_gsm8k.py"),
    ("equal priorities bind to the right", "_PRIORITY[signs[-1]] >= priority", "_PRIORITY[signs[-1]] > priority", "test_countdown.py"),
    ("at least n means more than n", 'return count >= bound if relation == "at least"', 'return count > bound if relation == "at least"', "test_instructions.py"),
    # sandbox
    ("memory has no limit", '"RLIMIT_AS": (limits.memory_bytes, limits.memory_bytes)', '"RLIMIT_AS": (-1, -1)', "test_sandboxes.py"),
    ("a plain run sees the trainer's environment", "**ENVIRONMENT,\n", "**os.environ,\n", "test_sandboxes.py"),
    # collectors
    ("rows of the greatest age are stale", "return 0 <= age <= self.max_policy_age", "return 0 <= age < self.max_policy_age", "test_staleness.py"),
    ("tokens in flight count as sent", "sent=collector.sampled_tokens - collector.tokens_in_flight", "sent=collector.sampled_tokens", "test_worker.py"),
    # transport
    ("the next delivery counts as a repeat", "if delivery.sequence < counts.delivered:", "if delivery.sequence <= counts.delivered:", "test_local.py"),
    ("rows of a lost worker are not given back", "self._granted += max(self._forgotten[worker].claimed, 0)", "self._granted += 0", "test_local.py"),
    # objectives
    ("the entropy bonus is a penalty", 'fields["loss_entropy"] = -self.entropy_coeff', 'fields["loss_entropy"] = self.entropy_coeff', "test_policy_losses.py"),
    ("TIS's bounds swapped", "truncated_weights(of_level, self.bounds[1], self.bounds[0])", "truncated_weights(of_level, self.bounds[0], self.bounds[1])", "test_correction.py"),
    ("the value loss lost its weight", '"loss_value": self.value_coeff * reduce(loss)', '"loss_value": reduce(loss)', "test_ppo.py"),
    # credit
    ("a turn's reward stands one step late", "step = before[places + 1] - 1", "step = before[places + 1]", "test_gae.py"),
    ("SPO forgets by the whole way of the policy", "kl = self._moved - known[2]", "kl = self._moved", "test_spo.py"),
    ("a batch waits for too many groups", "if len(waiting) == self.batch_size // self.group_size:", "if len(waiting) == self.batch_size:", "test_batch.py"),
    # trainers
    ("the first warm-up step has rate 0", "return (step + 1) / warmup_steps", "return step / warmup_steps", "test_optim.py"),
    ("a step with a NaN gradient is taken", "if torch.isfinite(norm):", "if True:", "test_optim.py"),
    ("micro-batches above the budget", "(len(pieces[-1]) + 1) * longest if pieces", "len(pieces[-1]) * longest if pieces", "test_microbatch.py"),
    ("one checkpoint too many is kept", "self.steps()[: -self.keep_last]", "self.steps()[: -self.keep_last - 1]", "test_checkpoint.py"),
    # recipes and configuration
    ("zero variance is dropped when it is to be kept", 'self.filter.zero_variance == "keep"', 'self.filter.zero_variance != "keep"', "test_grpo_config.py"),
    # evaluation
    ("failed rewards count as zeros", 'rewards = flat["reward"][valid]', 'rewards = flat["reward"]', "test_evaluate.py"),
    ("pass@k of the wrong ones", "math.comb(num_samples - num_right, k) /", "math.comb(num_right, k) /", "test_records.py"),
    # algorithms
    ("presets train on tool results", 'return {"masking_strategy": "rlhf", **settings}', 'return {"masking_strategy": "sft", **settings}', "test_presets.py"),
    # rooms that were new or rewritten when these were added: data
    ("zeros of two types are one tensor", "key = (dense.dtype, dense.shape, dense", "key = (dense.shape, dense", "test_encoded_rows.py"),
    ("two tensors of a message share bytes", "holds = begin == end and begin % dtype.itemsize == 0", "holds = begin % dtype.itemsize == 0", "test_encoded_rows.py"),
    ("a support may have more ids than it counts", "int(counts.sum()) == len(ids)", "int(counts.sum()) <= len(ids)", "test_encoded_rows.py"),
    ("a counter comes back as a dict", "return Counter(found) if isinstance(now, Counter) else found", "return found", "test_saved_state.py"),
    ("the backend's versions of tokens are lost", "versions[:size] if c.versions is None else c.versions", "versions[:size]", "test_record.py"),
    ("what ends with a call loses its last blanks", 'content[:start].removesuffix("\\n"), calls', "content[:start].rstrip(), calls", "test_families.py"),
    # settings and arguments
    ("an open bound is closed", 'value < float(most) if right == ")"', 'value <= float(most) if right == ")"', "test_checked.py"),
    ("a recipe's own defaults are lost", "given = {} if default is MISSING else default", "given = {}", "test_write_config.py"),
    ("the schedule forgets the epochs", "return self.train.epochs * -(-self.rows_per_policy // size)", "return -(-self.rows_per_policy // size)", "test_strict_config.py"),
    # rewards
    ("NaN is a reward", "if not abs(value) <= _FLOAT32_MAX:", "if abs(value) > _FLOAT32_MAX:", "test_components.py"),
    ("no component left is a reward of 0", ".any(0) & there_KN.any(0)", ".any(0)", "test_components.py"),
    # weights
    ("a new sender counts its files by versions", 'self._sequence = int(path.stem.removeprefix("weights-"))', "self._sequence = self.last_version", "test_shared_files.py"),
    ("weights sent while an actor is rebuilt are missed", "if needed == done or self._ended.is_set():", "if done or self._ended.is_set():", "test_revived_actor.py"),
    # threads, logits, ledger
    ("work overtakes who waits to be alone", "is_inside or all(pauser == own for pauser in self._pausers)", "is_inside or self._alone is None", "test_background.py"),
    ("the slope of a soft cap forgets the cap", "1.0 - (squashed / self.softcap).square_()", "1.0 - squashed.square()", "test_chunked_head.py"),
    ("tokens that are carried are lost at a resume", 'saved = ("carried",)', "saved = ()", "test_ledger.py"),
    # games
    ("only the last move until one's turn is rewarded", "rewards[player] += outcome.rewards.get(player, 0.0)", "rewards[player] = outcome.rewards.get(player, 0.0)", "test_players.py"),
    # TorchRL's surface
    ("ids of the first messages stand for all", "if record is None or record.num_messages != len(chat):\n        return None\n    return record.token_ids", "if record is None:\n        return None\n    return record.token_ids", "test_views.py"),
    ("entropies at padding are kept", "return torch.where(self.mask, super().entropy(), 0.0)", "return super().entropy()", "test_wrapper.py"),
    # agents that learn in words
    ("an answer to another question is reused", 'if record is None or record["digest"] != digest:', "if record is None:", "test_calls.py"),
], start=1)]
# fmt: on


def the_file(root: Path, fault: Fault) -> Path:
    """The one file of the package that holds the fault's ``old`` text, once.

    Raises:
        LookupError: where it stands in no file, in several, or more than once.
    """
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        found += [path] * path.read_text().count(fault.old)
    if len(found) != 1:
        places = ", ".join(str(path.relative_to(root)) for path in found) or "no file"
        raise LookupError(f"{fault.old!r} must stand once in {PACKAGE}/, and is in {places}")
    return found[0]


def test_files(root: Path, fault: Fault) -> list[str]:
    """Paths of the fault's test files below ``test/``.

    Raises:
        LookupError: where there is no file of a name.
    """
    found = []
    for name in fault.tests.split():
        paths = sorted((root / "test").rglob(name))
        if not paths:
            raise LookupError(f"no {name} below test/")
        found += [path.relative_to(root).as_posix() for path in paths]
    return found


def copy_repository(target: Path) -> None:
    """Copy the files that git knows, as they are in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, place = REPOSITORY / name, target / name
        if source.is_symlink() or source.is_file():  # the recipes' pages are behind a link
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place, follow_symlinks=False)


def run_tests(root: Path, paths: list[str], *options: str, limit_s: float) -> tuple[int, str]:
    """Run pytest on some files of a copy; its exit status (-1: out of time) and its output."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKERS]
    try:
        done = subprocess.run(
            [*command, f"--timeout={TEST_S}", *options, *paths],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end within {limit_s:g} s"
    return done.returncode, done.stdout


def failing_tests(root: Path, paths: list[str]) -> set[str]:
    """Ids of tests that fail without a fault; of a file that cannot be run, its path."""
    status, output = run_tests(root, paths, "-rfE", "--tb=no", limit_s=BASE_S)
    if status == 0:
        return set()
    pattern = r"^(?:FAILED|ERROR) (\S+\.py(?:::.*?)?)(?: - .*)?$"
    return set(re.findall(pattern, output, re.MULTILINE)) or set(paths)


def write_source(path: Path, text: str) -> None:
    """Write a source file, and remove what Python compiled of it: its time may be the same."""
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def try_fault(root: Path, fault: Fault, failing: set[str]) -> tuple[str, str]:
    """Plant one fault in a copy, run its tests, take it out again: the verdict and why."""
    try:
        path, tests = the_file(root, fault), test_files(root, fault)
    except LookupError as error:
        return "BROKEN", str(error)
    if failing & set(tests):
        return "BROKEN", f"{', '.join(sorted(failing & set(tests)))} cannot be run"
    without = [f"--deselect={test}" for test in sorted(failing)]
    right = path.read_text()
    faulty = right.replace(fault.old, fault.new)
    try:
        compile(faulty, str(path), "exec")
        write_source(path, faulty)
        status, output = run_tests(root, tests, "-x", "-rfE", *without, limit_s=FAULT_S)
    except SyntaxError as error:
        return "BROKEN", f"the fault is a syntax error: {error}"
    finally:
        write_source(path, right)
    if status == 0:
        return "MISSED", f"all tests of {fault.tests} pass"
    seen = re.findall(r"^FAILED (.*)", output, re.MULTILINE)
    if status == 1 and (seen or "Timeout" in output):
        return "FOUND", seen[0].split(" - ")[0].split("/")[-1] if seen else "a test hangs"
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    return "BROKEN", f"pytest ended with {status}: {last}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="numbers of faults, with commas")
    parser.add_argument("--jobs", type=int, default=1, help="faults at the same time")
    parser.add_argument("--list", action="store_true", help="print the table and stop")
    options = parser.parse_args()
    chosen = FAULTS
    if options.only:
        numbers = {int(number) for number in options.only.split(",")}
        chosen = [fault for fault in FAULTS if fault.number in numbers]
    if options.list:
        for fault in chosen:
            try:
                place = the_file(REPOSITORY, fault).relative_to(REPOSITORY).as_posix()
                test_files(REPOSITORY, fault)
            except LookupError as error:
                place = f"BROKEN: {error}"
            print(f"{fault.number:>3}  {fault.what:<58}  {fault.tests:<42}  {place}")
        return 0
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        return _run(chosen, [Path(folder) / str(k) for k in range(max(1, options.jobs))])


def _run(chosen: list[Fault], copies: list[Path]) -> int:
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        copy_repository(copy)
        free.put(copy)
    named = set()
    for fault in chosen:
        try:
            named.update(test_files(copies[0], fault))
        except LookupError:
            continue
    start = time.monotonic()
    failing = failing_tests(copies[0], sorted(named)) if named else set()
    print(f"without a fault: {len(named)} files in {time.monotonic() - start:.0f} s", end="")
    print(f"; failing: {', '.join(sorted(failing)) or 'none'}", flush=True)

    def one(fault: Fault) -> tuple[Fault, str, str, float]:
        root, begun = free.get(), time.monotonic()
        try:
            verdict, why = try_fault(root, fault, failing)
        finally:
            free.put(root)
        seconds = time.monotonic() - begun
        print(f"{fault.number:>3}  {verdict:<6}  {seconds:5.1f} s  {fault.what}", flush=True)
        return fault, verdict, why, seconds

    with ThreadPoolExecutor(len(copies)) as pool:
        rows = list(pool.map(one, chosen))
    print(f"\n{'no':>3}  {'result':<6}  {'fault':<58}  found by, or why not")
    for fault, verdict, why, _ in rows:
        print(f"{fault.number:>3}  {verdict:<6}  {fault.what:<58}  {why}")
    verdicts = [verdict for _, verdict, _, _ in rows]
    counts = {name: verdicts.count(name) for name in ("FOUND", "MISSED", "BROKEN")}
    print(f"\n{len(rows)} faults: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
    return int(counts["FOUND"] != len(rows))


if __name__ == "__main__":
    sys.exit(main())
