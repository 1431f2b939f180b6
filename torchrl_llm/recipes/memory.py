"""Memory of a run in bytes, by formula: only from its settings and the model's ``config.json``.

No weights are read. Parameters are counted exactly, on the model's layers without weight values
(:func:`~torchrl_llm.modules.empty_model`); so are the states of the optimizer, because it takes a
step on these layers. Activations and the cache of sampling are formulas for a decoder of the Llama
family (Llama, Qwen2, Mistral, ...), with attention that does not store its scores. The memory of
torch, CUDA and Python themselves is not counted; on a GPU, leave a GB for it. With
``train.parallel`` the result is the memory of one process, which has its share of the rows.

Next: ``torchrl-llm memory`` prints it; :doc:`/howto/hardware_and_memory`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchrl_llm import modules, rewards
from torchrl_llm._settings import naming
from torchrl_llm.errors import ConfigError
from torchrl_llm.functional.head_tiles import logits_bytes
from torchrl_llm.modules.model_loading import empty_reward_model
from torchrl_llm.modules.quantization import quantized_weights, weight_bytes
from torchrl_llm.recipes import builders, grpo_config
from torchrl_llm.recipes.reward_config import known_scorers
from torchrl_llm.recipes.sampling_engine import engine_arguments, sync_type
from torchrl_llm.recipes.shared_keys import TrainedConfig
from torchrl_llm.trainers import make_optimizer
from torchrl_llm.trainers.optimizers import in_training
from torchrl_llm.trainers.ranks import blocks_of

Precision = Literal["float32", "mixed", "bfloat16"]
"""Float32 throughout; float32 weights and bfloat16 products (autocast); bfloat16 weights."""

_FLOAT32, _BFLOAT16 = 4, 2


class DecoderShape(NamedTuple):
    """Sizes of a decoder, as its ``config.json`` gives them.

    Attributes:
        layers: number of layers.
        hidden: width of the hidden states.
        heads: heads of the queries.
        kv_heads: heads of keys and values.
        head_dim: width of a head.
        intermediate: width of the feed-forward part.
        vocabulary: entries of the vocabulary.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @classmethod
    def of(cls, model: nn.Module) -> DecoderShape:
        """The shape of a causal model.

        Args:
            model: from :func:`~torchrl_llm.modules.load_model` or
                :func:`~torchrl_llm.modules.empty_model`.

        Raises:
            ConfigError: its configuration lacks one of the sizes.

        Example:
            >>> DecoderShape.of(modules.empty_model()).hidden
            128
        """
        config = model.config.get_text_config(decoder=True)
        try:
            heads = config.num_attention_heads
            return cls(
                config.num_hidden_layers,
                config.hidden_size,
                heads,
                getattr(config, "num_key_value_heads", None) or heads,
                getattr(config, "head_dim", None) or config.hidden_size // heads,
                config.intermediate_size,
                config.vocab_size,
            )
        except AttributeError as error:
            raise ConfigError(
                f"the memory of a {config.model_type} model is not known: its configuration has no "
                f"{error.name}"
            ) from error


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; a shared tensor, such as a tied embedding, counts once.

    Args:
        tensors: tensors on any device, including ``meta``.

    Example:
        >>> tensor_bytes(modules.empty_model().parameters())
        1351168
    """
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that require gradients.

    Args:
        model: the policy.
    """
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizer_bytes(
    parameters: nn.Module | Iterable[nn.Parameter], arguments: Mapping[str, Any]
) -> int:
    """Bytes of the states of an optimizer after its first step, on any device.

    Args:
        parameters: the trained parameters, or their module.
        arguments: arguments of :func:`~torchrl_llm.trainers.make_optimizer`.

    Raises:
        ConfigError: the optimizer's memory depends on more than shapes.

    Example:
        >>> weight = nn.Parameter(torch.empty(10, 10, device="meta"))
        >>> optimizer_bytes([weight], {"name": "AdamW", "lr": 1e-4})  # two moments, and its step
        804
    """
    if isinstance(parameters, nn.Module):
        module = copy.deepcopy(parameters).to("meta")
        empty = trained(module)
    else:
        module = [nn.Parameter(torch.empty_like(each, device="meta")) for each in parameters]
        empty = module
    optimizer = make_optimizer(module, **{**arguments, "on_cpu": False})
    for each in empty:
        each.grad = torch.empty_like(each)
    try:
        with in_training(optimizer):
            optimizer.step()
    except RuntimeError as error:
        raise ConfigError(
            f"the memory of optimizer.name={arguments['name']} is not known without running it"
        ) from error
    states = (value for state in optimizer.state.values() for value in state.values())
    return tensor_bytes(value for value in states if isinstance(value, Tensor))


