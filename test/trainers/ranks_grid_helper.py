"""Updates of one rank, in a module that a process of its own can import."""

import functools

import torch
import torch.distributed as dist
from models_helper import make_tiny_model
from objectives.rows_helper import make_row, make_rows
from trainers.ranks_helper import SETTINGS

from torchrl_llm.modules import ValueHead
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import CompositeLoss, GRPOLoss, PPOLoss, SFTLoss
from torchrl_llm.trainers import Ranks, make_optimizer, optimize
from torchrl_llm.trainers.ranks import leave_group, shard

LOSSES = {**SETTINGS, "ppo": {}, "sft": {}}
LAYOUTS = ("padded", "bucketed", "packed", "shared", "auto")
BUDGETS = (None, 24)
# Rows of each rank in each of three updates: a group on both, then none on one, then no batch.
SHARES = (([0, 1, 2, 6], [3, 4, 5]), ([], [1, 2, 4]), ([0, 5], None))
CASES = [
    ("ddp", "token_mean", "padded", None),
    ("ddp", "prompt_mean", "shared", 24),
    ("fsdp2", "sequence_mean", "packed", 24),
    ("fsdp2", "prompt_mean", "bucketed", 24),
    ("fsdp2", "ppo", "auto", None),
]
# What trains: every weight, with the activations of the layers computed again, or adapters alone.
MODELS = ("checkpointing", "lora")
MODEL_CASES = [
    (parallel, name, layout, budget, model)
    for parallel in ("ddp", "fsdp2")
    for model in MODELS
    for name, layout, budget in (("prompt_mean", "shared", 24), ("sft", "padded", None))
]


def rows():
    torch.manual_seed(3)
    prompts = ([5, 7, 9], [5, 7, 9], [8], [8], [5, 7, 9], [4] * 9, [8])
    out = []
    for number, prompt in enumerate(prompts):
        ids = prompt + torch.randint(3, 290, (2 + 3 * number % 11,)).tolist()
        noise = torch.randn(4, len(ids)) * 0.3
        row = make_row(
            ids,
            len(prompt),
            advantage=float(torch.randn(())),
            old=noise[0] - 5,
            prox=noise[1] - 5,
            ref=noise[2] - 5,
            group=prompts.index(prompt),
            reason=[1] * len(prompt) + [5] * (len(ids) - len(prompt)) if number == 6 else None,
        )
        row["values"] = row["value_target"] = noise[3]
        out.append(row)
    return out


@functools.cache
def make_scorer(sharded, kind="whole"):
    """One for all cases of a process: its weights are never changed."""
    model = make_tiny_model(initializer_range=0.05)
    if kind == "checkpointing":
        # As load_model does it. Layers compute again in training mode only, and have no dropout.
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    if kind == "lora":
        import peft

        torch.manual_seed(5)
        # Adapters that change something: one whose second matrix is 0 gives the first no gradient.
        lora = peft.LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False)
        model = peft.get_peft_model(model, lora).eval()
    head = ValueHead.for_model(model)
    torch.nn.init.ones_(head.linear.weight)
    scorer = CausalScorer(model, value_head=head)
    if sharded:
        shard(scorer, model, device=torch.device("cpu"))
    return scorer


def make_loss(name, scorer):
    if name == "composite":
        policy = GRPOLoss(scorer, aggregation="prompt_mean")
        return CompositeLoss({"policy": (1.0, policy), "imitate": (0.2, SFTLoss(scorer))})
    if name == "ppo":
        loss = PPOLoss(scorer)
        loss.set_keys(value="values", value_target="value_target")
        return loss
    if name == "sft":
        return SFTLoss(scorer)
    return GRPOLoss(scorer, aggregation=name, **LOSSES[name])


def updates(case, ranks, shares):
    """Metrics and gradients of the updates; those of one process without ranks."""
    parallel, name, layout, budget, *model = case
    scorer = make_scorer(ranks is not None and parallel == "fsdp2", *model)
    scorer.layout = layout
    optimizer = make_optimizer(scorer.parameters(), name="SGD", lr=0.0)
    seen = []

    def look(*_):
        grads = {
            n: getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone()
            for n, p in scorer.named_parameters()
            if p.grad is not None
        }
        seen.append(grads)

    optimizer.register_step_pre_hook(look)
    everything, results = rows(), []
    given = [None if s is None else [everything[i] for i in s] for s in shares]
    batches = [make_rows(*part) if part else None for part in given]
    while batches and batches[-1] is None:
        batches.pop()  # a rank that has ended earlier than another
    for batch in batches if ranks is None else [None]:
        metrics = optimize(
            make_loss(name, scorer),
            batches if ranks is not None else [batch],
            optimizer,
            max_norm=100.0,
            budget=budget,
            layout=layout,
            **({} if ranks is None else {"ranks": ranks}),
        )
        results.append(metrics)
    return results, seen


def rank_main(rank, cases, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    ranks = Ranks(rank=rank, world=2)
    for number, case in enumerate(cases):
        found = updates(case, ranks, [share[rank] for share in SHARES])
        torch.save(found, folder / f"{rank}-{number}.pt")
    leave_group()
