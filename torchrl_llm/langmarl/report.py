"""Tables of a run of training in language space: its iterations, and the cost of its calls."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_llm.langmarl.calls import Spent
from torchrl_llm.trainers.results import text_table
from torchrl_llm.trainers.run_folder import METRICS_FILE, STEP


def iteration_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Table with one line per iteration.

    Args:
        rows: statistics, with ``iteration`` and ``metadata``, as in a run's
            ``training_curve.jsonl``.

    Example:
        >>> row = {"iteration": 0, "num_episodes": 2, "avg_reward": 0.5, "min_reward": 0.0}
        >>> row |= {"max_reward": 1.0, "total_tokens": 120, "cost_usd": 0.0}
        >>> print(iteration_table([row]))
        iteration  episodes  failed  reward    min    max  held-out  fallbacks  tokens   cost
                1         2       0   0.500  0.000  1.000         -          0     120  $0.00
    """
    lines = [
        "iteration  episodes  failed  reward    min    max  held-out  fallbacks  tokens   cost"
    ]
    for row in rows:
        facts = row.get("metadata") or {}
        held_out = facts.get("validation_reward")
        lines.append(
            f"{row['iteration'] + 1:>9}  {row['num_episodes']:>8}  "
            f"{facts.get('num_failed_episodes', 0):>6}  {row['avg_reward']:>6.3f}  "
            f"{row['min_reward']:>5.3f}  {row['max_reward']:>5.3f}  "
            f"{'-' if held_out is None else format(held_out, '.3f'):>8}  "
            f"{facts.get('num_fallbacks', 0):>9}  {row['total_tokens']:>6}  "
            f"{'$' + format(row['cost_usd'], '.2f'):>5}"
        )
    return "\n".join(lines)


def account_table(account: Mapping[tuple[str, str], Spent], *, reused: int = 0) -> str:
    """Table with one line per role and model: calls, tokens and cost of the whole run.

    Args:
        account: costs by role and model.
        reused: number of answers that this process read from the journal.

    Example:
        >>> print(account_table({("critic", "judge"): Spent(calls=2, input_tokens=9)}))
        role       model              calls  failed  lost  input tokens  output tokens       cost
        critic     judge                  2       0     0             9              0  $  0.0000
    """
    lines = [
        "role       model              calls  failed  lost  input tokens  output tokens       cost"
    ]
    for (role, model), spent in account.items():
        guess = "~" if spent.estimated else " "
        lines.append(
            f"{role:<9}  {model[:17]:<17}  {spent.calls:>5}  {spent.failed:>6}  {spent.lost:>4} "
            f"{guess}{spent.input_tokens:>12} {guess}{spent.output_tokens:>13}  "
            f"${spent.cost_usd:>8.4f}"
        )
    if any(spent.estimated for spent in account.values()):
        lines.append("~ tokens are guesses: the model did not say how many there were")
    if reused:
        lines.append(f"{reused} answers were in the journal and were not asked for again")
    return "\n".join(lines)


def metrics_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The text of ``metrics.csv``: a row per iteration, and row 0 with the first held-out reward.

    Args:
        rows: as in :func:`iteration_table`.

    Example:
        >>> row = {"iteration": 0, "avg_reward": 0.5, "rewards": [0.5], "total_tokens": 120}
        >>> print(metrics_table([row | {"cost_usd": 0.0, "metadata": {"num_fallbacks": 1}}]))
        train/step,train/reward,eval/reward,train/language_failed,train/language_fallbacks,\
train/language_tokens,train/cost_usd
        1,0.5,,0,1,120,0.0
        <BLANKLINE>
    """
    names = [STEP, "train/reward", "eval/reward", "train/language_failed"]
    names += ["train/language_fallbacks", "train/language_tokens", "train/cost_usd"]
    file = io.StringIO()
    table = csv.DictWriter(file, names, lineterminator="\n")
    table.writeheader()
    for row in rows:
        facts = row.get("metadata") or {}
        before = facts.get("previous_validation_reward")
        if row["iteration"] == 0 and before is not None:
            table.writerow({STEP: 0, "eval/reward": before})
        reward = row["avg_reward"] if row.get("rewards") else None
        values = [row["iteration"] + 1, reward, facts.get("validation_reward")]
        values += [facts.get("num_failed_episodes", 0), facts.get("num_fallbacks", 0)]
        values += [row["total_tokens"], row["cost_usd"]]
        table.writerow(dict(zip(names, values, strict=True)))
    return file.getvalue()


def summary(trainer: Any) -> str:
    """Final table of a run: rewards, files, and next commands.

    Args:
        trainer: a :class:`~torchrl_llm.langmarl.MonteCarloTrainer` that has trained.
    """
    folder = f"{trainer.config.experiment_dir}/runs/{trainer.run_id}"
    rewards = [f"{row['avg_reward']:.3f}" for row in trainer.rows if row.get("rewards")]
    ended = {"ended early": trainer.ended_by} if trainer.ended_by else {}
    held_out = [row["metadata"].get("validation_reward") for row in trainer.rows]
    first = next((row["metadata"].get("previous_validation_reward") for row in trainer.rows), None)
    told = {
        **ended,
        **({} if first is None else {"held-out reward": f"{first:.3f} -> {held_out[-1]:.3f}"}),
        "reward": " -> ".join([*rewards[:-1][:1], *rewards[-1:]]) or "none",
        "iterations": str(len(trainer.rows)),
        "policies": str(trainer.config.checkpoint_dir),
        "metrics": f"{folder}/{METRICS_FILE}",
        "resume": f"the same command with experiment_dir={trainer.config.experiment_dir}",
        "next": f"torchrl-llm view {folder}",
        "": f"torchrl-llm plot {folder}",
    }
    return text_table(told.items())