def cache_bytes(shape: DecoderShape, num_tokens: int, precision: Precision) -> int:
    """Bytes of the keys and values of tokens in all layers: ``layers x kv_heads x head_dim`` each.

    With autocast keys are float32, because the rotary embedding returns float32, and values
    bfloat16.

    Args:
        shape: shape of the model.
        num_tokens: tokens of all rows together.
        precision: precision of sampling.

    Example:
        >>> cache_bytes(DecoderShape.of(modules.empty_model()), 1, "float32")
        1024
    """
    pair = {"float32": 2 * _FLOAT32, "mixed": _FLOAT32 + _BFLOAT16, "bfloat16": 2 * _BFLOAT16}
    return shape.layers * shape.kv_heads * shape.head_dim * pair[precision] * num_tokens


def activation_bytes(
    shape: DecoderShape,
    num_tokens: int,
    precision: Precision,
    *,
    gradient_checkpointing: bool = False,
    adapter_width: int = 0,
) -> int:
    """Bytes that a forward of the layers keeps for its backward, without the head's logits.

    A layer keeps, per token, with ``d`` the hidden width, ``q`` the width of the queries, ``k`` of
    the keys, and ``f`` the intermediate width: the saved tensors of the two norms, ``4 d`` in
    float32; the inputs of the projections, ``2 d``; queries, keys, values and the result of
    attention, ``2 q + 2 k``; and the feed-forward part, ``4 f``. Autocast keeps an input once for
    each projection, ``5 d``. With gradient checkpointing a layer keeps its input, ``d``.

    Args:
        shape: shape of the model.
        num_tokens: tokens of the forward, including padding.
        precision: precision of training.
        gradient_checkpointing: whether layers are computed again in the backward.
        adapter_width: sum of the ranks of all LoRA adapters; 0 without.

    Example:
        >>> embedded = DecoderShape.of(modules.empty_model())
        >>> activation_bytes(embedded, 1, "float32")
        18484
        >>> activation_bytes(embedded, 1, "float32", gradient_checkpointing=True)
        2052
    """
    size = _FLOAT32 if precision == "float32" else _BFLOAT16
    # A frozen norm keeps only its input; a trained norm also its result, in the type of the
    # weights.
    norm = shape.hidden * _FLOAT32 + _FLOAT32
    if not adapter_width:
        norm += shape.hidden * (_BFLOAT16 if precision == "bfloat16" else _FLOAT32)
    casts = precision == "mixed" or (precision == "bfloat16" and adapter_width)
    inner = (5 if casts else 2) * shape.hidden + 4 * shape.intermediate
    inner += 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    layer = 2 * norm + inner * size + shape.heads * _FLOAT32
    if gradient_checkpointing:
        layer = shape.hidden * (_BFLOAT16 if precision == "bfloat16" else _FLOAT32)
        adapter_width = 0
    return num_tokens * (shape.layers * layer + adapter_width * size + norm)


