"""Text and weights, trained on the same rollouts, by language steps and GRPO steps.

    torchrl-llm train langmarl-weights mode=both
    torchrl-llm train langmarl-weights mode=weights seed=1
    torchrl-llm train langmarl-weights mode=text

The model of the package plays tic-tac-toe against a random opponent. First, for a minute or two, it
learns to imitate players who follow the advice in their system prompt, good or bad. Then each step
plays a batch of games. For every game that was not won, a critic writes the mistake into the rows;
GRPO trains on the same rows. In a language step an optimizer turns the critic's feedback into
advice. The advice becomes the system prompt if the model wins clearly more of other games with it.

In this recipe, critic and optimizer are scripts. To use models instead, replace them by
``torchrl_llm.langmarl.CentralizedCritic(config)`` and ``PolicyGradientOptimizer(llm_config)``.
``run=FOLDER`` resumes the run of a folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace

from both_utils import (
    AGENT,
    BASE,
    BothConfig,
    Critic,
    Optimizer,
    make_buffer,
    make_env,
    make_policy,
    validation_rows,
    won_games,
)

from torchrl_llm.algorithms import make_grpo
from torchrl_llm.collectors import LLMCollector
from torchrl_llm.evaluation import Evaluation
from torchrl_llm.langmarl.environment import BaseOptimizer
from torchrl_llm.langmarl.language_policy import LanguagePolicy
from torchrl_llm.langmarl.text_credit import EVALUATION_KEY, TextCredit
from torchrl_llm.recipes import launch
from torchrl_llm.recipes.builders import minibatches
from torchrl_llm.recipes.flat_settings import new_folder, read_settings
from torchrl_llm.trainers import (
    BatchSource,
    CheckpointConfig,
    EvalConfig,
    LoggingConfig,
    Shown,
    TrainingRun,
    make_optimizer,
    make_scheduler,
    optimize,
    rollout_metrics,
    say,
)


def train(config: BothConfig) -> Iterator[TrainingRun]:
    """Train; yields the run before the first step and after each step."""
    policy, text = make_policy(config), LanguagePolicy(BASE)  # the weights, and the text
    num_games = config.prompts * config.repeats
    collector = LLMCollector(
        make_env(text, policy.tokenizer, num_games, repeats=config.repeats, group_repeats=True),
        policy=policy,
        yield_completed_trajectories=True,
        reset_at_each_iter=True,  # games of a step begin with its current text
    )
    critic = TextCredit(Critic(), {AGENT: text})
    grpo = make_grpo(policy, group_size=config.repeats, entropy_coeff=0.03)
    buffer = replace(grpo, transforms=(critic,)).append_to(make_buffer(num_games))
    source = BatchSource(collector, buffer, credit=grpo.credit, num_rows=num_games)
    optimizer = make_optimizer(policy.parameters(), name="AdamW", lr=config.lr, weight_decay=0.0)
    scheduler = make_scheduler(optimizer, name="linear", warmup_steps=0.2, total_steps=config.steps)
    validate = won_games(
        text, policy, config.validation, dataset=validation_rows(config.validation)
    )
    run = TrainingRun(
        config.run_folder,
        max_steps=config.steps,
        model=policy.model,
        tokenizer=policy.tokenizer,
        parts={
            "text": text,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "collector": collector,
            "buffer": buffer,
            "source": source,
        },
        evaluate=won_games(text, policy, config.games, split="test"),
        config=asdict(config),
        logging=LoggingConfig(samples=None, rollouts="none"),
        checkpoint=CheckpointConfig(interval=10, resume="auto"),
        evaluation=EvalConfig(num_prompts=config.games),
        shown=Shown(held_out={"eval/accuracy": "held-out games won"}),
    )
    run.how_to_resume = f"the same command with run={config.run_folder}"
    yield run
    for step in run.steps():
        with run.timed("sample"):
            rows = source.fill()  # play; the critic gives feedback, and GRPO compares
        metrics = rollout_metrics(rows) | source.ledger.metrics()
        if config.mode != "weights" and step % config.language_interval == 0:
            with run.timed("language"):
                said = [row[EVALUATION_KEY] for row in buffer[:].unbind(0)]
                faults = [each for each in said if each][: config.gradients]
                before, changed = language_step(text, Optimizer(), faults, validate)
            run.say(f"step {step}: won {before:.3f}, changed {changed:.3f}; now {text.feedback!r}")
            metrics |= {"train/language_won": before, "train/language_changed_won": changed}
        if config.mode != "text":
            with run.timed("train"):
                metrics |= optimize(
                    grpo.loss,
                    minibatches(buffer, 1),
                    optimizer,
                    scheduler,
                    max_norm=1.0,
                    budget=16384,
                    layout=policy.layout,
                )
            collector.update_policy_weights_()
        run.record(metrics, rows)
        yield run
    run.finish()


def language_step(
    text: LanguagePolicy,
    optimizer: BaseOptimizer,
    evaluations: Sequence[str],
    validate: Callable[[], Evaluation],
) -> tuple[float, float]:
    """Change a text by a critic's feedback; the change is kept if it wins clearly more games.

    "Clearly" means by more than one standard error of the difference, so that the text does not
    change by chance.

    Returns:
        Share of the validation games that are won before the change, and with it.
    """
    before, result = text.text, validate()
    old = result.accuracy
    if not evaluations:
        return old, old
    gradients = [optimizer.generate_gradient(before, each, BASE) for each in evaluations]
    text.text = optimizer.apply_gradient(before, optimizer.aggregate_gradients(gradients))
    new = validate().accuracy
    if new <= old + (2 * old * (1 - old) / result.num_prompts) ** 0.5:
        text.text = before
    return old, new


@launch.tells_errors
def main(arguments: list[str]) -> None:
    config = read_settings(BothConfig, arguments, __doc__)
    config.run = config.run or str(new_folder("langmarl-weights"))
    say(f"langmarl-weights: mode {config.mode}, model embedded, folder {config.run}")
    for _ in train(config):
        pass


if __name__ == "__main__":
    main(sys.argv[1:])
