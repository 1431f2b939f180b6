"""GRPO in one file, from top to bottom: a task, rollouts, advantages, a loss and a training loop.

    torchrl-llm train pico steps=100
    torchrl-llm train pico model=Qwen/Qwen3-0.6B warmup=0 lr=1e-6

There is no trainer: the training loop is written out. The only classes are the environment and the
settings. The file imports arithmetic on tensors (``torchrl_llm.functional``), a chat template that
never encodes a sampled token twice (``ChatFormatter``), a model that samples token ids
(``TransformersBackend``), the problems and scores of the task (``letter_problem``,
``score_counts``), and two classes that print and write results (``ProgressBar``, ``MetricsTable``).
``sota-implementations/grpo`` is the same algorithm at full size; docs/source/howto/pico.rst maps
its parts to those of the full recipe, and to the names of picoRL and Ludic.

Shape legend: ``B`` rollouts, ``T`` tokens of the longest, ``V`` vocabulary.
"""

from __future__ import annotations

import json
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from torch.nn.utils.rnn import pad_sequence

from torchrl_llm._checked import Ge, In
from torchrl_llm._progress import ProgressBar
from torchrl_llm._run_log import RunLog, say, show
from torchrl_llm._settings import Count, Group
from torchrl_llm.data import Source
from torchrl_llm.data.text import ChatFormatter, assistant_mask
from torchrl_llm.envs.datasets.word_tasks import TIERS, letter_problem, word_list
from torchrl_llm.functional import group_advantages, policy_gradient_loss, token_log_probs
from torchrl_llm.modules import load_model, load_tokenizer
from torchrl_llm.modules.backends import SamplingParams, TransformersBackend
from torchrl_llm.recipes import launch
from torchrl_llm.recipes.flat_settings import new_folder, read_settings
from torchrl_llm.rewards.word_rewards import score_counts
from torchrl_llm.trainers import MetricsTable
from torchrl_llm.trainers.results import text_table


class PicoConfig(Group):
    """The settings.

    Attributes:
        model: folder or name; null for the embedded model.
        steps: training steps.
        tasks: problems per step.
        k: answers to each problem, which are one group.
        difficulty: difficulty of the problems, from 1 to 10.
        max_turns: turns after which an episode ends.
        max_new_tokens: tokens of an answer.
        minibatch: rollouts per forward pass.
        lr: learning rate.
        max_grad_norm: maximum norm of the gradient.
        warmup: supervised steps that teach the form of an answer.
        warmup_lr: learning rate of these steps.
        eval_problems: held-out problems, which are scored before and after training.
        seed: seed of the problems and the samples.
        threads: CPU threads of torch; 0 for torch's choice.
        device: device of the model; null for a GPU if there is one.
        folder: folder of the run; null for outputs/pico/DATE/TIME.
    """

    model: str | None = None
    steps: Annotated[int, Ge(0)] = 80
    tasks: Count = 16
    k: Annotated[int, Ge(2)] = 8
    difficulty: Annotated[int, In("[1, 10]")] = 1
    max_turns: Count = 1
    max_new_tokens: Count = 32
    minibatch: Count = 64
    lr: Annotated[float, Ge(0)] = 3e-4
    max_grad_norm: Annotated[float, Ge(0)] = 1.0
    warmup: Annotated[int, Ge(0)] = 80
    warmup_lr: Annotated[float, Ge(0)] = 2e-3
    eval_problems: Count = 256
    seed: int = 0
    threads: Annotated[int, Ge(0)] = 1
    device: str | None = None
    folder: str | None = None


# --- 1. The task ----------------------------------------------------------------------------------


class LetterCounting:
    """Task: how often is a letter in a word? It has three methods: reset, step, reward.

    Environments with the same seed have the same problems in the same order. A group of rollouts
    needs this: its mean is a baseline only if all its members answer the same question.
    """

    def __init__(self, *, difficulty: int = 1, seed: int = 0, split: str = "train"):
        self.difficulty = min(max(difficulty, 1), len(TIERS))
        self.words = word_list(split)  # every fifth word is never trained on
        self.rng = random.Random(seed)
        self.problem = None
        self.last_reward = 0.0

    def reset(self) -> list[dict]:
        """The messages of a new problem."""
        self.problem = letter_problem(self.rng, self.difficulty, self.words)
        return [{"role": "user", "content": self.problem.question}]

    def step(self, response: str) -> dict | None:
        """Take the answer. The episode ends, so there is no next message."""
        self.last_reward = score_counts(response, self.problem.counts)
        return None

    def reward(self) -> float:
        """Reward of the last step, between 0 and 1."""
        return self.last_reward


