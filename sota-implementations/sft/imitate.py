"""Imitation: teach a model to play a game by the games of a scripted player.

    python sota-implementations/sft/imitate.py output=outputs/player
    python sota-implementations/grpo/grpo-sync.py env=tic_tac_toe model.name=outputs/player

The player does the best there is in some of its turns and anything legal in the others, so that the
model learns the form of an answer and the rules, and has something left to find out by playing.
Every key is in config/imitate.yaml.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from imitate_utils import ImitateConfig, games, load_config, make_game_env
from omegaconf import DictConfig
from tqdm import tqdm

from torchrl_llm.evaluation import evaluate
from torchrl_llm.modules import TransformersWrapper, load_model, load_tokenizer
from torchrl_llm.objectives import SFTLoss
from torchrl_llm.trainers import (
    LossMeter,
    MetricsTable,
    check_override_keys,
    clipped_step,
    make_optimizer,
    make_scheduler,
    save_pretrained,
)


@hydra.main(version_base="1.3", config_path="config", config_name="imitate")
def main(cfg: DictConfig) -> None:
    config = load_config(cfg)
    if config.train.num_threads is not None:
        torch.set_num_threads(config.train.num_threads)
    torch.manual_seed(config.seed)

    tokenizer = load_tokenizer(config.model.name)
    model = load_model(config.model.name).train()
    policy = TransformersWrapper(
        model, tokenizer=tokenizer, chat_template_name=config.model.chat_template_name
    )
    loss_module = SFTLoss(policy)
    optimizer = make_optimizer(policy.parameters(), **config.optimizer.arguments)
    scheduler = make_scheduler(
        optimizer, **config.optimizer.schedule, total_steps=config.train.max_steps
    )

    folder = Path(HydraConfig.get().runtime.output_dir)
    table = MetricsTable(folder / "metrics.csv")
    with tqdm(games(config), total=config.train.max_steps, unit="step") as bar:
        for step, rows in enumerate(bar, start=1):
            output = loss_module(rows)
            output.total_loss().backward()
            meter = LossMeter()
            meter.add(output)
            norm = clipped_step(optimizer, scheduler, max_norm=config.optimizer.clip_grad_norm)
            meter.close(grad_norm=norm, lr=scheduler.get_last_lr()[0])
            table.write(step, meter.metrics())
            bar.set_postfix_str(f"loss {output.loss_sft.item():.3f}", refresh=False)

    if config.eval.num_prompts:
        env = make_game_env(config, tokenizer, held_out=True)
        arguments = {"max_new_tokens": config.eval.max_tokens, "temperature": 0.0}
        result = evaluate(
            env,
            policy.get_new_version(generate_kwargs=arguments),
            num_prompts=config.eval.num_prompts,
            max_turns=env.max_turns(),
        )
        tqdm.write(f"held-out games won, greedy: {result.accuracy:.3f}")
    path = folder / "model" if config.output is None else Path(config.output)
    path.mkdir(parents=True, exist_ok=True)
    save_pretrained(path, model, tokenizer)
    tqdm.write(f"model {path} (AutoModelForCausalLM.from_pretrained opens it)")


if __name__ == "__main__":
    sys.argv[1:] = check_override_keys(sys.argv[1:], ImitateConfig)
    main()
