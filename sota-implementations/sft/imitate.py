"""Imitation: teach a model to play a game by the games of a scripted player.

    python sota-implementations/sft/imitate.py output=outputs/player
    python sota-implementations/grpo/grpo-sync.py env=tic_tac_toe model.name=outputs/player

The player does the best there is in some of its turns and anything legal in the others, so that the
model learns the form of an answer and the rules, and has something left to find out by playing.
Every key is in config/imitate.yaml.
"""

from __future__ import annotations

from torchrl_llm.recipes import launch

if __name__ == "__main__":  # wrong keys are refused here, before imports that take seconds
    launch.begin(__file__, "imitate")

from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from imitate_utils import games, load_config, make_game_env
from omegaconf import DictConfig
from sft import save, train

from torchrl_llm.envs.transforms import ContextLimit
from torchrl_llm.evaluation import evaluate
from torchrl_llm.modules import TransformersWrapper, load_model
from torchrl_llm.recipes.builders import make_tokenizer
from torchrl_llm.trainers import show


@hydra.main(version_base="1.3", config_path="config", config_name="imitate")
@launch.tells_errors
def main(cfg: DictConfig) -> None:
    config = load_config(cfg)
    if config.train.num_threads is not None:
        torch.set_num_threads(config.train.num_threads)
    torch.manual_seed(config.seed)

    tokenizer = make_tokenizer(config.model.name, config.eval.max_tokens, key="eval.max_tokens")
    model = load_model(config.model.name).train()
    policy = TransformersWrapper(
        model, tokenizer=tokenizer, chat_template_name=config.model.chat_template_name
    )

    folder = Path(HydraConfig.get().runtime.output_dir)
    train(policy, games(config), config, folder)

    if config.eval.num_prompts:
        env = make_game_env(config, tokenizer, held_out=True)
        env.append_transform(ContextLimit(policy.longest_prompt, policy.formatter))
        arguments = {"max_new_tokens": config.eval.max_tokens, "temperature": 0.0}
        result = evaluate(
            env,
            policy.get_new_version(generate_kwargs=arguments),
            num_prompts=config.eval.num_prompts,
            max_turns=env.max_turns(),
        )
        show(f"held-out games won, greedy: {result.accuracy:.3f}")
    save(config, model, tokenizer, folder)


if __name__ == "__main__":
    main()
