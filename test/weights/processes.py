"""Processes of tests: samplers and learners that are called over a pipe, stopped and killed.

A child is forked from a server that has imported the package once, so that it starts in
milliseconds.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from fork_server import fork_server
from weights import without_gpu

from torchrl_llm.errors import WorkerError
from torchrl_llm.modules import FakeBackend, SamplingParams, TransformersBackend
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.modules.model_loading import load_model
from torchrl_llm.weights import (
    EngineWeights,
    FileWriter,
    VLLMDoubleBufferSyncScheme,
    VLLMTransfer,
    engine_weights,
)

VOCABULARY = 64


def fake(seed: int = 0) -> FakeBackend:
    """A sampler of 2 tensors."""
    return FakeBackend(vocab_size=VOCABULARY, eos_token_ids=(2,), seed=seed)


def _serve(connection, make, arguments):
    # A hung test must not leave processes behind.
    signal.alarm(300)
    target = make(*arguments)
    while True:
        name, args, kwargs = connection.recv()
        try:
            value = target if name is None else getattr(target, name)
            connection.send((True, value(*args, **kwargs) if callable(value) else value))
        except Exception as error:  # the caller raises it
            traceback.print_exc()
            connection.send((False, error))


class Child:
    """An object in another process.

    Args:
        make: top-level function that builds the object there.
        arguments: of it.
    """

    def __init__(self, make, *arguments):
        self._connection, theirs = multiprocessing.Pipe()
        self.process = fork_server().Process(
            target=_serve, args=(theirs, make, arguments), daemon=True
        )
        self.process.start()
        theirs.close()
        self._calls = threading.Lock()  # a caller that gave up leaves a thread that waits

    def send(self, name, *args, **kwargs):
        """Begin a call; read its result with :meth:`result`."""
        self._connection.send((name, args, kwargs))

    def result(self, timeout_s=120):
        if not self._connection.poll(timeout_s):
            raise WorkerError(f"the child did not answer within {timeout_s} s")
        try:
            fine, value = self._connection.recv()
        except EOFError:
            raise WorkerError("the child died") from None
        if not fine:
            raise value
        return value

    def call(self, name, *args, timeout_s=120, **kwargs):
        with self._calls:
            self.send(name, *args, **kwargs)
            return self.result(timeout_s)

    def finished(self):
        """Whether the result of the last call is there."""
        return self._connection.poll(0)

    def kill(self):
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)


class ChildBackend(Backend):
    """The proxy of a backend in a child: what an engine elsewhere is to its callers."""

    def __init__(self, child, vocab_size=VOCABULARY, max_length=4096, eos_token_ids=(2,)):
        self.child = child
        self._about = vocab_size, max_length, eos_token_ids

    vocab_size = property(lambda self: self._about[0])
    max_length = property(lambda self: self._about[1])
    eos_token_ids = property(lambda self: self._about[2])

    def generate(self, prompts, params):
        return self.child.call("generate", prompts, params)

    def token_scores(self, sequences, select, **options):
        return self.child.call("token_scores", sequences, select, **options)

    def update_weights(self, source, *, version):
        return self.child.call("update_weights", source, version=version)


PROMPT = torch.tensor([5, 9])
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)


def answer(backend):
    return backend.generate([PROMPT], GREEDY)[0][0].token_ids.tolist()


def trained_fake(seed):
    return fake(seed).module


def transformers_sampler(model):
    backend = TransformersBackend(model)
    return _WithoutGradients(backend)


class _WithoutGradients:
    """Scores travel through a pipe, which takes no graph along."""

    def __init__(self, backend):
        self._backend = backend

    def update_weights(self, source, *, version):
        return self._backend.update_weights(source, version=version)

    def token_scores(self, *args, **options):
        with torch.no_grad():
            return self._backend.token_scores(*args, **options)


def fake_of_vllm():
    """A sampler in a process that transfers weights without a GPU."""
    without_gpu.install()
    return fake()


class TransferLearner:
    """Sends weights by a transfer, in steps: what a proxy would carry goes over the pipe."""

    def __init__(self):
        without_gpu.install()
        self._transfer = VLLMTransfer("nccl", timeout_s=6.0, packed=False)
        self._source, self._receipts = queue.Queue(), queue.Queue()

    def begin(self, seed):
        """Start a push; the source for its one receiver."""
        return self._begin(dict(trained_fake(seed).state_dict()))

    def begin_model(self):
        """The same with the embedded model, doubled."""
        return self._begin({n: w * 2 for n, w in engine_weights(load_model()).items()})

    def _begin(self, weights):
        def tell(source):
            self._source.put(source)
            return self._receipts.get(timeout=20)

        send = functools.partial(self._transfer.send, weights, tell, num_receivers=1)
        self._push = ThreadPoolExecutor(1).submit(send)
        return self._source.get(timeout=20)

    def end(self, receipts):
        self._receipts.put(receipts)
        return self._push.result(20)

    strike = staticmethod(without_gpu.strike)


class FolderListener:
    """A sampler that polls a folder, in a process of its own."""

    def __init__(self, folder):
        self.backend = fake()
        self.receiver = VLLMDoubleBufferSyncScheme(folder).create_receiver(self.backend)

    def poll(self, timeout_s):
        return self.receiver.poll_and_apply(timeout_s), self.receiver.version

    def answer(self):
        return answer(self.backend)


class FolderWriter:
    """Writes weights of which all values are one number."""

    def __init__(self, folder):
        self.writer = FileWriter(folder)

    def write(self, value, version):
        weights = {name: torch.full((64, 8), value) for name in ("embedding", "head")}
        return self.writer.write(weights, version=version).path.name

    def write_for(self, seconds, at_least):
        """Write as fast as it goes, weights that take a while to copy."""
        deadline, count = time.monotonic() + seconds, 0
        while time.monotonic() < deadline or count < at_least:
            count += 1
            weights = {f"w{index}": torch.full((100_000,), float(count)) for index in range(8)}
            self.writer.write(weights, version=count)
        return count

    def write_half(self, value, how):
        """Die, or freeze, when all is written and the file has no name yet."""
        os.fsync = lambda file: os.kill(os.getpid(), how)
        self.write(value, 2)


class EngineHost:
    """A real vLLM engine."""

    def __init__(self, seconds):
        signal.alarm(seconds)
        without_gpu.install()
        from modules.backends.vllm.engine_helper import small_backend

        self.backend = small_backend()

    def about(self):
        return self.backend.vocab_size, self.backend.max_length, self.backend.eos_token_ids

    def generate(self, prompts, params):
        return self.backend.generate(prompts, params)

    def token_scores(self, sequences, select, **options):
        return self.backend.token_scores(sequences, select, **options)

    def update_weights(self, source, *, version):
        return self.backend.update_weights(source, version=version)

    def receive(self, scheme):
        """What came by a scheme, given the bare ``vllm.LLM``."""
        receiver = scheme.create_receiver(self.backend.engine)
        return receiver.poll_and_apply(30), receiver.version


class ShardedRank:
    """One of two ranks that hold a model in shards, of which the first sends."""

    def __init__(self, rank, meeting, model):
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
        self.model = model
        mesh = dist.init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.sampler = TransformersBackend(fresh_like(model))
        self.updater = EngineWeights(self.sampler)

    def push(self):
        """Gather with the other rank, and send from the first; whether it was this one."""
        weights = engine_weights(self.model)
        if is_first := dist.get_rank() == 0:
            self.updater.push_weights(weights)
        return is_first

    def differs_from(self, weights):
        """Names of the sampler's weights that are not those given."""
        own = engine_weights(self.sampler.module)
        return sorted(name for name, value in weights.items() if not torch.equal(own[name], value))


def fresh_like(model):
    """Another model of the same configuration, with zeros for weights."""
    twin = type(model)(model.config)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    return twin
