"""One GRPO step (collect, advantages, loss, optimizer) against TRL, TorchRL and plain PyTorch.

0.7M-parameter Qwen2, 8 prompts x 8 samples x 24 new tokens, one thread. TRL and TorchRL's LLM stack
are compared only, in an environment of their own:

    pip install trl==1.16 datasets && OMP_NUM_THREADS=1 python test/benchmarks/bench_grpo_step.py

All sides start from the same weights, see the same prompts and are rewarded by a function of the
same cost. Prompts are equally long, and TorchRL samples lower-case letters only: with other prompts
or samples its stack does not run (its text is encoded again into other tokens, and its loss then
finds two lengths for one row).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path[:0] = [str(parent) for parent in Path(__file__).resolve().parents[:3]]

import torch
from harness import compare, report
from models_helper import make_tiny_model as _make_tiny_model
from models_helper import make_tokenizer as _make_tokenizer

PROMPTS = [f"What is {10 + i} and {30 + i}?" for i in range(8)]
GROUP, NEW_TOKENS, LR = 8, 24, 1e-4


def make_parts():
    """Model and tokenizer; no merges, so equally long prompts have equally many tokens."""
    tokenizer = _make_tokenizer(vocab_size=259)
    tokenizer.padding_side = "left"
    model = _make_tiny_model(
        hidden_size=128, intermediate_size=320, num_hidden_layers=4, initializer_range=0.02
    )
    return model, tokenizer


def reward_of(text: str) -> float:
    return float(len(text) % 2)


def bare_step() -> Callable[[], object]:
    """The shortest loop that a careful person would write."""
    model, tokenizer = make_parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    chats = [[{"role": "user", "content": text}] for text in PROMPTS for _ in range(GROUP)]

    def step() -> None:
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
        )
        prompt_length = inputs["input_ids"].shape[1]
        model.eval()
        full = model.generate(
            **inputs, max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0, top_p=1.0, temperature=1.0
        )
        model.train()
        response = full[:, prompt_length:]
        eos = (response == tokenizer.eos_token_id).int()
        mask = (eos.cumsum(1) - eos == 0).float()
        texts = tokenizer.batch_decode(response, skip_special_tokens=True)
        rewards = torch.tensor([reward_of(text) for text in texts]).view(-1, GROUP)
        centred = rewards - rewards.mean(1, keepdim=True)
        advantage = (centred / (rewards.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        attention = torch.cat([inputs["attention_mask"], mask.long()], 1)
        logits = model(full, attention_mask=attention, logits_to_keep=response.shape[1] + 1).logits[
            :, :-1
        ]
        log_probs = logits.log_softmax(-1).gather(-1, response[..., None]).squeeze(-1)
        ratio = (log_probs - log_probs.detach()).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = -(gain * mask).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def trl_step() -> Callable[[], object]:
    """A training step of TRL's trainer, which runs in a thread and is let go step by step."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = make_parts()
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS]
    go, done = threading.Semaphore(0), threading.Semaphore(0)

    class OneByOne(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            go.acquire()

        def on_step_end(self, args, state, control, **kwargs):
            done.release()

    def reward(completions, **kwargs):
        return [reward_of(completion[0]["content"]) for completion in completions]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=len(PROMPTS) * GROUP,
            num_generations=GROUP,
            max_completion_length=NEW_TOKENS,
            learning_rate=LR,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            top_k=0,
            beta=0.0,
            report_to=[],
            save_strategy="no",
            logging_steps=10**6,
            max_steps=10**6,
            disable_tqdm=True,
            shuffle_dataset=False,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[OneByOne()],
    )
    threading.Thread(target=trainer.train, daemon=True).start()

    def step() -> None:
        go.release()
        done.acquire()

    return step