def working_bytes(
    shape: DecoderShape, num_tokens: int, precision: Precision, *, offloads: bool = False
) -> int:
    """Bytes that the backward of a layer needs in addition to the saved activations.

    The peak is in the backward of the gated product: the gradients of its two factors (its own
    gradient replaces the product), ``2 f``, and the gradient of the hidden states. With activations
    on the CPU, the product and its factors are added, ``5 f``.

    Args:
        shape: shape of the model.
        num_tokens: tokens of the forward, including padding.
        precision: precision of training.
        offloads: whether activations are kept on the CPU.

    Example:
        >>> working_bytes(DecoderShape.of(modules.empty_model()), 1, "float32")
        2560
    """
    size = _FLOAT32 if precision == "float32" else _BFLOAT16
    stream = shape.hidden * (_BFLOAT16 if precision == "bfloat16" else _FLOAT32)
    return num_tokens * ((5 if offloads else 2) * shape.intermediate * size + stream)


Moment = Literal["sample", "head", "first", "last", "host", "disk"]
"""When a part is held: in sampling; at the head of a forward, with the logits; in the backward of
the first layer, or of the last one, with all gradients. ``host``: in CPU memory next to a GPU."""

TRAIN: tuple[Moment, ...] = ("head", "first", "last")
BOTH: tuple[Moment, ...] = ("sample", *TRAIN)


def scoring_bytes(shape: DecoderShape, num_tokens: int, dtype: str) -> int:
    """Peak bytes of a forward without a backward: ``3 f`` and ``4 d``.

    Args:
        shape: shape of the model.
        num_tokens: tokens of the forward, including padding.
        dtype: type of the weights.
    """
    size = _BFLOAT16 if dtype == "bfloat16" else _FLOAT32
    return num_tokens * (3 * shape.intermediate + 4 * shape.hidden) * size


@dataclass(frozen=True)
class MemoryPart:
    """A line of the table.

    Attributes:
        name: name of the part.
        num_bytes: its size; ``None`` if unknown.
        where: the moments at which it is in memory.
        note: basis of the count.
    """

    name: str
    num_bytes: int | None
    where: tuple[Moment, ...]
    note: str


class _Forward(NamedTuple):
    tokens: int
    scored: int  # tokens with logits: only answers
    is_one_of_many: bool  # forwards per update


class _Counts:
    """The models of a configuration, without weight values, and their training data."""

    def __init__(self, config: grpo_config.GRPOGroups, prompt_tokens: int, processes: int) -> None:
        self.config, self.processes = config, processes
        self.is_spread = config.train.parallel == "fsdp2"
        wanted = config.train_model
        with naming("model.name"):
            name, lora = config.model.name, wanted.lora.arguments
            self.model = modules.empty_model(name, dtype=wanted.dtype, lora=lora)
            self.shape = DecoderShape.of(self.model)
        heads = [modules.ValueHead.for_model(self.model)] if config.loss.type == "ppo" else []
        self.learner = nn.ModuleList([self.model, *heads])
        self.trained = trained(self.learner)
        self.bits = config.model.quantization
        self.on_gpu = builders.device_kind(config) != "cpu"
        self.low = builders.samples_in_bfloat16(config)
        self.precision: Precision = "mixed" if self.low else "float32"
        if wanted.dtype == "bfloat16":
            self.precision = "bfloat16"
        context = modules.context_length(name)
        length = prompt_tokens + builders.max_turns(config) * config.inference_model.max_tokens
        self.row_tokens = length if context is None else min(length, context)
        self.prompt_tokens = prompt_tokens

    @property
    def part(self) -> str:
        """Note for a part that is spread over the processes."""
        return f"; a part of {self.processes}, train.parallel=fsdp2" if self.is_spread else ""

    def spread(self, size: int) -> int:
        """Bytes per process of a part with the given size."""
        return ceil_div(size, self.processes) if self.is_spread else size

    @property
    def trained_rows(self) -> int:
        """Conversations per step on which one process trains: whole groups."""
        prompts = self.config.train.prompts_per_batch
        return ceil_div(prompts, self.processes) * self.config.env.repeats

    @property
    def sampled_rows(self) -> int:
        """Conversations per step that this process samples, or all collectors together."""
        is_async = isinstance(self.config, grpo_config.AsyncGRPOConfig)
        return self.config.rows_per_batch if is_async else self.trained_rows

    @property
    def forward(self) -> _Forward:
        """Tokens of one forward in training."""
        train = self.config.train
        size = train.optim_batch_size
        rows = self.trained_rows if size is None else ceil_div(size, self.processes)
        row = min(self.row_tokens, train.max_seq_len or self.row_tokens)
        tokens, answers = rows * row, rows * max(1, row - self.prompt_tokens)
        most = max(train.micro_token_budget or tokens, row)  # no row is cut in two
        # Where prompts are shared, a forward of many may be of answers alone.
        share = 1 if train.packing in ("auto", "shared") else min(1, most / tokens)
        return _Forward(min(tokens, most), min(int(answers * share), most), tokens > most)


