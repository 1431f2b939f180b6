"""Weights that trainer and vLLM share, while the engine's cache alone sleeps."""

from __future__ import annotations

import torch
from results import Section

from torchrl_llm.modules.backends import SamplingParams
from torchrl_llm.modules.backends.transformers import TransformersBackend
from torchrl_llm.modules.backends.vllm import VLLMBackend
from torchrl_llm.modules.model_loading import load_model
from torchrl_llm.weights import CanaryCheck, SharedEngineWeights


def main() -> None:
    run = Section.from_command_line()
    on_gpu = run.device.type == "cuda"
    dtype, cache = ("bfloat16", 4 << 30) if on_gpu else ("float32", 64 << 20)
    engine = VLLMBackend(
        dtype=dtype,
        load_format="dummy",
        kv_cache_memory_bytes=cache,
        gpu_memory_utilization=0.3,
        max_model_len=256,
        **({"enable_sleep_mode": True} if on_gpu else {}),
    )
    model = load_model(dtype=dtype, device=run.device).eval()
    trained = TransformersBackend(model)
    canary = CanaryCheck(trained, dtype=getattr(torch, dtype))
    updater = SharedEngineWeights(model, engine, canary=canary, fingerprint=False)
    updater.push_weights()
    prompts = [torch.tensor([5, 6, 7 + row]) for row in range(8)]
    params = SamplingParams(max_new_tokens=32, temperature=0, ignore_eos=True)

    def tokens() -> torch.Tensor:
        return torch.cat([answer.token_ids for (answer,) in engine.generate(prompts, params)])

    def scored(backend: TransformersBackend | VLLMBackend) -> torch.Tensor:
        with torch.no_grad():
            found = backend.token_scores([ids], [torch.arange(len(ids)) >= 3])
        return found.log_probs.float().cpu()

    before, addresses = tokens(), [p.data_ptr() for p in model.parameters()]
    ids = torch.cat([prompts[0], before[:32]])
    old = scored(engine)
    free = _free(run)
    updater.sleep()
    if on_gpu:
        run.aim("given back / the cache", (_free(run) - free) / cache, "ratio", at_least=0.95)
        run.add("given back", (_free(run) - free) / 2**20, "MiB")
    asleep = scored(trained)
    run.aim("log-probs of the trainer, asleep", _apart(asleep, old), "nats", at_most=0.1)
    updater.push_weights()
    same = float((tokens() == before).float().mean())
    run.aim("tokens after waking like those before", same, "share", at_least=1.0)

    updater.sleep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    rows = before.view(8, 32).to(run.device)
    model(input_ids=rows, labels=rows.roll(1, 0)).loss.backward()
    optimizer.step()
    updater.push_weights()
    new = scored(engine)
    run.aim("the engine follows a step taken asleep", _apart(new, old), "nats", at_least=1.0)
    run.aim("and is the trainer", _apart(new, scored(trained)), "nats", at_most=0.3)
    run.aim("canary, in units of rounding", canary.report.rounding, "", at_most=4.0)
    kept = sum(p.data_ptr() == at for p, at in zip(model.parameters(), addresses, strict=True))
    run.aim("weights where they were", kept / len(addresses), "share", at_least=1.0)


def _free(run: Section) -> int:
    run.free()
    return torch.cuda.mem_get_info()[0] if run.device.type == "cuda" else 0


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max())


if __name__ == "__main__":
    main()
