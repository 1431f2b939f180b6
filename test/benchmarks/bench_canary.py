"""What the canary says of right and of planted wrong updates of a real engine on the CPU.

    PYTHONPATH=test python test/benchmarks/bench_canary.py
    PYTHONPATH=test python test/benchmarks/bench_canary.py --updates 50 --dtypes bfloat16 --lrs 1e-4

The embedded model is trained by policy gradient with random rewards, so that it goes on moving. In
each row of the table every update is right, and the others are planted beside them:

- ``stale``: nothing was loaded, once; ``stuck``: from the 10th version on, and with other requests
  beside the check, which leave other last bits of the log-probs (``+ jitter``);
- ``layer``, ``half``: one layer or every second tensor was left old, once, or has been since the
  10th version (``layer stuck``, ``half stuck``);
- ``permuted``: two layers have each other's output projection.

Once: how many of so many tries were found. Stuck: how many versions later it was found.
"""

from __future__ import annotations

import argparse
import copy
import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from modules.backends.vllm.engine_helper import small_backend

from torchrl_llm.data.scoring import TokenScores
from torchrl_llm.errors import WeightUpdateError
from torchrl_llm.modules.backends import SamplingParams, TransformersBackend
from torchrl_llm.modules.model_loading import load_model
from torchrl_llm.weights import CanaryCheck, CanaryJudge, engine_weights
from torchrl_llm.weights.weight_source import TensorSource

START, EVERY = 10, 10
LASTING = ("stuck", "+ jitter", "layer stuck", "half stuck")


class Echo:
    """An engine that computes for ever what it computed once."""

    def __init__(self, engine, target, jitter=0.0):
        self.scores = [target.score(engine, first=first) for first in (True, False)]
        self.first, self.jitter = target.rows[0], jitter

    def token_scores(self, sequences, select):
        found = self.scores[0 if tuple(sequences[0].tolist()) == self.first else 1]
        return TokenScores(found + self.jitter * torch.randn(len(found)))


class Training:
    """A model that moves by policy gradient, and its weights of the version before."""

    def __init__(self, lr, dtype, seed=1):
        torch.manual_seed(seed)
        self.model = load_model(dtype=dtype).eval()
        self.reference = TransformersBackend(self.model, eos_token_ids=(2,))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.draws = 0

    def weights(self):
        return {name: value.detach().clone() for name, value in engine_weights(self.model).items()}

    def step(self):
        self.draws += 1
        begun = list(torch.randint(3, self.reference.vocab_size, (8, 4)).unbind())
        params = SamplingParams(max_new_tokens=28, ignore_eos=True, seed=self.draws)
        sampled = self.reference.generate(begun, params)
        rows = [torch.cat([ids, one.token_ids]) for ids, [one] in zip(begun, sampled, strict=True)]
        select = [torch.arange(len(row)) >= 4 for row in rows]
        log_probs = self.reference.token_scores(rows, select).log_probs.view(8, -1)
        (-(torch.randn(8, 1) * log_probs).mean()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def layer_of(weights, old):
    return {name: old[name] if ".layers.1." in name else value for name, value in weights.items()}


def half_of(weights, old):
    left = sorted(weights)[::2]
    return {name: old[name] if name in left else value for name, value in weights.items()}


def permuted(weights, old):
    first, second = (f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 1))
    return {**weights, first: weights[second], second: weights[first]}


def refuses(judge, engine, target):
    try:
        judge.check(engine, target)
    except WeightUpdateError:
        return True
    return False


class Lasting:
    """A fault that stays: when was it found?"""

    def __init__(self, judge):
        self.judge, self.after = copy.deepcopy(judge), None

    def see(self, version, engine, target):
        if self.after is None and refuses(self.judge, engine, target):
            self.after = version - START + 1

    @property
    def told(self):
        return "-" if self.after is None else str(self.after)


def run(engine, *, lr, updates, trainer_dtype, engine_dtype):
    """One row of the table."""
    training = Training(lr, trainer_dtype)
    canary = CanaryCheck(training.reference, dtype=getattr(torch, engine_dtype))
    judge, version = CanaryJudge(), 0
    old, alarms, rounding, told, once, lasting = training.weights(), 0, 0.0, 0, {}, {}

    def load(weights):
        engine.update_weights(TensorSource(weights), version=engine.version + 1)

    def judged(name, scorer, target):
        found, tries = once.get(name, (0, 0))
        found += refuses(copy.deepcopy(judge), scorer, target)
        once[name] = (found, tries + 1)

    for version in range(updates + 1):
        if version:
            training.step()
        weights, target = training.weights(), canary.target()
        if version == START:
            lasting = {name: Lasting(judge) for name in LASTING}
            since = old
            echo, noisy = Echo(engine, target), Echo(engine, target, jitter=1e-6)
        if version >= START:
            lasting["stuck"].see(version, echo, target)
            lasting["+ jitter"].see(version, noisy, target)
            for name, fault in (("layer stuck", layer_of), ("half stuck", half_of)):
                if lasting[name].after is None:
                    load(fault(weights, since))
                    lasting[name].see(version, engine, target)
        if version and version % EVERY == 0:
            load(old)
            judged("stale", engine, target)
            for name, fault in (("layer", layer_of), ("half", half_of), ("permuted", permuted)):
                load(fault(weights, old))
                judged(name, engine, target)
        load(weights)
        try:
            report = judge.check(engine, target, version=version)
        except WeightUpdateError as error:
            print(f"FALSE ALARM at version {version}: {error}")
            alarms += 1
            judge = CanaryJudge()
        else:
            rounding = max(rounding, report.rounding)
            told += report.followed is not None
        old = weights
    return [
        f"{trainer_dtype} > {engine_dtype}",
        f"{lr:g}",
        str(alarms),
        f"{rounding:.2f}",
        f"{told / updates:.0%}",
        *(f"{found}/{tries}" for found, tries in once.values()),
        *(fault.told for fault in lasting.values()),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4, 1e-3])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--trainer", default="float32", help="dtype of the trained weights")
    arguments = parser.parse_args()
    names = ["trainer > engine", "lr", "alarms", "max rounding", "told apart", "stale", "layer"]
    names += ["half", "permuted", *LASTING]
    print(" | ".join(names), flush=True)
    for dtype in arguments.dtypes:
        engine = small_backend(engine_options={"dtype": dtype})
        for lr in arguments.lrs:
            options = {"trainer_dtype": arguments.trainer, "engine_dtype": dtype}
            row = run(engine, lr=lr, updates=arguments.updates, **options)
            print(" | ".join(row), flush=True)


if __name__ == "__main__":
    main()