# --- 2. Rollouts ----------------------------------------------------------------------------------


def collect_rollouts(env_fns, generate, formatter, *, k: int = 1, max_turns: int = 1):
    """Play ``k`` episodes of each environment, all at once, turn by turn.

    Args:
        env_fns: functions that make one environment each; environments of a group must have the
            same problem.
        generate: function from ``B`` prompts (int64 ``[P]``) to ``B`` completions.
        formatter: messages to token ids. After a turn it continues from the *sampled* ids.
        k: episodes of each environment, which are one group.
        max_turns: turns after which an episode ends.

    Returns:
        ``B`` token records, rewards float32 ``[B]`` and group ids int64 ``[B]``, in the order in
        which the environments were made.
    """
    envs = [make() for make in env_fns for _ in range(k)]
    chats = [env.reset() for env in envs]
    records = [None] * len(envs)
    rewards = torch.zeros(len(envs))
    playing = list(range(len(envs)))
    for _ in range(max_turns):
        prompts = [formatter.continue_record(records[i], chats[i]) for i in playing]
        completions = generate([prompt.token_ids for prompt in prompts]) if playing else []
        going_on = []
        for i, prompt, completion in zip(playing, prompts, completions, strict=True):
            ids, log_probs, finish_reason = completion[:3]
            records[i] = prompt.respond(ids, log_probs, 0, finish_reason)
            message = formatter.parse_response(prompt.token_ids, ids, finish_reason)
            reply = envs[i].step(message["content"])
            rewards[i] += envs[i].reward()
            if reply is not None:
                chats[i] = [*chats[i], message, reply]
                going_on.append(i)
        playing = going_on
    return records, rewards, torch.arange(len(env_fns)).repeat_interleave(k)


def sampler(model, tokenizer, formatter, *, max_new_tokens: int, temperature: float = 1.0):
    """The ``generate`` of :func:`collect_rollouts`. ``temperature=0`` is greedy."""
    backend = TransformersBackend(model, tokenizer=tokenizer)
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        stop_token_ids=formatter.stop_token_ids,
    )
    return lambda prompts: [group[0] for group in backend.generate(prompts, params)]


# --- 3. The loss ----------------------------------------------------------------------------------


def score(model, rows):
    """Log-probs of each token given those before it, ``[B, T]``; column 0 is 0.0.

    The logits at position ``t - 1`` predict token ``t``: ``token_log_probs`` does this shift.
    """
    ids_BT = pad_sequence(rows, batch_first=True).to(model.device)
    # Padding follows the tokens, and a causal model does not look ahead: no mask is needed.
    return token_log_probs(model(input_ids=ids_BT, use_cache=False).logits, ids_BT)


def backward_grpo(model, records, advantages_B, *, minibatch: int) -> float:
    """Add the gradient of the GRPO loss of all rollouts, some at a time; returns the loss.

    New rollouts are used once, so the ratio of policies is one: no clip and no old log-probs are
    needed.
    """
    total = 0.0
    for start in range(0, len(records), minibatch):
        some = records[start : start + minibatch]
        log_probs_BT = score(model, [record.token_ids for record in some])
        mask_BT = pad_sequence([r.source == Source.SAMPLED for r in some], batch_first=True)
        advantages = advantages_B[start : start + minibatch].to(model.device)
        loss = policy_gradient_loss(log_probs_BT, advantages, mask_BT.to(model.device))
        # A minibatch counts by its size: the sum is the mean over all rollouts for any split.
        loss = loss * (len(some) / len(records))
        loss.backward()
        total += loss.item()
    return total


