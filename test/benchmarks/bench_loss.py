"""Memory and time of one GRPO loss, forward and backward, at a large vocabulary.

Vocabulary 151,936, hidden 512, 4 layers, tied head, 4 rows of 256 or 512 tokens (1k and 2k in all)
of which the first 16 are the prompt, no entropy bonus: ours with plain autograd and with the
in-place head gradient, ``GRPOLoss`` of TorchRL on the same ragged rows, the loss of TRL's
``GRPOTrainer``. Each side runs in a process of its own, in turn; what counts is the peak above
model and gradients, which are there before. TorchRL takes 10 GB at 2k. Needs trl.

    python test/benchmarks/bench_loss.py [rounds [tokens a row ...]]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from harness import peak_memory
from tensordict import TensorDict, lazy_stack

sys.path.insert(0, str(Path(__file__).parents[1]))

VOCABULARY, ROWS, LENGTHS, PROMPT = 151_936, 4, (256, 512), 16


def make_model() -> torch.nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def make_rows(length: int, prompt: int = PROMPT) -> TensorDict:
    ids = torch.randint(3, 1000, (ROWS, length), generator=torch.Generator().manual_seed(0))
    ones = torch.ones(length, dtype=torch.bool)
    rows = [
        TensorDict(
            tokens=TensorDict(full=row, prompt=row[:prompt], response=row[prompt:]),
            log_probs=TensorDict(full=torch.full((length,), -12.0)),
            masks=TensorDict(all_attention_mask=ones, all_assistant_mask=ones),
            advantage=torch.tensor([[1.0 - 2.0 * (i % 2)]]),
        )
        for i, row in enumerate(ids)
    ]
    return lazy_stack(rows)


def _ours(length: int, **settings: bool) -> Callable[[], object]:
    from torchrl_llm.modules.backends.token_scorer import CausalScorer
    from torchrl_llm.objectives import GRPOLoss

    loss_module = GRPOLoss(CausalScorer(make_model(), **settings))
    loss_module(make_rows(3, 1)).total_loss().backward()
    rows = make_rows(length)
    return lambda: loss_module(rows).total_loss().backward()


def ours(length: int) -> Callable[[], object]:
    return _ours(length)


def ours_in_place(length: int) -> Callable[[], object]:
    return _ours(length, in_place_head_grad=True)


def torchrl_side(length: int) -> Callable[[], object]:
    from tensordict import set_list_to_stack

    set_list_to_stack(True).set()
    from models_helper import make_tokenizer as _make_tokenizer
    from torchrl.modules.llm import TransformersWrapper
    from torchrl.objectives.llm import GRPOLoss

    policy = TransformersWrapper(
        make_model(), tokenizer=_make_tokenizer(), input_mode="tokens", generate=False
    )
    loss_module = GRPOLoss(policy, entropy_bonus=False)
    loss_module(make_rows(3, 1)).loss_objective.backward()
    rows = make_rows(length)
    return lambda: loss_module(rows).loss_objective.backward()


def trl_side(length: int) -> Callable[[], object]:
    from datasets import Dataset
    from models_helper import make_tokenizer as _make_tokenizer
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model=make_model(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=ROWS,
            num_generations=ROWS,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            beta=0.0,
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * ROWS),
        processing_class=_make_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1

    def inputs(length: int, prompt: int) -> dict[str, torch.Tensor]:
        ids = torch.stack([row["tokens", "full"] for row in make_rows(length, prompt).unbind(0)])
        return {
            "prompt_ids": ids[:, :prompt],
            "prompt_mask": torch.ones_like(ids[:, :prompt]),
            "completion_ids": ids[:, prompt:],
            "completion_mask": torch.ones_like(ids[:, prompt:]),
            "advantages": torch.tensor([1.0, -1.0, 1.0, -1.0]),
            "old_per_token_logps": torch.full((ROWS, length - prompt), -12.0),
            "num_items_in_batch": torch.tensor(float(ROWS * (length - prompt))),
        }

    trainer._compute_loss(trainer.model, inputs(3, 1)).backward()
    batch = inputs(length, PROMPT)
    return lambda: trainer._compute_loss(trainer.model, batch).backward()


SIDES = {
    "ours, plain autograd": ours,
    "ours, in-place head": ours_in_place,
    "TRL": trl_side,
    "TorchRL": torchrl_side,
}


def measure(rounds: int, length: int) -> None:
    """Measure all sides at one length and print the table."""
    results = {name: [] for name in SIDES}
    for _ in range(rounds):
        for name, side in SIDES.items():
            results[name].append(peak_memory(partial(side, length)))
            print(f"{name}: {results[name][-1]}", file=sys.stderr, flush=True)
    medians = {
        name: tuple(statistics.median(column) for column in zip(*values, strict=True))
        for name, values in results.items()
    }
    reference, trl = medians["TorchRL"], medians["TRL"]
    load = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{ROWS} x {length} tokens, medians of {rounds} rounds, {load}")
    print(f"{'':24}{'peak MiB':>10}{'/ TorchRL':>11}{'/ TRL':>8}{'CPU s':>8}{'/ TorchRL':>11}")
    for name, (peak, seconds) in medians.items():
        print(
            f"{name:24}{peak:10.0f}{peak / reference[0]:11.3f}{peak / trl[0]:8.2f}"
            f"{seconds:8.1f}{seconds / reference[1]:11.2f}"
        )


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    for length in [int(argument) for argument in sys.argv[2:]] or LENGTHS:
        measure(rounds, length)
    print(
        "aims: plain <= 0.167 of TorchRL at 1k and <= 0.1 at 2k, < 0.55 of TRL; in place <= 0.125; "
        "a third of the time"
    )


if __name__ == "__main__":
    main()
