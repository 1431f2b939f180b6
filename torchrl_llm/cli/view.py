"""Shows runs and evaluations: ``torchrl-llm view RUN [RUN]`` writes an HTML page of one or two."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from torchrl_llm._checked import Ge, check
from torchrl_llm._files import replacing
from torchrl_llm._run_log import printable, show
from torchrl_llm._settings import Group
from torchrl_llm.cli._options import Word, parse
from torchrl_llm.errors import ConfigError, DataError

_MOST_ROWS = 2000
_FACTS = ("model.name", "env.dataset", "loss.type", "advantage.type", "optimizer.lr", "seed")
_EVALUATION = ("eval.repeats", "eval.split", "inference_model.max_tokens", "seed")
_INCOMPARABLE = {
    "env.dataset": "rewards, accuracies and lengths are those of different tasks",
    "model.name": "values in tokens or nats compare only if both models have one tokenizer",
}


class Options(Group):
    """Write one HTML page of a run, of an evaluation, or of two of them side by side.

    Any browser opens it without a network. A run shows its curves, and its rollouts token by token;
    a run of language-space training also its policies, the credit of each agent, and the episodes;
    an evaluation shows its figures, and its answers prompt by prompt.

    Attributes:
        runs: folder of a run or of an evaluation; or two folders, to compare.
        output: the page; default: view.html in RUN, or in the current folder for two.
        steps: rollouts of these steps only, as 40:60 or 40; default: all.
        rows: maximum number of rollouts (their steps are spread evenly over the run), or of
            answers.
        open: open the page in a browser.
    """

    runs: Annotated[list[str], Word("RUN")]
    output: Annotated[Path | None, "FILE"] = None
    steps: Annotated[str | None, "A:B"] = None
    rows: Annotated[int, "N"] = _MOST_ROWS
    open: bool = False


def main(arguments: Sequence[str]) -> int:
    """Write the page of a run, of an evaluation, or of two.

    Args:
        arguments: folders, and options.

    Returns:
        The exit status.

    Raises:
        ConfigError: an impossible option, or a page that cannot be written.
        DataError: there is no run, or its files are damaged.
    """
    given = parse(Options, "view", arguments)
    wanted = _span(given.steps)
    check("--rows", given.rows, Annotated[int, Ge(0)])

    from torchrl_llm.evaluation.report import rollout_page
    from torchrl_llm.evaluation.report.evaluation_folder import is_evaluation

    paths = [Path(each) for each in given.runs]
    if len(paths) > 2:
        raise ConfigError(f"view compares two runs, got {len(paths)}; plot compares any number")
    kinds = {is_evaluation(path) for path in paths}
    if len(kinds) > 1:
        raise ConfigError(
            f"{paths[0]} and {paths[1]} cannot be compared: one is an evaluation and the other a "
            "run; torchrl-llm evaluate model.name=RUN makes an evaluation of a run"
        )
    if given.steps is not None and (True in kinds or len(paths) > 1):
        raise ConfigError("--steps chooses the rollouts of one run; leave it out here")
    if len(paths) == 2:
        parts = _two_evaluations(paths, given.rows) if True in kinds else _two_runs(paths)
    else:
        parts = _evaluation(paths[0], given.rows) if True in kinds else _run(given, wanted)
    page = rollout_page(**parts)
    path = given.output or (paths[0] if len(paths) == 1 else Path()) / "view.html"
    try:
        with replacing(path) as draft:
            draft.write_text(page, encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: the path has no name
        raise ConfigError(
            f"the page {path} cannot be written: {error}; name another place with --output FILE"
        ) from error
    sys.stderr.writelines(f"{printable(notice)}\n" for notice in parts["notices"])
    if language := parts.get("language"):
        count = f"{sum(len(each['episodes']) for each in language['iterations']):,} episodes"
    elif len(paths) == 2 and True not in kinds:
        count = "two runs"
    else:
        count = f"{len(parts['rows']):,} {'answers' if True in kinds else 'rollouts'}"
    show(f"page {path}, {count}, {len(page) / 1e6:.1f} MB")
    if given.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def _one_run(path: str) -> Any:
    from torchrl_llm.trainers.run_comparison import find_runs

    runs, _ = find_runs([path])
    if len(runs) > 1:
        names = ", ".join(str(run.folder) for run in runs[:3])
        raise ConfigError(f"{path} contains {len(runs)} runs, name one of them: {names} ...")
    return runs[0]


def _run(given: Options, wanted: tuple[float, float]) -> dict[str, Any]:
    from torchrl_llm.evaluation.report.language_run import read_language_run

    run = _one_run(given.runs[0])
    given.output = given.output or run.folder / "view.html"
    language = read_language_run(run.folder, given.rows)
    rows, notices = ([], []) if language else _rollouts(run.folder, wanted, given.rows)
    facts = {key: run.config[key] for key in _FACTS if run.config.get(key) is not None}
    return {
        "rows": rows,
        "tokenizer": _tokenizer(run, notices) if rows else None,
        "metrics": run.metrics,
        "title": run.folder.resolve().name,
        "facts": language["facts"] if language else facts,
        "notices": notices,
        "language": language,
    }


def _two_runs(paths: Sequence[Path]) -> dict[str, Any]:
    from torchrl_llm.evaluation.report.two_runs import metric_table

    a, b = runs = [_one_run(str(path)) for path in paths]
    notices = [
        "Runs keep no answers to held-out prompts. torchrl-llm evaluate model.name=RUN makes an "
        "evaluation of each, and view compares the answers of two evaluations."
    ]
    if "paradigm" in a.config:  # no weights were trained
        notices = ["torchrl-llm view RUN shows the policies and the credit of each run."]
    for name, own, other in (("A", a, b), ("B", b, a)):
        if alone := [metric for metric in own.metrics if metric not in other.metrics]:
            notices.append(f"Only {name} has {', '.join(alone)}.")
    differ = [key for key in _INCOMPARABLE if a.config.get(key) != b.config.get(key)]
    notices += [f"{key} differs: {_INCOMPARABLE[key]}." for key in differ]
    return {
        "title": " and ".join(_names(runs)),
        "facts": {"A": a.folder, "B": b.folder},
        "notices": notices,
        "rows": [],
        "tables": [_differences(runs), metric_table(a.metrics, b.metrics)],
        "runs": {name: run.metrics for name, run in zip(_names(runs), runs, strict=True)},
    }


def _names(runs: Sequence[Any]) -> list[str]:
    return [f"{x} {run.folder.resolve().name}" for x, run in zip("AB", runs, strict=True)]


def _differences(runs: Sequence[Any]) -> Any:
    from torchrl_llm.evaluation.report.page import Table
    from torchrl_llm.trainers.run_comparison import config_differences

    rows = config_differences(runs) or [["no key differs", "", ""]]
    return Table("Configuration", ["", "A", "B"], rows)


def _read(path: Path) -> Any:
    from torchrl_llm._settings import dotted
    from torchrl_llm.evaluation.report.evaluation_folder import read_evaluation
    from torchrl_llm.trainers.run_folder import read_config

    return read_evaluation(path, dotted(read_config(path)))


def _evaluation(path: Path, most: int) -> dict[str, Any]:
    found = _read(path)
    rows, total = found.rows(most), sum(map(len, found.prompts.values()))
    lacking = ", ".join(task for task in found.tasks if task not in found.figures)
    notices = [f"{lacking} has no figures: its evaluation has not ended."] if lacking else []
    return {
        "rows": rows,
        "title": found.title,
        "facts": {key: found.config[key] for key in _EVALUATION if found.config.get(key)},
        "notices": notices + _left_out(rows, total),
        "tables": found.tables(),
        "by_prompt": True,
    }


def _two_evaluations(paths: Sequence[Path], most: int) -> dict[str, Any]:
    from torchrl_llm.evaluation.report import two_runs

    a, b = runs = [_read(path) for path in paths]
    pairs, notices = two_runs.pair_answers(a, b)
    names = _names(runs)
    rows = two_runs.paired_rows(pairs, names, most)
    total = sum(len(pair.a) + len(pair.b) for pair in pairs)
    changes = [two_runs.change_table(pairs)] if pairs else []
    return {
        "title": " and ".join(names),
        "facts": {"A": a.title, "B": b.title},
        "notices": notices + _left_out(rows, total),
        "rows": rows,
        "tables": [_differences(runs), *changes, two_runs.figure_table(a, b)],
        "runs": {name: {} for name in names},
        "by_prompt": True,
    }


def _left_out(rows: Sequence[Any], total: int) -> list[str]:
    if len(rows) == total:
        return []
    return [f"{len(rows):,} of {total:,} answers are shown. --rows N chooses a different number."]


def _span(text: str | None) -> tuple[float, float]:
    low, colon, high = (text or ":").partition(":")
    try:
        first = int(low or 0)
        return first, int(high) if high else float("inf") if colon else first
    except ValueError:
        raise ConfigError(f"--steps takes A:B, as 40:60, :60, 40: or 40, got {text!r}") from None


def _rollouts(run: Path, wanted: tuple[float, float], most: int) -> tuple[list[Any], list[str]]:
    """Rows to show, and a notice about the others."""
    from torchrl_llm.data.rollout_store import FOLDER, RolloutStore

    if not (run / FOLDER).is_dir():
        told = "This run kept no rollouts. The next one does with logging.rollouts=sample, or all."
        return [], [told]
    store = RolloutStore(run)
    steps = [step for step in store.steps() if wanted[0] <= step <= wanted[1]]
    if not steps:
        known = f"{store.steps()[0]} to {store.steps()[-1]}"
        raise DataError(f"no rollouts have these steps; {run / FOLDER} has steps {known}")
    count = max(1, min(len(steps), most * len(store.steps()) // len(store)))
    even = [steps[at * (len(steps) - 1) // max(1, count - 1)] for at in range(count)]
    rows = list(islice(store.iterate(even), most))
    if len(rows) == len(store):
        return rows, []
    of = f"step {even[0]}" if count == 1 else f"{count} steps from {even[0]} to {even[-1]}"
    told = f"{len(rows):,} of {len(store):,} rollouts are shown, of {of}. "
    return rows, [told + "--steps A:B and --rows N of torchrl-llm view choose others."]


def _tokenizer(run: Any, notices: list[str]) -> Any:
    """Tokenizer of the newest checkpoint, or of the model that the run started with."""
    from torchrl_llm.modules import load_tokenizer
    from torchrl_llm.trainers.run_folder import model_folder

    try:
        return load_tokenizer(str(model_folder(run.folder)))
    except ConfigError as error:
        if "model.name" in run.config:
            try:
                return load_tokenizer(run.config["model.name"])
            except ConfigError:
                pass
        notices.append(f"Tokens are shown as ids, for there is no tokenizer: {error}.")
        return None
