"""Frame of a training loop: which step it is, what is recorded, when to save, how to go on.

The loop itself stays in the recipe; :class:`TrainingRun` hands it the steps and looks after
everything that is the same for every algorithm. It knows no loss and no environment: whatever has
``state_dict`` and ``load_state_dict`` can be a part of the run.
"""

from __future__ import annotations

import gc
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import torch
import yaml
from tensordict import LazyStackedTensorDict
from torch import nn

from torchrl_llm._files import replacing
from torchrl_llm._progress import ProgressBar, clock
from torchrl_llm._redis import masked
from torchrl_llm._run_log import RunLog, say, show
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    RewardError,
    TorchRLLLMError,
)
from torchrl_llm.modules.weight_files import size_in_bytes
from torchrl_llm.trainers.checkpoint import (
    CheckpointStore,
    load_rng_state,
    lock_folder,
    rng_state,
)
from torchrl_llm.trainers.curves import Series, save_curves, terminal_curve
from torchrl_llm.trainers.hub import check_repository, push_to_hub
from torchrl_llm.trainers.kept_rollouts import Kept, KeptRollouts, RowOutcomes
from torchrl_llm.trainers.loggers import make_loggers
from torchrl_llm.trainers.metrics import MetricsTable, memory_metrics, number
from torchrl_llm.trainers.out_of_memory import naming_keys
from torchrl_llm.trainers.progress import Cut, StopRequest, compare_conversations
from torchrl_llm.trainers.rank_state import rank_state
from torchrl_llm.trainers.ranks import ALONE, Ranks
from torchrl_llm.trainers.results import share_text, text_table
from torchrl_llm.trainers.reward_watch import RewardWatch
from torchrl_llm.trainers.run_folder import (
    CONFIG_FILE,
    METRICS_FILE,
    nested,
    set_folders_aside,
)
from torchrl_llm.trainers.run_models import (
    RunModels,
    load_part_states,
    names_of_parameters,
    part_states,
    split_parts,
)
from torchrl_llm.trainers.samples import sample_text

# What may differ between a run and its continuation: none of it changes what was computed so far.
_FREE_ON_RESUME = ("checkpoint.", "logging.", "eval.", "redis.", "ray.")
_FREE_ON_RESUME += ("train.max_steps", "train.max_epochs")
_FREE_ON_RESUME += ("train.micro_token_budget", "train.packing", "train.no_signal_steps")
_FREE_ON_RESUME += ("reward.on_all_invalid", "train.parallel", "train.timeout_s")
_FREE_ON_RESUME += ("train.max_seq_len", "train.on_overlong")  # a row that was too long ended it
_FREE_ON_RESUME += ("env.on_overlong",)


@dataclass(kw_only=True)
class LoggingConfig:
    """Where numbers go; ``metrics.csv`` is always written.

    Attributes:
        backend: any of ``csv``, ``tensorboard``, ``wandb``, ``mlflow``, ``trackio``.
        experiment_name: name of the run for those.
        project: W&B's or Trackio's project, MLflow's experiment; ``None`` for what the environment
            says (``WANDB_PROJECT``, ``MLFLOW_EXPERIMENT_NAME``), else one of their own.
        progress: show a progress bar.
        samples: steps between two answers of the batch that are shown, the best and the worst to
            one prompt, and those of the first step; ``None`` for none. A run of 100 steps shows
            its start, its middle and its end.
        rollouts: rows that are kept in ``<run folder>/rollouts``, for
            :class:`~torchrl_llm.data.rollout_store.RolloutStore`: 16 of each step, all, or none.
    """

    backend: list[str] = field(default_factory=lambda: ["csv"])
    experiment_name: str = "run"
    project: str | None = None
    progress: bool = True
    samples: int | None = 50
    rollouts: Kept = "sample"

    def __post_init__(self) -> None:
        if self.samples is not None and self.samples < 1:
            raise ConfigError(f"logging.samples must be at least 1 or null, got {self.samples}")


