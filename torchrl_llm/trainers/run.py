"""Frame of a training loop: counts steps, records metrics, saves and resumes.

The loop itself stays in the recipe; :class:`TrainingRun` yields its steps and handles everything
that is the same for every algorithm. It does not depend on a loss or an environment: any object
with ``state_dict`` and ``load_state_dict`` can be a part of the run.
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
from pathlib import Path
from typing import Any

import yaml
from tensordict import LazyStackedTensorDict
from torch import nn

from torchrl_llm._files import replacing
from torchrl_llm._masking import masked
from torchrl_llm._progress import ProgressBar
from torchrl_llm._run_log import RunLog, display_path, say
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.errors import CheckpointError, ConfigError, RewardError, TorchRLLLMError
from torchrl_llm.trainers.checkpoint import CheckpointStore, lock_folder
from torchrl_llm.trainers.curves import Series
from torchrl_llm.trainers.hub import push_to_hub
from torchrl_llm.trainers.kept_rollouts import KeptRollouts, RowOutcomes
from torchrl_llm.trainers.loggers import make_loggers
from torchrl_llm.trainers.metrics import MetricsTable, memory_metrics
from torchrl_llm.trainers.progress import Cut, StopRequest
from torchrl_llm.trainers.ranks import ALONE, Ranks
from torchrl_llm.trainers.reward_watch import RewardWatch
from torchrl_llm.trainers.run_config import CheckpointConfig, EvalConfig, LoggingConfig, naming_keys
from torchrl_llm.trainers.run_folder import CONFIG_FILE, METRICS_FILE, nested, set_folders_aside
from torchrl_llm.trainers.run_models import RunModels, names_of_parameters
from torchrl_llm.trainers.run_results import EvalResult, RunResults, Shown
from torchrl_llm.trainers.run_saving import RunPosition, RunSaving, Stateful
from torchrl_llm.trainers.samples import sample_text


class TrainingRun:
    """Steps, records, evaluates, saves and resumes.

    Args:
        folder: folder of the run: ``run.log`` with all messages, ``config.yaml``, ``metrics.csv``,
            ``reward.png`` (see ``shown``), ``checkpoints/``, ``rollouts/``.
        max_steps: training steps of the whole run.
        model: it is part of every checkpoint, in the format of Hugging Face.
        tokenizer: saved with the model.
        models: instead of ``model`` and ``tokenizer``, several models by name, each with its
            tokenizer; each is a folder of that name in the checkpoint.
        parts: name to other objects that the next step depends on, in the order of restoring.
        evaluate: runs an evaluation; ``None`` for none.
        config: dotted key to value of the whole configuration. A resumed run must have the same
            configuration, except for keys of its end and its output. It is saved with every
            checkpoint, and in nested form in ``config.yaml``; passwords in URLs become ``***``.
        logging: settings of the loggers.
        checkpoint: settings of the checkpoints.
        evaluation: settings of the evaluations.
        watch: checks the rows that :meth:`record` gets.
        shown: metrics to show; by default the metrics of a run that learns from rewards.
        ranks: the processes that train together: rank 0 writes files and messages for all; all stop
            and save after the same step.
        ended: returns the reason why the run is over before ``max_steps``, or ``None`` if it is not
            over; only called on rank 0.
        tools: schemas of the tools that prompts describe; they are stored with the rollouts.
        num_rows: numbers of training and held-out rows, for display; ``None`` if unknown.

    Attributes:
        step: the last started step.
        model: as given; ``None`` if there are several.
        tokenizer: as given.
        metrics: metrics of the last completed step.
        stop: stop request of Ctrl-C and the other signals.
        how_to_resume: command that resumes a stopped run; ``None`` for the command that started it,
            with its folder.

    Raises:
        CheckpointError: the folder holds checkpoints and ``checkpoint.resume`` is ``never``,
            another process trains in it, or the newest checkpoint is of different models.
        ConfigError: no model, or ``model`` together with ``models``; or several models to push.

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
        num_rows: tuple[int | None, int | None] = (None, None),
    ) -> None:
        self.ranks = ranks
        self.folder = Path(folder)
        self.max_steps = max_steps
        self.step = 0
        self.model, self.tokenizer = model, tokenizer
        if (model is None) is (models is None):
            raise ConfigError("a run trains either model=... or models={name: (model, tokenizer)}")
        models = {"": (model, tokenizer)} if models is None else models
        held, names = RunModels(models), names_of_parameters(models, parts)
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
            # The terminal and torchrun both send the first Ctrl-C to a rank.
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
            self._results = RunResults(
                folder=self.folder,
                shown=self._shown,
                log=self._log,
                table=self._table,
                store=self._store,
                rollouts=self._rollouts,
                watch=self._watch,
            )
            self._saving = RunSaving(
                store=self._store,
                models=held,
                parts=dict(parts),
                names=names,
                rollouts=self._rollouts,
                watch=self._watch,
                table=self._table,
                ranks=ranks,
                config=self._config,
                max_shard_size=self._checkpoint.max_shard_size,
            )
            if saved:
                progress, repairs = self._saving.resume()
                self.step, self._before, self._after, self._owed = progress
            else:
                repairs = self._rollouts.resume(0)
            repairs = moved + repairs
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
            if self._logging.progress:
                rows = zip(num_rows, ("rows to train on", "held out"), strict=True)
                known = [f"{number:,} {what}" for number, what in rows if number is not None]
                self.say(", ".join([*held.describe(), *known]))
        self._reason = ranks.from_main(self._ended())
        self._bar = ProgressBar("step", max_steps, done=self.step)

    def say(self, text: str) -> None:
        """Write a message to standard error, above the progress bar, and to ``run.log``.

        Only rank 0 writes it.
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
            name: name of the part, which the progress bar shows if steps are long; parts with the
                same name are added up.

        Raises:
            ResourceError: the device ran out of memory; the message names the keys to lower.
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
        """Yield the remaining steps, from 1; at Ctrl-C, SIGTERM or SIGHUP, save and end early.

        Yields:
            The number of the step that the loop's body has to run.

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
        """Whether the run is over: after ``max_steps``, or after the step that ended it."""
        return self.step >= self.max_steps or self._reason is not None

    def _command(self, longer: Sequence[str] = ()) -> str:
        """The command that resumes the run, with overrides that replace the typed ones."""
        if self.how_to_resume:
            return " with ".join([self.how_to_resume, *longer])
        where = f"hydra.run.dir={shlex.quote(display_path(self.folder))}"
        return " ".join([_typed(longer), where, "checkpoint.resume=auto", *longer])

    def _next_commands(self) -> Iterator[tuple[str, str]]:
        """Next commands for the run, each with a name."""
        folder = shlex.quote(display_path(self.folder))
        yield "look at it", f"torchrl-llm view {folder} --open"
        if self.model is not None and self._shown.opens == Shown().opens:
            yield "talk to it", f"torchrl-llm chat {folder}"
        if not self.is_over:
            yield "go on", self._command()
        elif (longer := self._longer()) and self._reason is None:
            yield "train longer", self._command(longer)

    def _longer(self) -> list[str]:
        """Overrides for twice as many steps, or twice as many passes if passes are limited."""
        keys = ("train.max_steps", "train.max_epochs")
        done = {keys[0]: self.step}
        given = {key: self._config[key] for key in keys if self._config.get(key)}
        found = [f"{key}={2 * max(value, done.get(key, 0))}" for key, value in given.items()]
        return found or [f"{keys[0]}={2 * self.max_steps}"] * (keys[0] in self._config)

    def record(
        self,
        metrics: Mapping[str, Any],
        rows: LazyStackedTensorDict | None = None,
        outcomes: RowOutcomes | None = None,
    ) -> None:
        """Complete the step: write its metrics, and evaluate and save if due.

        Call it once, at the end of the loop's body.

        Args:
            metrics: ``train/`` and ``perf/`` names to numbers; some are :class:`Shown`.
            rows: all rows collected for the step: ``logging.samples`` shows two of them, and the
                run's :class:`~torchrl_llm.trainers.RewardWatch` checks all.
            outcomes: outcomes of the rows, stored with the rows that ``logging.rollouts`` keeps;
                see :meth:`~torchrl_llm.trainers.BatchSource.outcomes`.

        Raises:
            RewardError: the watch ends the run, because no row has a valid reward; the run is
                saved.
        """
        if self._started is None:
            raise RuntimeError("call TrainingRun.record exactly once in each of TrainingRun.steps")
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
            f"step {self.step}: {self._watch.explain()}. Fix the reward, and resume from "
            f"{self._store.path(self.step)}:\n  {self._command()}\n"
            "reward.on_all_invalid=continue continues with any rewards"
        )

    def evaluate(self) -> EvalResult:
        """Evaluate the present model; nothing is recorded.

        Raises:
            ConfigError: the run has no evaluation.
        """
        if self._evaluate is None:
            raise ConfigError("this run has no held-out prompts: eval.num_prompts is 0")
        return self._evaluate()

    def curves(self) -> dict[str, Series]:
        """The shown metrics of the steps and evaluations so far, each as steps and values."""
        return self._results.curves()

    def finish(self) -> None:
        """Draw the curve and show how the held-out conversations have changed.

        Raises:
            RewardError: no step of the run had a valid reward, so that nothing was learned.
            SystemExit: the run was interrupted; the exit code is the code of the signal (130 for
                Ctrl-C), so that the caller does not consider the run finished.
        """
        if self.ranks.is_main:
            self._results.show(self._before, self._after, self._next_commands())
        values = self.ranks.from_main(self._table.read(self._shown.metric)[1])
        if values and all(map(math.isnan, values)):
            raise RewardError(
                f"none of the {len(values)} steps had a valid {self._shown.name}: the weights have "
                "not changed"
            )
        pushes = self.ranks.is_main and self._checkpoint.push_to_hub is not None
        if pushes and self.is_over:
            self._push(self._checkpoint.push_to_hub)
        if self._stopped_by is not None:
            raise SystemExit(128 + self._stopped_by)

    def _push(self, name: str) -> None:
        try:
            url = push_to_hub(self._store.path(self.step), name, command=_typed())
        except TorchRLLLMError as error:  # the run is done and saved, even if the push fails
            self.say(str(error))
        else:
            self.say(f"pushed to {url}")

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
        """Write the row of the step, or leave it to the resumed run, which evaluates first."""
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
        """Numbers and conversations of an evaluation; empty if a stop request has cut it."""
        numbers, conversations, self._cut = {}, [], True
        if self.ranks.is_main:  # all ranks have the same prompts and batches as a single process
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
        return self._saving.save(RunPosition(self.step, self._before, self._after, self._owed))


@contextmanager
def _objects_at_rest() -> Iterator[None]:
    """Exclude half a million objects of the imports from the garbage collection of each step."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # a program that continues can free the memory of the run


def _typed(changed: Sequence[str] = ()) -> str:
    """The typed command, without changed keys, and without keys for the folder and for resuming."""
    begun, *arguments = map(masked, sys.argv)
    dropped = {"checkpoint.resume", "hydra.run.dir", *(a.partition("=")[0] for a in changed)}
    kept = [a for a in arguments if a.partition("=")[0] not in dropped]
    # A console command runs by its name, and a page with Python.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        many = f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
        begun = f"{many} {shlex.quote(begun) if begun.endswith('.py') else '-m torchrl_llm'}"
    else:
        begun = f"python {shlex.quote(begun)}" if begun.endswith(".py") else begun
    return f"{begun} {shlex.join(kept)}".strip()
