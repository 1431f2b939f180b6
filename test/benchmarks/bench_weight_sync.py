"""What a weight sync into a vLLM engine of the same process costs, in parts of a training step.

A Llama of 50 million parameters in float32 on the CPU; the engine is a real ``vllm.LLM``. A
training step is forward, backward and AdamW on ``--rows`` rows of 128 tokens (log-probs of all
tokens, as a GRPO loss takes them). A sync is ``push_weights`` as a collector calls it: the digest
of all weights, the load, dropping the prefix cache, and, where it says so, the canary. Before a row
is reported, the engine's log-probs are compared with the trainer's.

    python test/benchmarks/bench_weight_sync.py --rows 16 --pairs 5

With ``--copies`` it is compared with a plain copy of the same tensors, for a model of 520 MB:

    python test/benchmarks/bench_weight_sync.py --copies
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from harness import compare, report

from torchrl_llm.modules.backends import TransformersBackend
from torchrl_llm.modules.backends.vllm import VLLMBackend
from torchrl_llm.weights import (
    CanaryCheck,
    DeltaWeights,
    EngineWeights,
    FileWeights,
    SharedEngineWeights,
    engine_weights,
)

TOKENS = 128
AIM = "<= 0.07"
COPY_AIM = "<= 1.3"
SMALL = {"hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 9, "heads": 10}
LARGE = {"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 11, "heads": 15}


def make_model(seed=0, *, heads, **sizes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=8192,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        **sizes,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


class Trainer:
    """One step on random tokens, through the scorer that the recipes train."""

    def __init__(self, model, rows, parameters=None):
        self.model = model
        self.backend = TransformersBackend(model, eos_token_ids=(2,))
        parameters = [*model.parameters()] if parameters is None else parameters
        for parameter in model.parameters():
            parameter.requires_grad_(any(parameter is one for one in parameters))
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-5)
        self.rows = list(torch.randint(3, 8192, (rows, TOKENS)))
        self.select = [torch.arange(TOKENS) > 0] * rows

    def step(self):
        scores = self.backend.token_scores(self.rows, self.select)
        (-scores.log_probs.mean()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_engine(model, dtype="float32"):
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return VLLMBackend(
            folder,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=256,
            kv_cache_memory_bytes=128 << 20,
        )


def compare_copies(pairs):
    """Updates of a large model, in copies of its tensors."""
    model = make_model(**LARGE).requires_grad_(False)
    tensors = engine_weights(model)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        engine = make_engine(model, str(dtype).removeprefix("torch."))
        places = {name: torch.zeros_like(value, dtype=dtype) for name, value in tensors.items()}

        def copy(places=places):
            for name, value in tensors.items():
                places[name].copy_(value)

        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            updaters = {
                "without fingerprint": EngineWeights(engine, model=model, fingerprint=False),
                "with fingerprint": EngineWeights(engine, model=model),
                "through shared memory": FileWeights(
                    engine, folder=folder, model=model, dtype=dtype
                ),
            }
            for name, updater in updaters.items():
                aim = COPY_AIM if "fingerprint" in name else "-"
                name = f"float32 into {engine.engine.model_config.dtype}, {name}"
                rows.append(
                    compare(name, updater.push_weights, copy, aim=aim, pairs=pairs, warmup=2)
                )
    size = sum(value.numel() * value.element_size() for value in tensors.values())
    print(f"{size / 1e6:.0f} MB")
    report(rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--copies", action="store_true")
    options = parser.parse_args()
    if options.copies:
        return compare_copies(options.pairs)
    batch = options.rows
    model = make_model(**SMALL)
    size = sum(parameter.numel() for parameter in model.parameters())
    engine = make_engine(make_model(seed=1, **SMALL))
    trainer = Trainer(model, batch)
    judge = CanaryCheck(trainer.backend, tolerance=1e-4)
    canary = CanaryCheck(trainer.backend, tolerance=1e-4)
    print(
        f"{size / 1e6:.1f}M parameters, {size * 4 / 1e6:.0f} MB; {batch} x {TOKENS} tokens a step"
    )

    def row(name, updater, trainer=trainer):
        found = compare(
            name, updater.push_weights, trainer.step, aim=AIM, pairs=options.pairs, warmup=1
        )
        updater.push_weights()
        apart = judge.observe(engine).difference
        print(f"  {name}: {updater.receipts[0]}; log-probs apart by {apart:.1e}")
        assert apart <= 1e-4
        return found

    rows = [
        row("load of all weights", EngineWeights(engine, model=model)),
        row("the same with canary", EngineWeights(engine, model=model, canary=canary)),
        row("delta, all changed", DeltaWeights(engine, model=model)),
    ]
    last = Trainer(model, batch, [*model.model.layers[-1].parameters()])
    rows.append(row("delta, one of nine layers trained", DeltaWeights(engine, model=model), last))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    shared = SharedEngineWeights(model, engine, canary=canary)
    rows.append(row("shared memory, digest and canary", shared))
    rows.append(row("shared memory alone", SharedEngineWeights(model, engine, fingerprint=False)))
    report(rows)
    print(
        f"shared: {shared.storage.num_tensors} tensors, {shared.storage.num_bytes / 1e6:.0f} MB at "
        "the engine's addresses, 0 bytes copied by a push"
    )


if __name__ == "__main__":
    main()
