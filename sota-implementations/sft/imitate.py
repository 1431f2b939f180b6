"""Imitation: teach a model to play a game from the games of a scripted player.

    torchrl-llm train imitate hydra.run.dir=outputs/player
    torchrl-llm train grpo env=tic_tac_toe model.name=outputs/player/checkpoints/step_000200

The player makes a best move in some of its turns and any legal move in the others, so that the
model learns the form of an answer and the rules, and can still improve by playing. The training
loop is shared with sft.py. Every key is in config/imitate.yaml and config/common.yaml.
"""

from __future__ import annotations

from torchrl_llm.recipes import launch

if __name__ == "__main__":  # rejects wrong keys before imports that take seconds
    launch.begin(__file__, "imitate")

from collections.abc import Iterator
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from imitate_utils import ImitateConfig, games, load_config, make_game_env
from omegaconf import DictConfig
from sft import fine_tune
from sft_utils import make_demonstrations, make_policy

from torchrl_llm.data.demonstrations import DemonstrationColumns
from torchrl_llm.envs.transforms import ContextLimit
from torchrl_llm.recipes.builders import greedy_evaluation, make_tokenizer, num_rows
from torchrl_llm.recipes.parallel import begin, folder_of
from torchrl_llm.trainers import TrainingRun


def train(config: ImitateConfig, folder: str | Path) -> Iterator[TrainingRun]:
    """Train in a folder; yields the run before the first step and after each step."""
    ranks = begin(config)  # the processes started by torchrun, or this process
    tokenizer = make_tokenizer(config.model.name, config.eval.max_tokens, key="eval.max_tokens")
    columns = DemonstrationColumns(messages="messages")
    played = make_demonstrations(config, tokenizer, games(config), columns=columns, name="games")
    policy = make_policy(config, tokenizer)
    env = make_game_env(config, tokenizer, held_out=True)
    env.append_transform(ContextLimit(policy.longest_prompt, policy.formatter))
    evaluate = greedy_evaluation(
        config, env, policy, max_tokens=config.eval.max_tokens, max_turns=env.max_turns()
    )
    folder, num_held_out = folder_of(folder, ranks), num_rows(config, None, env)[1]
    yield from fine_tune(config, folder, policy, played, evaluate, ranks, num_held_out)


@hydra.main(version_base="1.3", config_path="config", config_name="imitate")
@launch.tells_errors
def main(cfg: DictConfig) -> None:
    for _ in train(load_config(cfg), HydraConfig.get().runtime.output_dir):
        pass


if __name__ == "__main__":
    main()