@dataclass(kw_only=True)
class CheckpointConfig:
    """Checkpoints in ``<run folder>/checkpoints``; the last step is always saved.

    Attributes:
        interval: steps between checkpoints; ``None`` for the last step only.
        keep_last: how many are kept.
        resume: ``auto`` continues from the newest whole checkpoint of the run's folder, or begins
            where there is none; ``never`` begins, and refuses a folder that holds checkpoints.
        push_to_hub: repository, ``owner/name``, that the model is pushed to at the end of the run;
            it is made private where there is none. A push that fails is told, and changes nothing.
        max_shard_size: weights that a file of the model may hold, as ``"5GB"`` or ``"500MB"``; a
            larger model is written as shards with an index, which ``from_pretrained`` opens.
    """

    interval: int | None = 100
    keep_last: int | None = 2
    max_shard_size: str = "5GB"
    resume: Literal["never", "auto"] = "never"
    push_to_hub: str | None = None

    def __post_init__(self) -> None:
        for name in ("interval", "keep_last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"checkpoint.{name} must be at least 1, got {value}")
        try:
            size_in_bytes(self.max_shard_size)
        except ConfigError as error:
            raise ConfigError(f"checkpoint.max_shard_size: {error}") from None
        if self.push_to_hub is not None:
            try:
                check_repository(self.push_to_hub)
            except ConfigError as error:
                raise ConfigError(f"checkpoint.push_to_hub: {error}") from None


@dataclass(kw_only=True)
class EvalConfig:
    """Greedy accuracy on held-out prompts.

    Attributes:
        interval: steps between evaluations; ``None`` for the last step only.
        num_prompts: held-out prompts; 0 switches evaluation off, whatever the other keys say;
            ``None``: all that the task or a file holds out, or where the end of the rows is held
            out a tenth of them, at most 128.
        before_train: evaluate the model as it is first.
        batch_size: prompts that are answered together.
    """

    interval: int | None = None
    num_prompts: int | None = 512
    before_train: bool = True
    batch_size: int = 128

    def __post_init__(self) -> None:
        if (self.num_prompts or 0) < 0 or self.batch_size < 1:
            raise ConfigError(
                "eval.num_prompts must not be negative and eval.batch_size at least 1, got "
                f"{self.num_prompts} and {self.batch_size}"
            )
        if self.interval is not None and self.interval < 1:
            raise ConfigError(f"eval.interval must be at least 1 or null, got {self.interval}")


class EvalResult(Protocol):
    """What an evaluation returns to the run."""

    conversations: Sequence[str]

    def metrics(self) -> dict[str, float]:
        """Numbers named ``eval/...``."""


class Shown(NamedTuple):
    """What a run shows of its metrics: at each step, as a curve, and at its end.

    Attributes:
        metric: of each step.
        name: what it is called; the curve is ``<name>.png``.
        tokens: of each step, for the tokens a second.
        held_out: metrics of an evaluation, and what they are called.
    """

    metric: str = "train/reward"
    name: str = "reward"
    tokens: str = "train/tokens_generated"
    held_out: Mapping[str, str] = MappingProxyType({"eval/accuracy": "held-out greedy accuracy"})


class Stateful(Protocol):
    """A part of a run: optimizer, schedule, collector, buffer, ledger."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Continue after :meth:`state_dict`."""


class TrainingRun:
    """Steps, records, evaluates, saves and resumes.

    Args:
        folder: of the run: ``run.log`` with all that was said, ``config.yaml``, ``metrics.csv``,
            ``reward.png`` (see ``shown``), ``checkpoints/``, ``rollouts/``.
        max_steps: training steps of the whole run.
        model: it is part of every checkpoint, in its Hugging Face form.
        tokenizer: saved with the model.
        models: in their place several by name, each with its tokenizer: each is a folder of that
            name in the checkpoint.
        parts: name to whatever else the next step depends on, in the order in which it is restored.
        evaluate: runs an evaluation; ``None`` for none.
        config: flat dotted key to value of the whole configuration; a resumed run must have the
            same, but for where it ends and what it writes. It is saved with every checkpoint, and
            nested in ``config.yaml``; passwords in URLs as ``***``.
        logging: where numbers go.
        checkpoint: when to save.
        evaluation: when to evaluate.
        watch: looks at the rows that :meth:`record` is given.
        shown: which metrics are shown; the reward of those who learn from one by default.
        ranks: the processes that train together: rank 0 writes and speaks for all, and all stop,
            and save, after the same step.
        ended: says why the run is over before ``max_steps``; ``None`` while it is not; rank 0 is
            asked.
        tools: schemas of the tools that prompts describe; they are kept with the rollouts.

    Attributes:
        step: the last step that was begun.
        model: as given; ``None`` where there are several.
        tokenizer: as given.
        metrics: of the last step that was completed.
        stop: what Ctrl-C and the other signals ask for.
        how_to_resume: what goes on with a run that was stopped; ``None`` for the command that began
            it, with where it is.

    Raises:
        CheckpointError: the folder holds checkpoints and ``checkpoint.resume`` is ``never``,
            another process trains in it, or the newest checkpoint is of other models.
        ConfigError: no model, or one besides ``models``; or what is to be pushed is several.

    Iterate over :meth:`steps`, call :meth:`record` once in each, then :meth:`finish`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_steps: int,
        model: nn.Module | None = None,
        tokenizer: Any = None,
        models: Mapping[str, tuple[nn.Module, Any]] | None = None,
        parts: Mapping[str, Stateful],
        evaluate: Callable[[], EvalResult] | None = None,
        config: Mapping[str, Any] | None = None,
        logging: LoggingConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        evaluation: EvalConfig | None = None,
        watch: RewardWatch | None = None,
        shown: Shown | None = None,
        ranks: Ranks = ALONE,
        ended: Callable[[], str | None] | None = None,
        tools: Sequence[Any] | None = None,
    ) -> None:
        self.ranks = ranks
        self.folder = Path(folder)
        self.max_steps = max_steps
        self.step = 0
        self.model, self.tokenizer, self._parts = model, tokenizer, dict(parts)
        if (model is None) is (models is None):
            raise ConfigError("a run trains either model=... or models={name: (model, tokenizer)}")
        models = {"": (model, tokenizer)} if models is None else models
        self._models, self._names = RunModels(models), names_of_parameters(models, self._parts)
        self.metrics: dict[str, Any] = {}
        self._config = masked(dict(config or {}))
        self._logging = logging or LoggingConfig()
        self._checkpoint = checkpoint or CheckpointConfig()
        if model is None and self._checkpoint.push_to_hub is not None:
            raise ConfigError(
                "checkpoint.push_to_hub pushes one model, and this run has several: push the "
                "folder of each at its end, torchrl-llm push FOLDER OWNER/NAME"
            )
        self._evaluation = evaluation or EvalConfig()
        self._watch = watch or RewardWatch()
        self._shown = shown or Shown()
        self._ended = ended or (lambda: None)
        self._evaluate = None if self._evaluation.num_prompts == 0 else evaluate
        self._store = CheckpointStore(
            self.folder / "checkpoints",
            keep_last=self._checkpoint.keep_last,
            ranks=ranks,
            spare=(METRICS_FILE,),
        )
        self._rollouts = KeptRollouts(self.folder, self._logging.rollouts, ranks, tools)
        self._retired: list[Any] = []
        self._before: list[str] = []
        self._after: list[str] = []
        self._started: float | None = None
        self._stopped_by: signal.Signals | None = None
        self._cut = False
        self._owed: dict[str, Any] | None = None
        self.how_to_resume: str | None = None
        self.stop = StopRequest(
            lambda: self.say(
                f"stopping after step {self.step}, then saving; press Ctrl-C again to stop at once"
            ),
            # The terminal and torchrun both tell a rank of the first Ctrl-C.
            presses=2 if ranks.world == 1 else 3,
        )
        moved: list[str] = []
        if ranks.is_main:
            self._lock = lock_folder(self.folder)
            moved = set_folders_aside(self.folder)
            self._store.sweep()
        saved = ranks.from_main(self._store.steps())
        if saved and self._checkpoint.resume == "never":
            raise CheckpointError(
                f"{self.folder} holds a run up to step {saved[-1]}; continue it with "
                "checkpoint.resume=auto, or choose another folder (hydra.run.dir)"
            )
        self._seconds: dict[str, float] = {}
        self._accuracy: float | None = None
        self._log = RunLog.of(self.folder)
        self._log.progress = self._logging.progress
        with self._logged():
            self._table = MetricsTable(
                self.folder / "metrics.csv",
                make_loggers(
                    self._logging.backend if ranks.is_main else (),
                    run_dir=self.folder,
                    experiment_name=self._logging.experiment_name,
                    project=self._logging.project if ranks.is_main else None,
                ),
                columns=(self._shown.metric, *self._shown.held_out),
            )
            repairs = moved + (self._resume() if saved else self._rollouts.resume(0))
            if self._config and ranks.is_main:
                text = yaml.safe_dump(nested(self._config), sort_keys=False, allow_unicode=True)
                with replacing(self.folder / CONFIG_FILE) as draft:
                    draft.write_text(text, encoding="utf-8")
                self._table.log_config(self._config)
            for repair in repairs:
                self.say(repair)
            if saved:
                self._accuracy = next(reversed(self._table.read("eval/accuracy")[1]), None)
                self.say(f"resumed from {self._store.path(self.step)}")
        self._reason = ranks.from_main(self._ended())
        self._bar = ProgressBar("step", max_steps, done=self.step)

    def say(self, text: str) -> None:
        """Tell the person something: on standard error, above the bar, and in ``run.log``.

        Of several ranks only the first speaks.
        """
        if self.ranks.is_main:
            with self._log:
                say(text)

    def _logged(self) -> AbstractContextManager[Any]:
        return self._log if self.ranks.is_main else nullcontext()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure a part of a step: ``with run.timed("sample"):`` gives ``perf/sample_s``.

        Args:
            name: of the part, which the bar shows where steps are long; several parts of one name
                are added up.

        Raises:
            ResourceError: the device ran out of memory; says which keys to lower.
        """
        self._bar.phase(name)
        begun = time.perf_counter()
        try:
            with naming_keys(name, self._config):
                yield
        finally:
            seconds = time.perf_counter() - begun
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def steps(self) -> Iterator[int]:
        """The steps that are left, from 1; ends early, and saved, at Ctrl-C, SIGTERM or SIGHUP.

        Yields:
            The number of the step that the loop's body is to make.

        Raises:
            RewardError: see :meth:`record`.
        """
        with self._logged():
            with self.stop, self._bar, _objects_at_rest():
                yield from self._steps()
            if self._cut or (self.step < self.max_steps and self._reason is None):
                self._stopped_by = next(filter(None, self.ranks.gather(self.stop.signal)))
            if self.step == 0:
                self.say("stopped before the first step; there is nothing to save")
            elif self._reason is not None:
                self.say(f"ended with step {self.step}: {self._reason}")
            elif self.step < self.max_steps or self._cut:
                self.say(f"saved {self._store.path(self.step)}; to go on:\n  {self._command()}")

    def _steps(self) -> Iterator[int]:
        if self.step == 0 and self._evaluation.before_train and self._evaluate is not None:
            numbers, self._before = self._measured()
            if not self._cut:
                self._write(0, numbers)
        if self._owed is not None:
            numbers, self._after = self._measured()
            self._write_measured(self._owed, numbers)
        while not self.is_over and not self.ranks.any(self.stop.requested):
            self.step += 1
            self._started = time.perf_counter()
            yield self.step
            if self._started is not None:
                raise RuntimeError(f"step {self.step} ended without TrainingRun.record")
        if self.step:
            self._save_unless_saved()

    def _save_unless_saved(self) -> None:
        if self.ranks.from_main(self.step not in self._store.steps()):
            self.save()

    @property
    def is_over(self) -> bool:
        """Whether the last step is done: that of ``max_steps``, or the one that ended the run."""
        return self.step >= self.max_steps or self._reason is not None

    def _command(self) -> str:
        """What it takes to go on."""
        where = f"hydra.run.dir={shlex.quote(str(self.folder))}"
        return self.how_to_resume or f"{_typed()} {where} checkpoint.resume=auto"

    def record(
        self,
        metrics: Mapping[str, Any],
        rows: LazyStackedTensorDict | None = None,
        outcomes: RowOutcomes | None = None,
    ) -> None:
        """Complete the step: write its metrics, evaluate and save where that is due.

        Call it once, at the end of the loop's body.

        Args:
            metrics: ``train/`` and ``perf/`` names to numbers; some are :class:`Shown`.
            rows: all rows that were collected for the step: ``logging.samples`` shows two of them,
                and the run's :class:`~torchrl_llm.trainers.RewardWatch` looks at all.
            outcomes: what became of the rows, kept with those that ``logging.rollouts`` keeps; see
                :meth:`~torchrl_llm.trainers.BatchSource.outcomes`.

        Raises:
            RewardError: the watch ends the run, because no row has a valid reward; it is saved.
        """
        if self._started is None:
            raise RuntimeError("TrainingRun.record belongs once into each of TrainingRun.steps")
        seconds, self._started = time.perf_counter() - self._started, None
        parts = {f"perf/{name}_s": value for name, value in self._seconds.items()}
        self._seconds.clear()
        notice = None if rows is None else self._watch.see(rows)
        # Rank 0 has seen the rows of all.
        self._watch.is_all_invalid = self.ranks.from_main(self._watch.is_all_invalid)
        if rows is not None and (self.step == 1 or self._falls_on(self._logging.samples)):
            self.say(f"step {self.step}, two answers of the batch\n{sample_text(rows)}")
        if outcomes is None:
            outcomes = RowOutcomes([] if rows is None else row_list(rows), is_known=False)
        self._rollouts.record(self.step, outcomes)
        self._complete(dict(metrics), parts, seconds)
        if notice is not None:
            self.say(notice)
        if self._watch.ends_run:
            self._end_without_rewards()

    def _end_without_rewards(self) -> None:
        self._save_unless_saved()
        raise RewardError(
            f"step {self.step}: {self._watch.explain()}. Mend the reward, and go on from "
            f"{self._store.path(self.step)}:\n  {self._command()}\n"
            "reward.on_all_invalid=continue goes on whatever the rewards are"
        )

    def evaluate(self) -> EvalResult:
        """Evaluate the model as it is now; nothing is recorded.

        Raises:
            ConfigError: the run has no evaluation.
        """
        if self._evaluate is None:
            raise ConfigError("this run holds no prompts out: eval.num_prompts is 0")
        return self._evaluate()

    def curves(self) -> dict[str, Series]:
        """What is shown of the steps and evaluations so far, each as steps and values."""
        names = (self._shown.metric, *self._shown.held_out)
        named = {name: self._table.read(name) for name in names}
        return {name: series for name, series in named.items() if series[0]}

    def finish(self) -> None:
        """Draw the curve and show what became of the held-out conversations.

        Raises:
            RewardError: no step of the run had a valid reward, so that nothing was learned.
            SystemExit: the run was interrupted; its code is that of the signal (130 for Ctrl-C),
                so that whoever started the run does not take it for a finished one.
        """
        metric, name, *_ = self._shown
        steps, values = self._table.read(metric)
        if self.ranks.is_main:
            self._show_results(steps, values)
        values = self.ranks.from_main(values)
        if values and all(map(math.isnan, values)):
            raise RewardError(
                f"none of the {len(values)} steps had a valid {name}: the weights are as they were"
            )
        pushes = self.ranks.is_main and self._checkpoint.push_to_hub is not None
        if pushes and self.is_over:
            self._push(self._checkpoint.push_to_hub)
        if self._stopped_by is not None:
            raise SystemExit(128 + self._stopped_by)

    def _show_results(self, steps: list[int], values: list[float]) -> None:
        metric, name, *_ = self._shown
        with self._log:
            show(terminal_curve(steps, values, title=f"{metric} over steps"))
            picture = self.folder / f"{name}.png"
            try:
                save_curves(picture, self.curves())
            except OSError as error:  # a full disk; the numbers are more than their picture
                say(f"{picture} could not be drawn: {error}")
            if self._before and self._after:
                show(compare_conversations(self._before, self._after))
            self._table.close()
            for logger, number in self._table.failures.items():
                say(f"{logger} raised {number} times, and may lack what it was given then")
            if lacking := self._rollouts.failures:
                say(f"the rollouts of {lacking} steps could not be written")
            if failed := self._watch.failures.most_frequent():
                say(f"{failed}, in the whole run")
            for step, share in zip(*self._table.read("eval/invalid"), strict=True):
                if share > 0:
                    say(
                        f"step {step}: {share:.0%} of the held-out prompts have no valid reward "
                        "and count as wrong"
                    )
            show(text_table(self._results(picture)))

    def _push(self, name: str) -> None:
        try:
            url = push_to_hub(self._store.path(self.step), name, command=_typed())
        except TorchRLLLMError as error:  # the run is done and saved, whatever the hub says
            self.say(str(error))
        else:
            self.say(f"pushed to {url}")

    def _results(self, picture: Path) -> Iterator[tuple[str, str]]:
        """What came of the run, a name and a text each."""
        metric, called, counted, held_out = self._shown
        for name, label in (*held_out.items(), (metric, called)):
            _, values = self._table.read(name)
            if values:
                first = f"{values[0]:.3f} -> " if len(values) > 1 else ""
                counts = self._table.read("eval/num_prompts")[1]
                known = name == "eval/accuracy" and bool(counts)
                last = share_text(values[-1], counts[-1]) if known else f"{values[-1]:.3f}"
                yield label, first + last
        steps, seconds = self._table.read("perf/step_s")
        yield "steps", f"{len(steps):,} in {clock(sum(seconds))}"
        tokens = sum(self._table.read(counted)[1])
        yield "tokens", f"{tokens:,.0f}, {tokens / max(sum(seconds), 1e-9):,.0f} a second"
        yield "metrics", str(self._table.path)
        yield "curve", str(picture)
        yield "log", str(picture.with_name(self._log.path.name))
        if self._store.steps():
            yield "model", str(self._store.path(self._store.steps()[-1]))
            yield "", "AutoModelForCausalLM.from_pretrained opens it"

    def _complete(
        self, metrics: dict[str, Any], clocks: Mapping[str, float], seconds: float
    ) -> None:
        self._reason = self.ranks.from_main(self._ended())
        metrics |= self.ranks.maxima({**clocks, "perf/step_s": seconds, **memory_metrics()})
        metrics["perf/tokens_per_s"] = metrics.get(self._shown.tokens, 0) / metrics["perf/step_s"]
        metrics = self.ranks.from_main(metrics)
        self._bar.update(self.step, self._note(metrics))
        numbers, due = {}, self.is_over or self._falls_on(self._evaluation.interval)
        if due and self._evaluate is not None:
            numbers, self._after = self._measured()
            self._bar.note = self._note(metrics)
        self._write_measured(metrics, numbers)
        if self._falls_on(self._checkpoint.interval):
            self.save()

    def _write_measured(self, metrics: dict[str, Any], numbers: Mapping[str, float]) -> None:
        """Write the row of the step, or owe it to the run that goes on and evaluates first."""
        self.metrics = {**metrics, **numbers}
        self._owed = metrics if self._cut else None
        if not self._cut:
            self._write(self.step, self.metrics)

    def _write(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self.ranks.is_main:
            self._table.write(step, metrics)

    def _note(self, metrics: Mapping[str, Any]) -> str:
        speed = f"{metrics['perf/tokens_per_s']:,.0f} tokens/s"
        known = [] if self._accuracy is None else [f"accuracy {self._accuracy:.3f}"]
        value = metrics.get(self._shown.metric, math.nan)
        return ", ".join([f"{self._shown.name} {value:.3f}", speed, *known])

    def _measured(self) -> tuple[dict[str, float], list[str]]:
        """Numbers and conversations of an evaluation, none of one that a stop request has cut."""
        numbers, conversations, self._cut = {}, [], True
        if self.ranks.is_main:  # the same prompts in the same batches as in one process
            with suppress(Cut), self.stop.at_once(), naming_keys("evaluate", self._config):
                result = self._evaluate()
                numbers, conversations = result.metrics(), list(result.conversations)
                self._cut = False
        numbers, conversations, self._cut = self.ranks.from_main(
            (numbers, conversations, self._cut)
        )
        self._accuracy = numbers.get("eval/accuracy")
        return numbers, conversations

    def _falls_on(self, interval: int | None) -> bool:
        return interval is not None and self.step % interval == 0

    def save(self) -> Path:
        """Write a checkpoint of the present step; returns its folder."""
        self._rollouts.flush()
        shared, own = split_parts(self._parts)
        state = {
            "step": self.step,
            "config": self._config,
            "before": self._before,
            "after": self._after,
            "owed": self._owed and {name: number(value) for name, value in self._owed.items()},
            "models": self._models.state(),
            "parts": part_states(shared, self._names),
            "watch": self._watch.state_dict(),
            "retired": self._retired,
            "rollouts": self._rollouts.sizes(),
        }
        of_rank = {"parts": part_states(own, self._names), "rng": rng_state()}
        return self._store.save(self.step, state, own=of_rank, write_model=self._write_models)

    def _write_models(self, path: Path) -> dict[str, int]:
        if self.ranks.is_main:
            self._table.save(path / "metrics.csv")
        size = self._checkpoint.max_shard_size
        return self._models.write(path, max_shard_size=size, is_main=self.ranks.is_main)

    def _resume(self) -> list[str]:
        """Continue from the newest whole checkpoint; what had to be mended, a line each."""
        step, state, repairs = 0, {}, []
        if self.ranks.is_main:
            step, state, repairs = self._store.load_newest_whole(self._look_at)
        step = self.ranks.from_main(step)
        if not self.ranks.is_main:
            state = self._store.load(step, check=False)  # rank 0 has looked at it
        path = self._store.path(step)
        with _naming_state(path):
            self._check_config(masked(state["config"]))
            mine, notice = self._load_parts(path, step, state)
        repairs += [notice] if notice else []
        repairs += self._rollouts.resume(step, state.get("rollouts"))
        self.step, self._before, self._after = step, state["before"], state["after"]
        self._owed = state.get("owed")
        if self.ranks.is_main:
            repairs += self._resume_metrics(step, path / METRICS_FILE)
        load_rng_state(mine["rng"])
        return repairs

    def _look_at(self, step: int, state: Mapping[str, Any]) -> None:
        match state:
            case {
                "step": number,
                "config": dict(),
                "before": list(),
                "after": list(),
                "models": dict(),
                "parts": dict(),
                "watch": {"equal": list(), "failures": dict()},
                "retired": list(),
                "ranks": [{"parts": dict(), "rng": {"python": _, "numpy": _, "torch": _}}, *_],
            } if number == step:
                return
        raise DamagedCheckpointError(f"{self._store.path(step)} holds no state of a run's step")

    def _resume_metrics(self, step: int, copy: Path) -> Iterator[str]:
        is_whole = self._store.is_whole(step, copy.name)
        if is_whole is False:
            yield f"{copy} is damaged or gone, and is not used"
        given = None if is_whole is False or not copy.exists() else copy
        written = step if self._owed is None else step - 1
        wrong = self._table.resume(written, given, is_checked=bool(is_whole))
        if wrong is not None and written:
            mended = "mended from the checkpoint" if given else "its rows are lost"
            yield f"{wrong}; {mended}, to step {written}"

    def _load_parts(
        self, path: Path, step: int, state: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], str | None]:
        """Give models and parts their states; that of this rank, and what is to be told."""
        self._models.load(path, state["models"])
        shared, own = split_parts(self._parts)

        def read(wanted: dict[str, Any]) -> None:
            self._store.read_spread(step, wanted)

        load_part_states(shared, state["parts"], self._names, read=read)
        fresh = {"parts": part_states(own, self._names), "rng": rng_state()}
        mine, self._retired, notice = rank_state(
            state["ranks"],
            state["retired"],
            fresh,
            rank=self.ranks.rank,
            world=self.ranks.world,
            is_shared=sum(self.ranks.gather(bool(own))) > 1,
        )
        load_part_states(own, mine["parts"], self._names, read=read)
        self._watch.load_state_dict(state["watch"])
        return mine, notice

    def _check_config(self, earlier: Mapping[str, Any]) -> None:
        changed = [
            f"{key}: {earlier.get(key)!r} -> {self._config.get(key)!r}"
            for key in sorted(earlier.keys() | self._config.keys())
            if earlier.get(key) != self._config.get(key) and not key.startswith(_FREE_ON_RESUME)
        ]
        if changed:
            raise ConfigError(
                "checkpoint.resume=auto continues a run as it was, but these keys differ: "
                + "; ".join(changed)
            )


@contextmanager
def _naming_state(path: Path) -> Iterator[None]:
    """A state with the right checksum may still be of something else."""
    try:
        yield
    except (TorchRLLLMError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever foreign values mean to the parts that get them
        raise DamagedCheckpointError(
            f"a part of this run cannot take its state in {path} ({type(error).__name__}: {error}):"
            " it is damaged, or of something else. Rename that folder, and the same command goes on"
            " from the checkpoint before it, or begins"
        ) from error


@contextmanager
def _objects_at_rest() -> Iterator[None]:
    """Half a million objects of the imports need not be searched for garbage at every step."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # a program that goes on gets back the memory of a run that is over


def _typed() -> str:
    """What was typed to begin, without what says where and how to go on."""
    begun, *arguments = map(masked, sys.argv)
    kept = [a for a in arguments if not a.startswith(("checkpoint.resume", "hydra.run.dir"))]
    # A console command is called by its name, and a page by Python.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        many = f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
        begun = f"{many} {shlex.quote(begun) if begun.endswith('.py') else '-m torchrl_llm'}"
    else:
        begun = f"python {shlex.quote(begun)}" if begun.endswith(".py") else begun
    return f"{begun} {shlex.join(kept)}".strip()
