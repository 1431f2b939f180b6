"""Self-play: players of a game learn from the games that they play with each other.

Each player has its own policy, loss, optimizer and ledger. A step plays a batch of games. Each
policy is trained on the turns of its player, compared with the turns of the same player in the
other games. All policies are evaluated against a random player.

    python sota-implementations/self-play/self-play.py
    python sota-implementations/self-play/self-play.py agents.shared=true
    python sota-implementations/self-play/self-play.py agents.shared=true agents.opponent=checkpoint

Without ``model.name`` all policies begin from a player that imitate.py makes in a minute. Every key
is in config/self-play.yaml and config/common.yaml.
"""

from __future__ import annotations

from torchrl_llm.recipes import launch

if __name__ == "__main__":  # rejects wrong keys before imports that take seconds
    launch.begin(__file__, "self-play")

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from self_play_utils import (
    Opponent,
    PlayersEvaluation,
    SelfPlayConfig,
    load_config,
    make_learners,
    make_policies,
    make_samplers,
    metrics_of,
    shown,
)

from torchrl_llm.collectors import AgentShares, LLMCollector
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.modules import PolicyRouter
from torchrl_llm.recipes.builders import autocast, make_train_env, make_watch, minibatches
from torchrl_llm.recipes.sampling_engine import canary_metrics
from torchrl_llm.trainers import TrainingRun, optimize


def train(config: SelfPlayConfig, folder: str | Path) -> Iterator[TrainingRun]:
    """Train in a folder; yields the run before the first step and after each step."""
    policies = make_policies(config, folder)  # policies by name: one per player, or one for all
    players = config.players_of(policies)  # policy name to the players that it trains
    samplers, weights = make_samplers(config, policies)  # the policies, or engines
    opponent = Opponent(config, policies, samplers)  # an earlier policy in the other seat
    router = PolicyRouter(opponent.seats(1), seed=config.seed)
    tokenizer = next(iter(policies.values())).tokenizer
    collector = LLMCollector(
        make_train_env(config, tokenizer, seed=config.seed),
        policy=router,
        yield_completed_trajectories=True,
        reset_at_each_iter=True,
        weight_updater=weights,
    )
    shares = AgentShares(collector, players)
    learners = make_learners(config, policies, shares, players)
    evaluates = config.eval.num_prompts != 0
    evaluation = PlayersEvaluation(config, samplers, players) if evaluates else None

    run = TrainingRun(
        folder,
        max_steps=config.train.max_steps,
        models={
            name: (policy.model, policy.tokenizer)
            for name, policy in (policies | opponent.policies).items()
        },
        parts={
            **{f"{part}_{name}": each for name, it in learners.items() for part, each in it.parts},
            "collector": collector,
            "shares": shares,
            "calls": router.calls,
        },
        evaluate=evaluation,
        config=config.flat(),
        tools=next(iter(policies.values())).options.tools,
        logging=config.logging,
        checkpoint=config.checkpoint,
        evaluation=config.eval,
        watch=make_watch(config),
        shown=shown(config, policies),
    )
    yield run
    if samplers != policies:
        collector.publish()  # engines have no weights yet, or old weights
    for step in run.steps():
        opponent.sit_down(step, router, shares)
        with run.timed("sample"), autocast(config):  # the first call plays the games
            rows = {name: learner.source.fill() for name, learner in learners.items()}
        if config.inference_model.sleep:
            for updater in weights.updaters:
                updater.sleep()  # the sampler frees its memory for the trainer until the sync
        with run.timed("train"):
            updates = {
                name: optimize(
                    learner.algorithm.loss,
                    minibatches(learner.buffer, config.train.epochs),
                    learner.optimizer,
                    learner.scheduler,
                    max_norm=config.optimizer.clip_grad_norm,
                    budget=config.train.micro_token_budget,
                    layout=config.train.packing,
                    context=partial(autocast, config),
                )
                for name, learner in learners.items()
            }
        with run.timed("sync"):
            collector.update_policy_weights_()
        opponent.follow(step)
        for name, updater in zip(policies, weights.updaters, strict=True):
            updates[name] |= canary_metrics(getattr(updater, "canary", None))
        metrics = metrics_of(learners, rows, updates, collector.take_absent(), router)
        metrics["train/tokens_untrained"] = shares.take_untrained()
        run.record(metrics, lazy_rows([row for each in rows.values() for row in each.unbind(0)]))
        yield run
    run.finish()


@hydra.main(version_base="1.3", config_path="config", config_name="self-play")
@launch.tells_errors
def main(cfg: DictConfig) -> None:
    for _ in train(load_config(cfg), HydraConfig.get().runtime.output_dir):
        pass


if __name__ == "__main__":
    main()