def num_processes(config: TrainedConfig) -> int:
    """Processes that train together: the started processes, else one for each local GPU.

    Args:
        config: configuration of a training recipe.

    Example:
        >>> num_processes(grpo_config.GRPOConfig())
        1
    """
    if config.train.parallel == "none":
        return 1
    gpus = torch.cuda.device_count() if builders.device_kind(config) == "cuda" else 1
    return max(int(os.environ.get("WORLD_SIZE", gpus)), 1)


def ceil_div(total: int, number: int) -> int:
    """The largest share if a total is divided as equally as possible.

    Args:
        total: the total.
        number: number of shares.

    Example:
        >>> ceil_div(7, 2)
        4
    """
    return -(-total // number)


def memory_parts(
    config: grpo_config.GRPOGroups, *, prompt_tokens: int, processes: int | None = None
) -> list[MemoryPart]:
    """The memory of a run by parts; with several processes, of one process.

    Args:
        config: configuration of ``grpo`` or ``grpo-async``.
        prompt_tokens: tokens of a prompt; a conversation of several turns has ``max_tokens`` more
            for each.
        processes: number of processes with ``train.parallel``; ``None`` for :func:`num_processes`.

    Raises:
        ConfigError: the model does not exist, or has an unknown shape.

    Example:
        >>> parts = memory_parts(grpo_config.GRPOConfig(), prompt_tokens=64)
        >>> next(part.num_bytes for part in parts if part.name == "gradients")
        1351168
    """
    number = num_processes(config) if processes is None else processes
    counts = _Counts(config, prompt_tokens, number)
    parts = (_weights, _forward, _sampling, _rewards)
    return [*(each for make in parts for each in make(counts)), _checkpoint(counts)]


def peak_bytes(parts: Collection[MemoryPart], where: Literal["train", "sample", "host"]) -> int:
    """The peak memory.

    Args:
        parts: result of :func:`memory_parts`.
        where: in training, in sampling, or in CPU memory next to a GPU.
    """
    moments = TRAIN if where == "train" else (where,)
    held = [[part.num_bytes or 0 for part in parts if each in part.where] for each in moments]
    return max(map(sum, held))


def _held(counts: _Counts) -> tuple[Moment, ...]:
    """If trainer and sampler are one process, its weights are also in memory while it samples."""
    is_async = isinstance(counts.config, grpo_config.AsyncGRPOConfig)
    return TRAIN if is_async else BOTH


def _weights(counts: _Counts) -> Iterable[MemoryPart]:
    config, here = counts.config, _held(counts)
    total = sum(each.numel() for each in counts.model.parameters())
    of_training, part = sum(each.numel() for each in counts.trained), counts.part
    weights, states = weight_bytes(counts.model, counts.bits), _states(counts)
    kind = config.train_model.dtype
    kind = kind if counts.bits is None else f"{counts.bits}, the rest {kind}"
    how = f"{total:,} parameters, {kind}{part}"
    yield MemoryPart("weights", counts.spread(weights), here, how)
    how = f"{of_training:,} parameters are trained{part}"
    # With one forward, its gradients replace its activations one by one.
    when: tuple[Moment, ...] = TRAIN if counts.forward.is_one_of_many else ("last",)
    yield MemoryPart("gradients", counts.spread(tensor_bytes(counts.trained)), when, how)
    states = None if states is None else counts.spread(states)
    if config.optimizer.on_cpu:
        here = ("host",) if counts.on_gpu else here
        size = tensor_bytes(counts.trained) * (2 if counts.on_gpu else 1)
        how = "what is trained" + (", and its gradients" if counts.on_gpu else "")
        yield MemoryPart("copies for the optimizer", size, here, how)
    yield MemoryPart("optimizer states", states, here, f"{config.optimizer.name}{part}")
    if counts.is_spread:
        yield from _whole(counts, weights)
    if config.needs_reference:
        yield from _reference(counts)


def _whole(counts: _Counts, weights: int) -> Iterable[MemoryPart]:
    """Memory of gathered weights, and when it is needed."""
    by_layer, how = counts.config.train.gathers == "layer", "what is in no layer, and two layers"
    here = _held(counts)
    yield MemoryPart("gathered weights", _gathered(counts.model), here if by_layer else TRAIN, how)
    if isinstance(counts.config, grpo_config.AsyncGRPOConfig):
        yield MemoryPart("weights to send", weights, TRAIN, "whole, in the first process")
    elif counts.config.inference_model.backend != "transformers":
        if sync_type(counts.config) != "adapter":
            how = "whole, while the engine gets them"
            yield MemoryPart("weights to send", weights, ("sample",), how)
    elif not by_layer:
        yield MemoryPart("weights that sample", weights, ("sample",), "whole, up to the update")


def _gathered(model: nn.Module) -> int:
    """Bytes that FSDP2 gathers at once: the root, a layer, and the next layer in flight."""
    sizes = sorted(tensor_bytes(layer.parameters()) for layer in blocks_of(model))
    return tensor_bytes(model.parameters()) - sum(sizes) + sum(sizes[-2:])


def _states(counts: _Counts) -> int | None:
    try:
        return optimizer_bytes(counts.learner, counts.config.optimizer.arguments)
    except ConfigError as error:
        if isinstance(error.__cause__, RuntimeError):
            return None
        raise


def _reference(counts: _Counts) -> Iterable[MemoryPart]:
    config = counts.config
    if config.train_model.lora.enabled and config.ref_model.name is None:
        if modules.find_adapter(config.model.name) is None:
            yield MemoryPart("reference model", 0, TRAIN, "the policy with its adapters off")
            return
        size, how = tensor_bytes(trained(counts.model)), "a copy of the adapter on the policy"
        yield MemoryPart("reference model", size, TRAIN, how)
        return
    name = config.ref_model.name or config.model.name
    with naming("ref_model.name"):
        model = modules.empty_model(name, dtype=config.train_model.dtype)
    alone = "on a GPU of its own" if config.ref_model.num_devices else "next to the policy"
    whole = tensor_bytes(model.parameters())
    size, how = counts.spread(whole), f"{alone}{counts.part}"
    yield MemoryPart("reference model", size, _held(counts), how)
    if counts.is_spread:
        whole = _gathered(model) if config.train.gathers == "layer" else whole
        yield MemoryPart("gathered reference", whole, ("sample",), "while it scores")


def _forward(counts: _Counts) -> Iterable[MemoryPart]:
    config, shape, (tokens, scored, _) = counts.config, counts.shape, counts.forward
    wanted = config.train_model
    linear = {n: m for n, m in counts.model.named_modules() if isinstance(m, nn.Linear)}
    packed = [] if counts.bits is None else quantized_weights(counts.model)
    if packed:
        largest = max(packed, key=torch.numel)
        size = tensor_bytes([largest])
        if counts.precision == "mixed":
            size += largest.numel() * _BFLOAT16
        yield MemoryPart("a layer's weight in full", size, _held(counts), "while it multiplies")
    again, cast = wanted.gradient_checkpointing, 0
    offloads = wanted.offload_activations and counts.on_gpu
    if counts.precision == "mixed":
        left_out = set(map(id, packed))
        cast = _BFLOAT16 * sum(
            m.weight.numel()
            for n, m in linear.items()
            if not n.endswith("lm_head") and id(m.weight) not in left_out
        )
    # Only the activations keep the copies of frozen weights.
    if cast and not (wanted.lora.enabled and (again or offloads)):
        when = tuple(each for each in _held(counts) if each in ("sample", "head") or not again)
        if counts.is_spread and config.train.gathers == "layer":  # autocast keeps none
            when = _held(counts) if again else ("head", "first")
            cast = ceil_div(cast, shape.layers) if again else cast
        yield MemoryPart("bfloat16 copies", cast, when, "of weights, by autocast")
    width = sum(m.out_features for n, m in linear.items() if ".lora_A." in n)

    def kept(layers: int, *, again: bool) -> int:
        sizes = shape._replace(layers=layers)
        size = activation_bytes(
            sizes,
            tokens,
            counts.precision,
            gradient_checkpointing=again,
            adapter_width=width * layers // shape.layers,
        )
        if counts.bits == "4bit" and counts.precision == "mixed" and not again:
            # bitsandbytes returns float32: the gated product and its factors.
            size += 3 * (_FLOAT32 - _BFLOAT16) * layers * shape.intermediate * tokens
        return size

    how = f"a forward of {tokens:,} tokens; {show_bytes(kept(shape.layers, again=not again))} "
    how += f"{'without' if again else 'with'} gradient_checkpointing"
    size = kept(shape.layers, again=again)
    if offloads:
        yield MemoryPart("activations on the CPU", size + cast, ("host",), how)
    else:
        yield MemoryPart("activations", size, ("head", "first"), how)
    size = working_bytes(shape, tokens, counts.precision, offloads=offloads)
    if again:
        size += kept(1, again=False) - kept(0, again=False)  # the backward of the last norm is over
    how = "its backward" + (", and its activations again" if again else "")
    yield MemoryPart("a layer at work", size, ("first", "last"), how)
    size = logits_bytes(
        scored,
        shape.vocabulary,
        chunk_size=wanted.logprob_chunk_size,
        kind=builders.device_kind(config),
    )
    how = f"{show_bytes(scored * shape.vocabulary * _FLOAT32)} would be all of the forward"
    yield MemoryPart("logits, a chunk", size, ("head",), how)
    head = counts.model.get_output_embeddings().weight
    if head.requires_grad:
        how = "before it is added"
        yield MemoryPart("gradient of the head", tensor_bytes([head]), ("head", "first"), how)


def _sampling(counts: _Counts) -> Iterable[MemoryPart]:
    config = counts.config
    backend = config.inference_model.backend
    asleep = getattr(config.inference_model, "sleep", False)
    # A separate process uses no memory of the trainer; an engine keeps all memory until it sleeps.
    alone = isinstance(config, grpo_config.AsyncGRPOConfig)
    held: tuple[Moment, ...] = ("sample",) if asleep or alone else BOTH
    size, dtype, how = 0, counts.precision, "the trained weights themselves"
    if counts.is_spread:
        how = "gathered from all processes"
    if alone:
        number = config.ray.num_collectors
        size, how = number * _model_bytes(counts, backend), f"a copy in each of {number} collectors"
    elif backend != "transformers":
        sync = sync_type(config)
        if sync == "shared":
            how += ", in the engine" + (", whose cache alone sleeps" if asleep else "")
        else:
            size, how = _model_bytes(counts, backend), f"a copy, weight_sync.type={sync}"
            how += ", asleep in training" if asleep else ""
    if backend == "vllm":
        dtype = "bfloat16" if _engine_dtype(counts) == "bfloat16" else "float32"
    yield MemoryPart("weights of the sampler", size, held, how)
    rows = counts.sampled_rows
    how = f"{rows:,} conversations of {counts.row_tokens:,} tokens"
    if backend == "vllm":
        how += "; vLLM takes gpu_memory_utilization of its GPU, whatever is needed"
        how += ", and not in training" if asleep else ""
    size = cache_bytes(counts.shape, rows * counts.row_tokens, dtype)
    yield MemoryPart("cache of sampling", size, held if backend == "vllm" else ("sample",), how)


def _engine_dtype(counts: _Counts) -> str:
    config = counts.config
    if isinstance(config, grpo_config.AsyncGRPOConfig):
        return "bfloat16" if counts.low else config.train_model.dtype
    return engine_arguments(config, sync_type(config))["dtype"]


def _model_bytes(counts: _Counts, backend: str) -> int:
    """Bytes of a model with merged adapters, in the type of sampling."""
    dtype = _engine_dtype(counts) if backend == "vllm" else counts.config.train_model.dtype
    return weight_bytes(modules.empty_model(counts.config.model.name, dtype=dtype), counts.bits)


def _rewards(counts: _Counts) -> Iterable[MemoryPart]:
    """Reward models, next to the environments: in this process, or in each collector."""
    config = counts.config
    when, copies = BOTH, 1
    if isinstance(config, grpo_config.AsyncGRPOConfig):
        when, copies = ("sample",), config.ray.num_collectors
    for name, scorer in known_scorers(config.reward.components).items():
        key = f"reward.components.{name}"
        if isinstance(scorer, rewards.ModelReward):
            model = empty_reward_model(scorer.name, dtype=scorer.dtype)
            apart = counts.on_gpu and scorer.device == "cpu"
            held = when if not apart else ("host",)
            row = min(counts.row_tokens, scorer.max_seq_len or counts.row_tokens)
            tokens = min(scorer.token_budget, counts.sampled_rows * row)
            shape, size = DecoderShape.of(model), tensor_bytes(model.parameters())
            yield MemoryPart(key, copies * size, held, f"weights, {scorer.dtype}")
            size = copies * scoring_bytes(shape, tokens, scorer.dtype)
            held = ("host",) if apart else ("sample",)
            yield MemoryPart(f"{key}, at work", size, held, f"{tokens:,} tokens at a time")
        elif isinstance(scorer, rewards.JudgeReward):
            grader = scorer.grader
            if isinstance(grader, rewards.WrapperTextModel):
                size = copies * tensor_bytes(grader.wrapper.parameters())
                yield MemoryPart(key, size, when, "weights of the judge")
            elif not isinstance(grader, rewards.EndpointTextModel):
                yield MemoryPart(key, None, when, "whatever it loads")


def _checkpoint(counts: _Counts) -> MemoryPart:
    """Checkpoint: the model for other programs and for a resume, adapters twice, the optimizer."""
    config, states = counts.config, _states(counts)
    size = 0
    if counts.bits is None:
        plain = modules.empty_model(config.model.name, dtype=config.train_model.dtype)
        size = tensor_bytes(plain.parameters())
    if config.train_model.lora.enabled:  # once for PEFT, and once exactly
        size += 2 * tensor_bytes(trained(counts.model))
    kept = config.checkpoint.keep_last
    how = f"each; checkpoint.keep_last={kept} and the one that is being written"
    return MemoryPart("checkpoint", None if states is None else size + states, ("disk",), how)


def show_bytes(num_bytes: int | None) -> str:
    """A number of bytes with three figures.

    Args:
        num_bytes: number of bytes; ``None`` if unknown.

    Example:
        >>> show_bytes(18_484), show_bytes(1_353_216), show_bytes(None)
        ('18.1 KiB', '1.29 MiB', 'unknown')
    """
    if num_bytes is None:
        return "unknown"
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    figures = str(num_bytes) if units[0] == "B" else f"{size:#.3g}".rstrip(".")
    return f"{figures} {units[0]}"
