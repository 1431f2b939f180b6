"""Processes of tests: samplers and learners that are called over a pipe, stopped and killed.

A child is forked from a server that has imported the package once, so that it starts in
milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback

import torch
import torch.distributed as dist
from torchrl_llm.weights.process_group import WeightGroup

from torchrl_llm.errors import WorkerError
from torchrl_llm.modules import FakeBackend, SamplingParams, TransformersBackend
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.modules.model_loading import load_model
from torchrl_llm.weights import (
    BroadcastReceiver,
    BroadcastSender,
    BroadcastWeights,
    DoubleBufferReceiver,
    DoubleBufferWriter,
    RankZeroWeights,
    engine_weights,
)
from torchrl_llm.weights.fingerprint import weights_digest

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torchrl_llm.weights.broadcast_source", "torchrl_llm.modules", "transformers", __name__]
)

VOCABULARY = 64


def fake(seed: int = 0) -> FakeBackend:
    """A sampler of 2 tensors."""
    return FakeBackend(vocab_size=VOCABULARY, eos_token_ids=(2,), seed=seed)


def _serve(connection, make, arguments):
    # A hung test must not leave processes behind.
    signal.alarm(120)
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
        self._connection, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, name, *args, **kwargs):
        """Begin a call; read its result with :meth:`result`."""
        self._connection.send((name, args, kwargs))

    def result(self, timeout_s=60):
        if not self._connection.poll(timeout_s):
            raise WorkerError(f"the child did not answer within {timeout_s} s")
        try:
            fine, value = self._connection.recv()
        except EOFError:
            raise WorkerError("the child died") from None
        if not fine:
            raise value
        return value

    def call(self, name, *args, timeout_s=60, **kwargs):
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


class Listener:
    """A sampler that polls, in a process of its own."""

    def __init__(self, port, timeout_s=10.0, seed=0):
        self.backend = fake(seed)
        self.receiver = BroadcastReceiver(self.backend, port=port, timeout_s=timeout_s)

    def poll(self, timeout_s):
        return self.receiver.poll_and_apply(timeout_s), self.receiver.version

    def listen(self):
        self.receiver.listen()

    def stop(self):
        self.receiver.shutdown()

    def answer(self):
        return answer(self.backend)

    def state(self):
        return self.receiver.version, str(self.receiver.failure)


class Learner:
    """Publishes weights that are large enough to be caught half-way."""

    def __init__(self, port, timeout_s=30.0):
        self.sender = BroadcastSender(
            device="cpu", port=port, timeout_s=timeout_s, bucket_bytes=1 << 14
        )

    def publish(self, seed, version):
        weights = dict(trained_fake(seed).state_dict())
        receipts = self.sender.publish(weights, version=version, num_receivers=1)
        return [receipt.version for receipt in receipts]

    def publish_half(self, how):
        """Die, or freeze, after the first of two buffers of an update went out."""
        real, sent = WeightGroup.start, []

        def start(group, tensor, *args, **kwargs):
            if sent:
                os.kill(os.getpid(), how)
            sent.append(1)
            return real(group, tensor, *args, **kwargs)

        WeightGroup.start = start
        # Each buffer holds one of the two tensors.
        self.sender._bucket_bytes = 1
        self.publish(5, 99)


class FolderListener(Listener):
    """A sampler that polls a folder."""

    def __init__(self, folder):
        self.backend = fake()
        self.receiver = DoubleBufferReceiver(self.backend, folder)


class FolderWriter:
    """Writes weights of which all values are one number."""

    def __init__(self, folder):
        self.writer = DoubleBufferWriter(folder)

    def write(self, value, version):
        weights = {name: torch.full((64, 8), value) for name in ("embedding", "head")}
        return self.writer.write(weights, version=version).sequence

    def write_for(self, seconds, at_least):
        """Write as fast as it goes, weights that take a while to copy."""
        deadline, count = time.monotonic() + seconds, 0
        while time.monotonic() < deadline or count < at_least:
            count += 1
            weights = {f"w{index}": torch.full((100_000,), float(count)) for index in range(8)}
            self.writer.write(weights, version=count)
        return count

    def write_half(self, value, how):
        """Die, or freeze, after the first of two tensors was written."""
        real, copied = torch.Tensor.copy_, []

        def copy_(tensor, *args):
            if copied:
                os.kill(os.getpid(), how)
            copied.append(1)
            return real(tensor, *args)

        torch.Tensor.copy_ = copy_
        self.write(value, 2)


class EngineHost:
    """A real vLLM engine, with receivers around it."""

    def __init__(self, seconds):
        signal.alarm(seconds)
        from modules.backends.vllm.engine_helper import small_backend

        self.backend = small_backend()
        self.receiver = None

    def about(self):
        return self.backend.vocab_size, self.backend.max_length, self.backend.eos_token_ids

    def generate(self, prompts, params):
        return self.backend.generate(prompts, params)

    def token_scores(self, sequences, select, **options):
        return self.backend.token_scores(sequences, select, **options)

    def update_weights(self, source, *, version):
        return self.backend.update_weights(source, version=version)

    def listen(self, scheme):
        """Receive by a scheme, given the bare ``vllm.LLM``, in a thread."""
        if self.receiver is not None:
            self.receiver.shutdown()
        self.receiver = scheme.create_receiver(self.backend.engine)
        self.receiver.listen()

    def state(self):
        return self.receiver.version, str(self.receiver.failure)

    def wait_for(self, version, timeout_s):
        deadline = time.monotonic() + timeout_s
        while self.receiver.version != version and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.receiver.version


class SchemeLearner:
    """The trainer of a scheme; its model is the embedded one, moved."""

    def __init__(self, scheme):
        self.sender = scheme.create_sender()
        self.model = load_model(dtype="float32").eval()
        self.sender.register_model(self.model)

    def move(self, seed):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)

    def update(self):
        return [receipt.digest for receipt in self.sender.update_weights()]

    def digest(self):
        return weights_digest(engine_weights(self.model))

    def weights(self):
        return {name: value.clone() for name, value in engine_weights(self.model).items()}

    def update_half(self, how):
        real, sent = WeightGroup.start, []

        def start(group, tensor, *args, **kwargs):
            if len(sent) == 3:
                os.kill(os.getpid(), how)
            sent.append(1)
            return real(group, tensor, *args, **kwargs)

        WeightGroup.start = start
        self.sender._broadcast._bucket_bytes = 1 << 14
        self.update()


class ShardedRank:
    """One of two ranks that hold a model in shards, and an updater that sends from the first."""

    def __init__(self, rank, meeting, model):
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
        self.model = model
        mesh = dist.init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.sampler = TransformersBackend(fresh_like(model))
        self.made = 0
        self.updater = RankZeroWeights(self._make)

    def _make(self):
        self.made += 1
        return BroadcastWeights(self.sampler, device="cpu", timeout_s=60)

    def push(self):
        self.updater.push_weights(self.model)
        return self.made

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
