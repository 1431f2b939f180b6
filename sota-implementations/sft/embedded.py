"""Make the embedded chat model from only a seed.

    python sota-implementations/sft/embedded.py output=torchrl_llm/assets/embedded

The model learns to add two-digit numbers from scripted pupils: first from careful pupils, then from
a class in which most pupils forget to carry or round. After this it knows the correct sum, but
gives it only in a quarter of its answers; reinforcement learning can improve this. Every key is in
config/embedded.yaml.
"""

from __future__ import annotations

from torchrl_llm.recipes import launch

if __name__ == "__main__":  # rejects wrong keys before imports that take seconds
    launch.begin(__file__, "embedded")

from pathlib import Path

import hydra
import torch
from embedded_utils import demonstrations, load_config, make_model, make_tokenizer, measure
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from torchrl_llm.modules import TransformersWrapper
from torchrl_llm.objectives import SFTLoss
from torchrl_llm.trainers import (
    MetricsTable,
    ProgressBar,
    make_optimizer,
    make_scheduler,
    optimize,
    save_pretrained,
    show,
)


@hydra.main(version_base="1.3", config_path="config", config_name="embedded")
@launch.tells_errors
def main(cfg: DictConfig) -> None:
    config = load_config(cfg)
    torch.set_num_threads(config.train.num_threads)
    torch.manual_seed(config.seed)

    tokenizer = make_tokenizer()
    model = make_model(config.model, tokenizer)
    policy = TransformersWrapper(model, tokenizer=tokenizer)
    loss = SFTLoss(policy)
    optimizer = make_optimizer(policy, **config.optimizer.arguments)
    scheduler = make_scheduler(
        optimizer, **config.optimizer.schedule, total_steps=config.train.max_steps
    )

    folder = Path(HydraConfig.get().runtime.output_dir)
    table = MetricsTable(folder / "metrics.csv")
    with ProgressBar("step", config.train.max_steps) as bar:
        for step, rows in enumerate(demonstrations(config), start=1):
            metrics = optimize(
                loss, [rows], optimizer, scheduler, max_norm=config.optimizer.clip_grad_norm
            )
            table.write(step, metrics)
            bar.update(step, f"loss {metrics['train/loss_sft']:.3f}")

    if config.eval.num_prompts:
        for name, result in measure(policy, config.eval).items():
            show(f"held-out accuracy, {name}: {result.accuracy:.3f}")
    path = folder / "model" if config.output is None else Path(config.output)
    path.mkdir(parents=True, exist_ok=True)
    save_pretrained(path, model, tokenizer)
    show(f"model {path} (AutoModelForCausalLM.from_pretrained opens it)")
    show(f"talk to it: torchrl-llm chat {path}")


if __name__ == "__main__":
    main()
