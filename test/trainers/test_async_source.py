"""Rows of collectors that run beside training, over a channel between threads of this process."""

import contextlib
import threading
import time

import pytest
import torch
from torchrl.data import LazyStackStorage, SamplerWithoutReplacement
from torchrl.envs import Transform

from torchrl_llm.collectors import ChannelCollector, LLMCollector
from torchrl_llm.collectors.collecting_worker import CollectorWorker
from torchrl_llm.collectors.staleness import Pacer, StalenessRule
from torchrl_llm.collectors.transport import LocalChannel
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.envs.datasets.number_tasks import ArithmeticEnv
from torchrl_llm.errors import WorkerError
from torchrl_llm.modules import FakeBackend, FakeWrapper, load_tokenizer
from torchrl_llm.objectives import MCAdvantage
from torchrl_llm.trainers import BatchSource
from torchrl_llm.weights import engine_weights
from torchrl_llm.weights.weight_source import TensorSource

ROWS, GROUP = 8, 4
FATES = ("trained", "stale", "filtered", "truncated", "invalid", "surplus", "lost")


class Wait(Transform):
    """Every step of the environment takes as long as that."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def _step(self, tensordict, next_tensordict):
        time.sleep(self.seconds)
        return next_tensordict


class Worker:
    """A collector of one group at a time, in a thread."""

    def __init__(self, channel, tokenizer, index, delay_s):
        backend = FakeBackend(vocab_size=len(tokenizer), eos_token_ids=(tokenizer.eos_token_id,))
        options = {"tokenizer": tokenizer, "generate_kwargs": {"max_new_tokens": 4}}
        env = ArithmeticEnv(
            num_envs=GROUP, repeats=GROUP, group_repeats=True, tokenizer=tokenizer, worker_id=index
        )
        collector = LLMCollector(
            env.append_transform(Wait(delay_s)),
            policy=FakeWrapper(backend, **options),
            dialog_turns_per_batch=GROUP,
            yield_completed_trajectories=True,
        )
        self.worker = CollectorWorker(collector, channel, name=f"worker {index}")
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        with contextlib.suppress(WorkerError):  # the channel was closed
            self.worker.run()


class Learner:
    """The learner's end, with a model of its own whose weights it sends after each step."""

    def __init__(self, delays_s, *, age, on_stale="wait", **options):
        self.tokenizer = load_tokenizer()
        self.model = FakeBackend(vocab_size=len(self.tokenizer), eos_token_ids=(2,)).module
        self.channel = LocalChannel(max_size=4)
        rule = StalenessRule(max_policy_age=age, on_stale=on_stale)
        self.collector = ChannelCollector(
            self.channel,
            batch_rows=ROWS,
            pacer=Pacer(rule, batch_rows=ROWS),
            publish=self.publish,
            timeout_s=60,
            **options,
        )
        credit = MCAdvantage(grpo_size=GROUP)
        buffer = ReplayBuffer(
            storage=LazyStackStorage(ROWS),
            sampler=SamplerWithoutReplacement(),
            batch_size=ROWS,
            transform=credit,
        )
        self.source = BatchSource(
            self.collector,
            buffer,
            credit=credit,
            num_rows=ROWS,
            staleness=rule,
            lost=self.collector.take_lost,
        )
        self.workers = [
            Worker(self.channel, self.tokenizer, index, delay)
            for index, delay in enumerate(delays_s)
        ]

    def publish(self, weights, version):
        named = {name: value.clone() for name, value in engine_weights(weights).items()}
        receipts = [w.worker.load_weights(TensorSource(named), version) for w in self.workers]
        digests = {receipt.digest for worker in receipts for receipt in worker}
        assert len(digests) == 1
        return digests.pop()

    def step(self):
        """One step; the ledger's columns and the largest age of what was trained."""
        self.source.fill()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.01)
        self.collector.update_policy_weights_(self.model)
        return self.source.ledger.totals, self.source.policy_age["train/policy_age_max"]

    def close(self):
        self.collector.shutdown()
        for worker in self.workers:
            worker.thread.join(20)
            assert not worker.thread.is_alive()


@pytest.fixture
def learner():
    made = []

    def make(*args, **kwargs):
        made.append(Learner(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("age", [0, 2])
def test_nothing_older_than_allowed_is_trained_and_nothing_is_wasted(learner, age):
    run = learner([0.0, 0.02, 0.15], age=age)
    steps = [run.step() for _ in range(8)]
    for totals, oldest in steps:
        assert oldest <= age
        spent = sum(totals[name] for name in FATES) + totals["pending"]
        assert totals["generated"] == totals["trained"] == spent
    if age:
        # The collectors did run beside the updates, or this would be synchronous training.
        assert max(oldest for _, oldest in steps) >= 1


def test_collectors_that_do_not_wait_have_their_old_rows_dropped(learner):
    run = learner([0.0, 0.0], age=0, on_stale="drop")
    totals = [run.step()[0] for _ in range(6)]
    assert sum(one["stale"] for one in totals) > 0
    assert all(one["trained"] > 0 for one in totals)
    for one in totals:
        assert one["generated"] == sum(one[name] for name in FATES)


def test_a_worker_that_falls_silent_is_given_up_and_its_tokens_are_lost(learner):
    run = learner([0.0, 0.0], age=1, worker_timeout_s=3)
    run.step()
    silent = run.workers[1].worker
    # It samples, says so, and is never heard of again.
    hung = threading.Event()
    silent.collector.env.transform[-1]._step = lambda _, stepped: (hung.wait(90), stepped)[1]
    try:
        totals = [run.step()[0] for _ in range(4)]
        deadline = time.monotonic() + 60
        while not sum(one["lost"] for one in totals):
            assert time.monotonic() < deadline
            totals.append(run.step()[0])
    finally:
        hung.set()
    assert set(run.collector.workers()) == {"worker 0"}
    assert sum(one["generated"] for one in totals) == sum(
        one[name] for one in totals for name in FATES
    )