def warm_up(model, formatter, optimizer, *, steps: int, batch: int, difficulty: int, seed: int):
    """Teach a model the form of an answer (with random counts)."""
    rng = random.Random(seed)
    for _ in range(steps):
        rows, masks = [], []
        for _ in range(batch):
            env = LetterCounting(difficulty=difficulty, seed=rng.getrandbits(32))
            chat = env.reset()
            made_up = {letter: rng.randint(0, 3) for letter in env.problem.counts}
            answer = json.dumps(made_up) if len(made_up) > 1 else str(*made_up.values())
            chat.append({"role": "assistant", "content": f"<answer>{answer}</answer>"})
            ids, mask = assistant_mask(formatter, chat)
            rows.append(ids)
            masks.append(mask)
        mask_BT = pad_sequence(masks, batch_first=True).to(model.device)
        ones = torch.ones(batch, device=model.device)
        # Supervised learning is the policy gradient of an advantage of one.
        loss = policy_gradient_loss(score(model, rows), ones, mask_BT, normalize_by_tokens=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


# --- 4. The loop ----------------------------------------------------------------------------------


def evaluate(generate, formatter, *, difficulty: int, problems: int) -> tuple[float, float]:
    """Share of held-out problems that are answered exactly, and mean reward."""
    env_fns = [
        partial(LetterCounting, difficulty=difficulty, seed=i, split="test")
        for i in range(problems)
    ]
    _, rewards, _ = collect_rollouts(env_fns, generate, formatter)
    return (rewards == 1.0).float().mean().item(), rewards.mean().item()


def train(args: PicoConfig, folder: Path) -> dict[str, float]:
    """Warm up, evaluate, train, evaluate; returns exact answers and reward before and after."""
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = load_tokenizer(args.model)
    model = load_model(args.model, device=args.device)
    # A template that rewrites history would make two rows of one conversation: an error here.
    formatter = ChatFormatter(tokenizer, on_rewrite="error")
    make_sampler = partial(sampler, model, tokenizer, formatter, max_new_tokens=args.max_new_tokens)
    generate, greedy = make_sampler(), make_sampler(temperature=0.0)
    held_out = {"difficulty": args.difficulty, "problems": args.eval_problems}
    begin = time.perf_counter()

    if args.warmup:
        warm_up(
            model.train(),
            formatter,
            torch.optim.AdamW(model.parameters(), lr=args.warmup_lr, weight_decay=0.0),
            steps=args.warmup,
            batch=32,
            difficulty=args.difficulty,
            seed=args.seed,
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    problems = random.Random(args.seed)
    metrics = MetricsTable(folder / "metrics.csv")
    before = evaluate(greedy, formatter, **held_out)
    metrics.write(0, {"eval/accuracy": before[0], "eval/reward": before[1]})
    after = before

    with ProgressBar("step", args.steps) as bar:
        for step in range(1, args.steps + 1):
            # Collect: args.tasks problems, args.k answers each.
            model.eval()
            env_fns = [
                partial(LetterCounting, difficulty=args.difficulty, seed=problems.getrandbits(32))
                for _ in range(args.tasks)
            ]
            records, rewards, group_ids = collect_rollouts(
                env_fns, generate, formatter, k=args.k, max_turns=args.max_turns
            )
            # Advantages: reward minus the mean of the group, before the batch is split.
            advantages = group_advantages(rewards, group_ids, normalize="none")
            # Update.
            model.train()
            loss = backward_grpo(model, records, advantages, minibatch=args.minibatch)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).item()
            optimizer.step()
            optimizer.zero_grad()
            # Look.
            if step == 1 and (rewards > 0).float().mean() < 0.5:
                say("fewer than half of the answers have the right form; try warmup=100")
            reward, exact = rewards.mean().item(), (rewards == 1).float().mean().item()
            bar.update(step, f"reward {reward:.3f}")
            row = {"train/reward": reward, "train/success": exact}
            row |= {"train/loss_objective": loss, "train/grad_norm": norm}
            if step == args.steps:
                after = evaluate(greedy, formatter, **held_out)
                row |= {"eval/accuracy": after[0], "eval/reward": after[1]}
            metrics.write(step, row)

    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    seconds = time.perf_counter() - begin
    results = {
        "held-out accuracy": f"{before[0]:.3f} -> {after[0]:.3f}",
        "held-out reward": f"{before[1]:.3f} -> {after[1]:.3f}",
        "steps": f"{args.steps} in {seconds:.0f} s",
        "metrics": str(metrics.path),
        "model": str(folder / "model"),
        "next": f"torchrl-llm plot {folder}",
        "": f"torchrl-llm chat {folder}",
    }
    show(text_table(results.items()))
    return {
        "before": before[0],
        "after": after[0],
        "reward_before": before[1],
        "reward_after": after[1],
        "seconds": seconds,
    }


@launch.tells_errors
def main(arguments: list[str]) -> dict[str, float]:
    args = read_settings(PicoConfig, arguments, __doc__)
    folder = new_folder("pico", args.folder)
    with RunLog.of(folder):
        say(f"pico: GRPO, model {args.model or 'embedded'}, task letter counting, folder {folder}")
        return train(args, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