def torchrl_step() -> Callable[[], object]:
    """TorchRL 0.14.1: environment, wrapper, collector, buffer and loss, as in its recipe."""
    from tensordict import TensorDict, set_list_to_stack

    set_list_to_stack(True).set()
    from torchrl.collectors.llm import LLMCollector
    from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement, Unbounded
    from torchrl.envs import StepCounter, Transform
    from torchrl.envs.llm import DatasetChatEnv
    from torchrl.modules.llm import TransformersWrapper
    from torchrl.objectives.llm import GRPOLoss, MCAdvantage

    model, tokenizer = make_parts()
    tokenizer.name_or_path = "qwen"
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    letters = [tokenizer.convert_tokens_to_ids(c) for c in "abcdefghijklmnopqrstuvwxyz"]
    bias = torch.full((model.config.vocab_size,), -1e4)
    bias[letters] = 0
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits + bias)
    folder = Path(tempfile.mkdtemp())
    lines = [json.dumps({"query": text, "answer": ""}) for text in PROMPTS]
    (folder / "train.jsonl").write_text("\n".join(lines))

    class Reward(Transform):
        def _step(self, td, next_td):
            rewards = [reward_of(text) for text in td["text", "response"]]
            next_td["reward"] = torch.tensor(rewards).view(-1, 1, 1)
            return next_td

        def transform_reward_spec(self, spec):
            spec["reward"] = Unbounded((*self.parent.batch_size, 1, 1))
            return spec

    size = len(PROMPTS) * GROUP
    env = DatasetChatEnv(
        dataset=str(folder),
        num_envs=size,
        repeats=GROUP,
        tokenizer=tokenizer,
        input_mode="text",
        shuffle=False,
        collate_fn=lambda rows: torch.stack([TensorDict.from_dict(row) for row in rows]),
    )
    env = env.append_transform(StepCounter(max_steps=1)).append_transform(Reward())
    sampling = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "temperature": 1.0}
    settings = {"tokenizer": tokenizer, "input_mode": "text", "return_log_probs": True}
    policy = TransformersWrapper(model, generate=True, generate_kwargs=sampling, **settings)
    collector = LLMCollector(
        env, policy=policy, dialog_turns_per_batch=size, flatten_data=True, reset_at_each_iter=True
    )
    buffer = ReplayBuffer(
        storage=LazyStackStorage(size),
        sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(grpo_size=GROUP),
        batch_size=size,
    )
    loss_module = GRPOLoss(
        TransformersWrapper(model, generate=False, **settings),
        masking_strategy="sft",
        entropy_bonus=False,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    batches = iter(collector)

    def step() -> None:
        data = next(batches)
        for row in data.unbind(0):  # the loss wants log-probs of the prompt too
            sampled = row["log_probs", "response"]
            missing = row["tokens", "full"].shape[0] - sampled.shape[0]
            row["log_probs", "full"] = torch.cat([sampled.new_zeros(missing), sampled])
        buffer.extend(data)
        loss_module(buffer.sample()).loss_objective.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        buffer.empty()

    return step


def our_step() -> Callable[[], object]:
    """The body of grpo-sync.py's loop, metrics and ledger included."""
    from torchrl.data import LazyStackStorage, SamplerWithoutReplacement

    from torchrl_llm.collectors import LLMCollector
    from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
    from torchrl_llm.envs import RewardParser, TaskEnv
    from torchrl_llm.modules import TransformersWrapper
    from torchrl_llm.objectives import GRPOLoss, MCAdvantage
    from torchrl_llm.trainers import (
        BatchSource,
        LossMeter,
        clipped_step,
        make_optimizer,
        micro_batches,
        rollout_metrics,
    )

    class Reward(RewardParser):
        def score(self, response, answer):
            return reward_of(response)

    class Task(TaskEnv):
        def make_reward(self):
            return Reward()

    model, tokenizer = make_parts()
    policy = TransformersWrapper(
        model.train(),
        tokenizer=tokenizer,
        generate_kwargs={"max_new_tokens": NEW_TOKENS, "temperature": 1.0},
    )
    size = len(PROMPTS) * GROUP
    env = Task(
        dataset=[{"query": text, "answer": ""} for text in PROMPTS],
        num_envs=size,
        repeats=GROUP,
        shuffle=False,
    )
    collector = LLMCollector(
        env, policy=policy, dialog_turns_per_batch=size, yield_completed_trajectories=True
    )
    credit = MCAdvantage(grpo_size=GROUP)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(size), sampler=SamplerWithoutReplacement(), batch_size=size
    )
    buffer.append_transform(JoinTurns())
    buffer.append_transform(credit)
    source = BatchSource(collector, buffer, credit=credit, num_rows=size)
    loss_module = GRPOLoss(policy, masking_strategy="rlhf")
    optimizer = make_optimizer(model.parameters(), name="AdamW", lr=LR)

    def step() -> None:
        rows = source.fill()
        meter = LossMeter()
        for minibatch in buffer:
            normalizer = loss_module.normalizer(minibatch)
            for micro_batch in micro_batches(minibatch, budget=16384):
                output = loss_module(micro_batch, normalizer=normalizer)
                output.total_loss().backward()
                meter.add(output)
            meter.close(grad_norm=clipped_step(optimizer, max_norm=1.0))
        collector.update_policy_weights_()
        rollout_metrics(rows), meter.metrics(), source.ledger.metrics()

    return step


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ours, rows = our_step(), []
    others = {
        "bare PyTorch loop": (bare_step, "<= 1.1"),
        "TRL 1.16 GRPOTrainer": (trl_step, "<= 1.0"),
        "TorchRL 0.14.1 LLM stack": (torchrl_step, "<= 0.33"),
    }
    for name, (make, aim) in others.items():
        try:
            other = make()
        except ImportError as error:
            print(f"left out: {name} ({error})")
            continue
        rows.append(compare(f"one GRPO step against {name}", ours, other, aim=aim, warmup=2))
    report(rows)


if __name__ == "__main__":
    main()
