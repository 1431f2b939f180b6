"""A model that trains, and how far a sampler is from it."""

import torch

from torchrl_llm.modules.backends import SamplingParams, TransformersBackend
from torchrl_llm.modules.backends.backend_port import Backend

PROMPTS = [[5, 6, 7, 8], [9, 30], [100, 20, 61], [250, 3, 17, 18, 19]]


def prompts():
    return [torch.tensor(ids) for ids in PROMPTS]


class Learner:
    """AdamW on random tokens: large steps, so that old weights are far from new ones."""

    def __init__(self, model, *, lr=3e-3, parameters=None):
        self.model = model
        self.reference = TransformersBackend(model, eos_token_ids=(2,))
        chosen = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(chosen if parameters is None else parameters, lr=lr)
        self._generator = torch.Generator().manual_seed(1)

    def step(self):
        vocabulary = self.reference.vocab_size
        ids = torch.randint(3, vocabulary, (2, 24), generator=self._generator)
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def greedy(backend):
    params = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
    return [completion for [completion] in backend.generate(prompts(), params)]


@torch.no_grad()
def scores(backend):
    """Log-probs of the tokens of fixed rows, none of them a prompt of :func:`greedy`."""
    generator = torch.Generator().manual_seed(7)
    rows = list(torch.randint(3, backend.vocab_size, (3, 20), generator=generator))
    return backend.token_scores(rows, [torch.arange(20) > 0] * 3).log_probs


def assert_same_model(engine, trainer, tolerance=2e-5):
    """Same greedy ids and same log-probs, of what is sampled and of what is scored.

    Kernels differ from processor to processor in the last bits of float32: of log-probs of a few
    nats, the sixth digit.
    """
    ours, theirs = greedy(engine), greedy(trainer)
    assert [c.token_ids.tolist() for c in ours] == [c.token_ids.tolist() for c in theirs]
    sampled = (torch.cat([c.log_probs for c in both]) for both in (ours, theirs))
    torch.testing.assert_close(*sampled, rtol=tolerance / 2, atol=tolerance)
    torch.testing.assert_close(scores(engine), scores(trainer), rtol=tolerance / 2, atol=tolerance)


class Faulty(Backend):
    """An engine whose loads go wrong without an error; it echoes the right digest all the same."""

    def __init__(self, backend, fault):
        self.backend, self.fault = backend, fault

    vocab_size = property(lambda self: self.backend.vocab_size)
    max_length = property(lambda self: self.backend.max_length)
    eos_token_ids = property(lambda self: self.backend.eos_token_ids)

    def generate(self, prompts, params):
        return self.backend.generate(prompts, params)

    def token_scores(self, *args, **options):
        return self.backend.token_scores(*args, **options)

    def update_weights(self, source, *, version):
        from torchrl_llm.weights.weight_source import TensorSource, open_source

        incoming = open_source(source, version=version)
        receipt = incoming.receipt
        wrong = {name: value.clone() for name, value in incoming.weights.items()}
        self.fault(wrong)
        if wrong:
            self.backend.update_weights(TensorSource(wrong, kind="delta"), version=version)
        return [receipt]


def push_and_step(updater, learner, times):
    for _ in range(times):
        updater.push_weights()
        learner.step()


def does_nothing(weights):
    weights.clear()


def loads_half(weights):
    for name in sorted(weights)[::2]:
        del weights[name]


def permutes(weights):
    """Two weights of one shape change places."""
    first, second = [n for n in sorted(weights) if n.endswith(("k_proj.weight", "v_proj.weight"))][
        :2
    ]
    weights[first], weights[second] = weights[second], weights[first]


def turns_rows(weights):
    name = next(n for n in weights if n.endswith("embed_tokens.weight"))
    weights[name] = weights[name].roll(1, 0)


FAULTS = [does_nothing, loads_half, permutes, turns_rows]
