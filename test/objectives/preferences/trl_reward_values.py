"""RewardLoss against TRL's RewardTrainer on the same rows: value and gradients, to 1e-6.

Run it with a Python that has TRL (1.16): ``python trl_reward_values.py``. It prints a table, and
fails where a number differs.
"""

import copy
import sys
import tempfile

import torch
from datasets import Dataset
from tensordict import TensorDict
from trl import RewardConfig, RewardTrainer

from torchrl_llm.data.ragged import ragged_rows
from torchrl_llm.modules import load_reward_model, load_tokenizer
from torchrl_llm.modules.backends import ClassifierScorer
from torchrl_llm.objectives import RewardLoss

TOLERANCE = 1e-6


def rows(pairs, margins):
    """Rows of a loss, the two answers of a pair behind each other."""
    ids = [torch.tensor(side) for pair in pairs for side in pair]
    return TensorDict(
        tokens=ragged_rows({"full": ids}),
        pair_id=torch.arange(len(pairs)).repeat_interleave(2),
        is_chosen=torch.tensor([True, False] * len(pairs)),
        margin=torch.tensor(margins).repeat_interleave(2),
        batch_size=[len(ids)],
    )


def theirs(model, tokenizer, pairs, margins, centering):
    """TRL's loss, with the gradients of a model."""
    columns = {"chosen_ids": [c for c, _ in pairs], "rejected_ids": [r for _, r in pairs]}
    if any(margins):
        columns["margin"] = margins
    config = RewardConfig(
        output_dir=tempfile.mkdtemp(),
        center_rewards_coefficient=centering or None,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        disable_dropout=True,
        report_to=[],
    )
    trainer = RewardTrainer(
        model, config, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer
    )
    batch = trainer.data_collator([dict(row) for row in trainer.train_dataset])
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in trainer.model.named_parameters()}


def say(*words):
    """A line of the table."""
    sys.stdout.write("".join(f"{word!s:>14}" for word in words) + "\n")


def main():
    """Compare with and without margins and centring."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer()
    start = load_reward_model(None, tokenizer)
    draw = torch.Generator().manual_seed(1)

    def ids(length):
        return torch.randint(5, 300, (length,), generator=draw).tolist()

    # The last of them ends with padding's own id, which neither scores.
    pairs = [(ids(7), ids(4)), (ids(3), ids(9)), (ids(5), ids(5)), ([*ids(4), 0], ids(6))]
    say("margins", "centring", "loss", "difference", "of gradients")
    for margins in ([0.0] * 4, [0.5, 0.0, 1.5, -0.25]):
        for centering in (0.0, 0.01):
            model, other = copy.deepcopy(start), copy.deepcopy(start)
            expected, gradients = theirs(other, tokenizer, pairs, margins, centering)
            loss = RewardLoss(ClassifierScorer(model.train()), centering=centering)
            got = loss(rows(pairs, margins)).total_loss()
            got.backward()
            own = {n: p.grad for n, p in model.named_parameters()}
            assert own.keys() == gradients.keys()
            apart = max(float((own[n] - gradients[n]).abs().max()) for n in own)
            difference = abs(float(got.detach()) - expected)
            numbers = f"{expected:.6f}", f"{difference:.1e}", f"{apart:.1e}"
            say("yes" if any(margins) else "no", centering, *numbers)
            assert max(difference, apart) < TOLERANCE


if __name__ == "__main__":
    main()
