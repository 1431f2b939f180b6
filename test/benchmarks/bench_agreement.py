"""Whether our losses are TRL's where the docstrings say so: value and gradient, rows off policy.

One tiny model, five ragged rows whose sampled log-probs are off by a tenth of a nat or more, the
same advantages on both sides. The deviation of the value is absolute, that of the gradient relative
to its largest entry. Needs trl.

    python test/benchmarks/bench_agreement.py
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import sys
import tempfile
from pathlib import Path

import torch
from tensordict import LazyStackedTensorDict, TensorDict

from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import (
    DAPO,
    CISPOLoss,
    DrGRPOLoss,
    GMPOLoss,
    GRPOLoss,
    GSPOLoss,
    PolicyGradientLoss,
    SAPOLoss,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

LENGTHS, PROMPT, WIDTH = (7, 1, 4, 9, 3), 3, 9
ADVANTAGES = (1.3, -0.7, -1.9, 0.4, 0.9)

# Our loss, and how TRL is asked for the same.
PAIRS = {
    "GRPO": (
        lambda actor: GRPOLoss(actor, aggregation="sequence_mean"),
        {"loss_type": "grpo", "epsilon": 0.2},
    ),
    "GRPO, k3 to the reference": (
        lambda actor: GRPOLoss(actor, aggregation="sequence_mean", kl_to_ref_coeff=0.3),
        {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.3, "use_bias_correction_kl": False},
    ),
    "GRPO, weighted k3": (
        lambda actor: GRPOLoss(
            actor,
            aggregation="sequence_mean",
            kl_to_ref_coeff=0.3,
            kl_estimator="weighted_k3",
        ),
        {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.3},
    ),
    "GRPO, capped ratio": (
        lambda actor: GRPOLoss(actor, aggregation="sequence_mean", ratio_cap=1.5),
        {"loss_type": "grpo", "epsilon": 0.2, "delta": 1.5},
    ),
    "DAPO": (DAPO, {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}),
    "Dr. GRPO": (
        lambda actor: DrGRPOLoss(actor, constant_length=WIDTH),
        {"loss_type": "dr_grpo", "epsilon": 0.2, "max_completion_length": WIDTH},
    ),
    "GSPO": (
        lambda actor: GSPOLoss(actor, clip_epsilon=(0.1, 0.15)),
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.1,
            "epsilon_high": 0.15,
        },
    ),
    "CISPO": (
        lambda actor: CISPOLoss(actor, clip_epsilon=(None, 0.2)),
        {"loss_type": "cispo", "epsilon_high": 1.2},
    ),
    "SAPO": (SAPOLoss, {"loss_type": "sapo"}),
    "GMPO": (GMPOLoss, {"trainer": "gmpo", "epsilon": 0.4}),
}


def make_model() -> torch.nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).eval()


def make_rows(model: torch.nn.Module) -> LazyStackedTensorDict:
    generator = torch.Generator().manual_seed(0)
    scorer, rows = CausalScorer(model), []
    for length, advantage in zip(LENGTHS, ADVANTAGES, strict=True):
        ids = torch.randint(3, 300, (PROMPT + length,), generator=generator)
        sampled = torch.arange(len(ids)) >= PROMPT
        with torch.no_grad():
            current = scorer.token_scores([ids], [sampled]).log_probs
        columns = []
        for _ in range(2):
            column = torch.zeros(len(ids))
            noise = torch.randn(length, generator=generator)
            column[sampled] = current + 0.1 * noise.sign() + 0.3 * noise
            columns.append(column)
        rows.append(
            TensorDict(
                tokens=TensorDict(full=ids, prompt=ids[:PROMPT]),
                log_probs=TensorDict(full=columns[0]),
                next=TensorDict(ref_log_probs=TensorDict(full=columns[1])),
                advantage=torch.tensor([[advantage]]),
            )
        )
    return lazy_rows(rows)


def ours(make: type[PolicyGradientLoss]) -> tuple[float, torch.Tensor]:
    model = make_model()
    total = make(CausalScorer(model))(make_rows(model)).total_loss()
    return outcome(total, model)


def trl(settings: dict[str, object]) -> tuple[float, torch.Tensor]:
    from datasets import Dataset
    from models_helper import make_tokenizer as _make_tokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    settings = dict(settings)
    gmpo, beta = settings.pop("trainer", None) == "gmpo", settings.pop("beta", 0.0)
    trainer_type, config_type = (GMPOTrainer, GMPOConfig) if gmpo else (GRPOTrainer, GRPOConfig)
    model = make_model()
    rows = make_rows(model)
    trainer = trainer_type(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config_type(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=len(LENGTHS),
            num_generations=len(LENGTHS),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            disable_dropout=True,
            beta=0.0,
            **settings,
        ),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * len(LENGTHS)),
        processing_class=_make_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    # Given at construction it loads a reference model; its log-probs come with the inputs here.
    trainer.beta = beta
    mask = torch.stack([torch.arange(WIDTH) < length for length in LENGTHS])

    def padded(key: tuple[str, ...]) -> torch.Tensor:
        values = [row[key][PROMPT:] for row in rows.unbind(0)]
        return torch.stack([torch.nn.functional.pad(v, (0, WIDTH - len(v))) for v in values])

    prompts = torch.stack([row["tokens", "prompt"] for row in rows.unbind(0)])
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": padded(("tokens", "full")),
        "completion_mask": mask.long(),
        "advantages": torch.tensor(ADVANTAGES),
        "old_per_token_logps": padded(("log_probs", "full")),
        "ref_per_token_logps": padded(("next", "ref_log_probs", "full")),
        "num_items_in_batch": mask.sum().float(),
    }
    return outcome(trainer._compute_loss(trainer.model, inputs), model)


def outcome(total: torch.Tensor, model: torch.nn.Module) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    total.backward()
    parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return total.item(), torch.cat(parts)


def main() -> None:
    print(f"{'':28}{'value':>10}{'deviation':>12}{'of gradient':>13}")
    for name, (make, settings) in PAIRS.items():
        (value, gradient), (other, other_gradient) = ours(make), trl(settings)
        deviation = (gradient - other_gradient).abs().max() / other_gradient.abs().max()
        print(f"{name:28}{value:10.5f}{abs(value - other):12.1e}{deviation.item():13.1e}")


if __name__ == "__main__":
    main()
