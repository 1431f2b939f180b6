"""Results of a run: the shown metrics, as curves and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torchrl_llm._progress import clock
from torchrl_llm._run_log import RunLog, display_path, say, show
from torchrl_llm.trainers.checkpoint import CheckpointStore
from torchrl_llm.trainers.curves import Series, save_curves, terminal_curve
from torchrl_llm.trainers.held_out import compare_conversations
from torchrl_llm.trainers.kept_rollouts import KeptRollouts
from torchrl_llm.trainers.metrics import MetricsTable
from torchrl_llm.trainers.results import share_text, text_table
from torchrl_llm.trainers.reward_watch import RewardWatch


class EvalResult(Protocol):
    """Result of an evaluation for the run."""

    conversations: Sequence[str]

    def metrics(self) -> dict[str, float]:
        """Numbers named ``eval/...``."""


class Shown(NamedTuple):
    """Metrics that a run shows: at each step, as a curve, and at its end.

    Attributes:
        metric: metric of each step.
        name: its display name; the curve is ``<name>.png``.
        tokens: metric of the tokens of each step, for the tokens per second.
        held_out: metrics of an evaluation to their display names.
        opens: name of the class that loads a checkpoint.
    """

    metric: str = "train/reward"
    name: str = "reward"
    tokens: str = "train/tokens_generated"
    held_out: Mapping[str, str] = MappingProxyType({"eval/accuracy": "held-out greedy accuracy"})
    opens: str = "AutoModelForCausalLM"


_PASS = "eval/pass@"


def _first_and_last(values: Sequence[float]) -> str:
    return " -> ".join(f"{each:.3f}" for each in [*values[:-1][:1], *values[-1:]])


@dataclass(frozen=True, kw_only=True)
class RunResults:
    """Shows the results of a run.

    Attributes:
        folder: folder of the run.
        shown: which metrics are shown.
        log: log of the run.
        table: its metrics.
        store: its checkpoints.
        rollouts: its kept rows.
        watch: the watch of its rewards.
    """

    folder: Path
    shown: Shown
    log: RunLog
    table: MetricsTable
    store: CheckpointStore
    rollouts: KeptRollouts
    watch: RewardWatch

    def curves(self) -> dict[str, Series]:
        """The shown metrics of the steps and evaluations so far, each as steps and values."""
        names = (self.shown.metric, *self.shown.held_out)
        named = {name: self.table.read(name) for name in names}
        return {name: series for name, series in named.items() if series[0]}

    def show(
        self, before: Sequence[str], after: Sequence[str], more: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Draw the curve, and show how the held-out conversations have changed.

        Args:
            before: conversations of the first evaluation.
            after: conversations of the last evaluation.
            more: next commands, each with a name.
        """
        metric, name, *_ = self.shown
        with self.log:
            steps, values = self.table.read(metric)
            show(terminal_curve(steps, values, title=f"{metric} over steps"))
            picture = self.folder / f"{name}.png"
            try:
                save_curves(picture, self.curves())
            except OSError as error:  # a full disk; the numbers matter more than the picture
                say(f"{picture} could not be drawn: {error}")
            if before and after:
                show(compare_conversations(before, after))
            self.table.close()
            for logger, number in self.table.failures.items():
                say(f"{logger} raised {number} times, and may lack what it was given then")
            if lacking := self.rollouts.failures:
                say(f"the rollouts of {lacking} steps could not be written")
            if failed := self.watch.failures.most_frequent():
                say(f"{failed}, in the whole run")
            for step, share in zip(*self.table.read("eval/invalid"), strict=True):
                if share > 0:
                    say(
                        f"step {step}: {share:.0%} of the held-out prompts have no valid reward "
                        "and count as wrong"
                    )
            if rows := list(self._rows_at_k()):
                show(text_table(rows, header=["k", "avg@k", "pass@k", "majority@k"]))
            show(text_table([*self._rows(picture), *more]))

    def _rows_at_k(self) -> Iterator[list[str]]:
        """Results of the first and the last evaluation by ``k``, if there are several samples."""
        sizes = sorted(int(n.removeprefix(_PASS)) for n in self.table.columns if _PASS in n)
        for k in [1, *sizes] if sizes else []:
            own = "eval/accuracy" if k == 1 else None  # all three are equal with one sample
            names = ("eval/accuracy", own or f"{_PASS}{k}", own or f"eval/majority@{k}")
            yield [str(k), *(_first_and_last(self.table.read(name)[1]) for name in names)]

    def _rows(self, picture: Path) -> Iterator[tuple[str, str]]:
        """Results of the run, each with a name and a text."""
        metric, called, counted, held_out, opens = self.shown
        sampled = any(_PASS in column for column in self.table.columns)
        for name, label in (*held_out.items(), (metric, called)):
            _, values = self.table.read(name)
            if values:
                counts = self.table.read("eval/num_prompts")[1]
                text = _first_and_last(values)
                if name == "eval/accuracy" and counts and not sampled:
                    text += share_text(values[-1], counts[-1]).removeprefix(f"{values[-1]:.3f}")
                yield label.replace("greedy ", "") if sampled else label, text
        steps, seconds = self.table.read("perf/step_s")
        yield "steps", f"{len(steps):,} in {clock(sum(seconds))}"
        tokens = sum(self.table.read(counted)[1])
        yield "tokens", f"{tokens:,.0f}, {tokens / max(sum(seconds), 1e-9):,.0f} a second"
        yield "metrics", display_path(self.table.path)
        yield "curve", display_path(picture)
        yield "log", display_path(picture.with_name(self.log.path.name))
        if self.store.steps():
            yield "model", display_path(self.store.path(self.store.steps()[-1]))
            yield "", f"{opens}.from_pretrained opens it"
