"""Losses and gradients of TRL's trainers and of ours on the same rows; run by a Python with TRL.

It prints a line of JSON a case: both values, and the norm of the difference of both gradients as a
share of theirs.
"""

import copy
import json
import sys
import tempfile
import warnings

import torch
from datasets import Dataset
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.modules import load_tokenizer
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import (
    CPOLoss,
    DPOLoss,
    KTOLoss,
    ORPOLoss,
    SimPOLoss,
    answer_log_probs,
    mismatched,
)

warnings.filterwarnings("ignore")
PAIRS = [
    {"prompt": "2+2 is", "chosen": " 4", "rejected": " five, or so"},
    {"prompt": "What is 10+11?", "chosen": " It is 21.", "rejected": " 3"},
    {"prompt": "Say it", "chosen": " it, it, it", "rejected": " no"},
    {"prompt": "1+1=", "chosen": "2", "rejected": "1+1+1"},
]
LABELLED = [
    {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
    for row, side in zip(PAIRS, ("chosen", "rejected", "rejected", "chosen"), strict=True)
]
tokenizer = load_tokenizer()
torch.manual_seed(0)
MODEL = Qwen2ForCausalLM(
    Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.eos_token_id,
    )
).eval()
with torch.no_grad():
    for parameter in MODEL.parameters():
        parameter.mul_(3)  # log-probs that differ
REFERENCE = copy.deepcopy(MODEL)
with torch.no_grad():
    for parameter in REFERENCE.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))


def their(trainer_type, config_type, rows, **settings):
    """A trainer of TRL, its loss of all rows, and the batch that it read."""
    model = copy.deepcopy(MODEL)
    config = config_type(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=len(rows),
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        remove_unused_columns=False,
        **settings,
    )
    arguments = {"model": model, "args": config, "processing_class": tokenizer}
    if trainer_type in (DPOTrainer, KTOTrainer):
        arguments["ref_model"] = copy.deepcopy(REFERENCE)
    trainer = trainer_type(train_dataset=Dataset.from_list(rows), **arguments)
    trainer.model.eval()
    examples = [trainer.train_dataset[index] for index in range(len(rows))]
    batch = trainer.data_collator(examples)
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return trainer.model, loss, batch


def row(ids, answer, mask, pair, chosen):
    """One of our rows; ``mask`` is their attention mask."""
    kept = mask.bool()
    return TensorDict(
        tokens={"full": ids[kept]},
        masks={"all_assistant_mask": answer.bool()[kept]},
        pair_id=torch.tensor(pair),
        is_chosen=torch.tensor(chosen),
    )


def ours(rows, make, reference=False, kl=False):
    """Our loss of rows."""
    model = copy.deepcopy(MODEL)
    scorer, frozen = CausalScorer(model), CausalScorer(REFERENCE)
    ids = [each["tokens", "full"] for each in rows]
    masks = [each["masks", "all_assistant_mask"] for each in rows]
    batch = lazy_rows(rows)
    if reference:
        batch["ref_log_prob"] = answer_log_probs(frozen, ids, masks)
    if kl:
        made = mismatched(ids, masks)
        divergence = answer_log_probs(scorer, *made) - answer_log_probs(frozen, *made)
        batch["kl"] = divergence.mean().expand(len(rows)).clone()
    loss = make(scorer)(batch).total_loss()
    loss.backward()
    return model, loss


def of_halves(batch):
    """Rows of a batch of DPO's: the chosen answers first."""
    ids, answers, masks = (
        batch[name] for name in ("input_ids", "completion_mask", "attention_mask")
    )
    size = len(ids) // 2
    return [row(ids[i], answers[i], masks[i], i % size, i < size) for i in range(len(ids))]


def of_sides(batch):
    """Rows of a batch of CPO's and ORPO's."""
    rows = []
    for side in ("chosen", "rejected"):
        ids, labels = batch[f"{side}_input_ids"], batch[f"{side}_labels"]
        masks = batch[f"{side}_attention_mask"]
        rows += [
            row(ids[i], labels[i] != -100, masks[i], i, side == "chosen") for i in range(len(ids))
        ]
    return rows


def of_labels(batch):
    """Rows of a batch of KTO's."""
    ids, answers, masks = (
        batch[name] for name in ("input_ids", "completion_mask", "attention_mask")
    )
    return [row(ids[i], answers[i], masks[i], i, bool(batch["label"][i])) for i in range(len(ids))]


def compare(name, theirs, rows, make, **settings):
    """One line of the output."""
    model, loss, batch = theirs
    own, value = ours(rows(batch), make, **settings)
    pairs = zip(sorted(model.named_parameters()), sorted(own.named_parameters()), strict=True)
    both = [(a.grad, b.grad) for (_, a), (_, b) in pairs if a.grad is not None]
    theirs, gaps = (torch.cat([x.flatten() for x in side]) for side in zip(*both, strict=True))
    gap = float((theirs - gaps).norm() / theirs.norm())
    found = {"case": name, "theirs": float(loss), "ours": float(value), "gradient": gap}
    print(json.dumps(found), file=OUT, flush=True)


OUT, sys.stdout = sys.stdout, sys.stderr
for form in ("sigmoid", "hinge", "ipo", "robust"):
    smoothing = {"label_smoothing": 0.1} if form == "robust" else {}
    settings = {"loss_type": [form], "beta": 0.3, **smoothing}
    compare(
        f"dpo {form}",
        their(DPOTrainer, DPOConfig, PAIRS, **settings),
        of_halves,
        lambda s, f=form, k=smoothing: DPOLoss(s, beta=0.3, form=f, **k),
        reference=True,
    )
for form in ("sigmoid", "hinge", "ipo"):
    smoothing = {"label_smoothing": 0.1} if form == "sigmoid" else {}
    settings = {"loss_type": form, "beta": 0.3, "cpo_alpha": 0.7, **smoothing}
    compare(
        f"cpo {form}",
        their(CPOTrainer, CPOConfig, PAIRS, **settings),
        of_sides,
        lambda s, f=form, k=smoothing: CPOLoss(s, beta=0.3, form=f, sft_coeff=0.7, **k),
    )
simpo = {"loss_type": "simpo", "beta": 2.0, "cpo_alpha": 0.0, "simpo_gamma": 0.5}
compare(
    "simpo",
    their(CPOTrainer, CPOConfig, PAIRS, **simpo),
    of_sides,
    lambda s: SimPOLoss(s, beta=2.0, target_margin=0.5),
)
compare(
    "orpo",
    their(ORPOTrainer, ORPOConfig, PAIRS, beta=0.3),
    of_sides,
    lambda s: ORPOLoss(s, odds_coeff=0.3, sft_tokens="conversation"),
)
weights = {"desirable_weight": 1.0, "undesirable_weight": 1.5}
compare(
    "kto",
    their(KTOTrainer, KTOConfig, LABELLED, beta=0.3, **weights),
    of_labels,
    lambda s: KTOLoss(s, beta=0.3, bad_weight=1.5),
    reference=True,
    kl=True,
)
