"""Arguments of policies: of every constructor, and of generation."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal
from warnings import warn

import torch
from tensordict.utils import NestedKey

from torchrl_llm._checked import Ge, check, checked
from torchrl_llm._registry import did_you_mean
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.backend_port import Backend, SamplingParams
from torchrl_llm.modules.policies.context_limit import OnOverlong

DEFAULT_MAX_NEW_TOKENS = 256
"""Length of a response when ``max_new_tokens`` is not given."""

InputMode = Literal["history", "text", "tokens"]
_NAMES = json.loads(Path(__file__).with_name("argument_names.json").read_text(encoding="utf-8"))
# Arguments of a single mode, and their values without effect.
_OF_A_MODE: dict[str, tuple[str, Any]] = _NAMES["of_a_mode"]
# Arguments that TorchRL accepts in every mode, so that one dictionary works for all modes.
_TAKEN_IN_EVERY_MODE = {"tokenizer_kwargs", "chat_template_name", "chat_template"}
# Arguments of TorchRL's wrappers for generate() of transformers or for vLLM; they have no effect.
_WITHOUT_EFFECT: dict[str, str] = _NAMES["without_effect"]
# Tokenizer settings of TorchRL's wrappers that always apply.
_TOKENIZER_NEUTRAL: dict[str, Any] = _NAMES["tokenizer_neutral"]
# The sampling arguments are the fields of SamplingParams, two of them under different names.
_COMMON = {field.name for field in fields(SamplingParams)} - {"stop", "native"}
_COMMON |= {"stop_sequences", "num_return_sequences", "do_sample", "skip_special_tokens"}
_COMMON |= {"logprobs", *_NAMES["beams"]}
COMMON_NAMES = {*_COMMON}
"""Names of generation arguments that every backend accepts."""


@checked
@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Arguments that every policy accepts in addition to its model and tokenizer.

    This class is their only list. Constructors accept them by name; ``take_options`` adds them to
    the signatures of the constructors.

    Args:
        input_mode: content of the rows: ``"history"``, ``"text"`` or ``"tokens"``.
        input_key: key of the rows, by default ``(input_mode, "prompt")``, or ``(input_mode,
            "full")`` to score.
        attention_mask_key: key of the mask of padded token prompts; read in tokens mode if it
            exists.
        generate: sample, or score existing text.
        generate_kwargs: see :func:`parse_generate_kwargs`; each call may override them.
        tokenizer_kwargs: arguments of the tokenizer's call on text (text mode); by default no
            special token is added. The arguments that TorchRL sets itself (``return_tensors="pt"``,
            ``return_attention_mask=True``, ``padding=True``, ``padding_side="left"``) are accepted
            and have no effect: ids are not padded before the model.
        pad_output: write dense columns. As in TorchRL, ``full`` has prompts padded on the left to
            ``P`` tokens and responses padded on the right, so that ``full[:, P:]`` is the response.
            Buffers of ragged rows, joined turns and training steps remove the padding again.
        inplace: ``True`` writes into the input (the default without ``num_samples``), ``"empty"``
            into an empty tensordict of the same kind, ``False`` into a new one.
        layout: ``None`` or ``torch.strided``. Jagged rows are not supported, because they cannot be
            indexed.
        num_samples: responses per prompt; the output gets a second dimension, ``[B, n]``.
        chat_template_name: name of a registered chat template.
        chat_template: a Jinja template; the tokenizer's own by default.
        template_kwargs: variables of the template, such as ``enable_thinking``.
        tools: tools of every conversation.
        on_rewrite: what happens if the template rewrites history, see
            :class:`~torchrl_llm.data.text.ChatFormatter`.
        return_log_probs: whether to write the sampled log-probs; true by default.
        history_key: name of the conversations.
        text_key: name of the text columns.
        tokens_key: name of the token columns.
        masks_key: name of the masks.
        log_probs_key: name of the log-probs.
        trace_key: name of the provenance columns.
        support_key: name of the ids that truncated sampling kept; they are written with
            ``generate_kwargs={"record_support": True}``.
        batching: run requests of several threads together; by default on if a size is given.
        min_batch_size: prompts to wait for.
        max_batch_size: most prompts of one call of the model.
        batching_timeout: seconds after which a request runs with the requests that have arrived.
        prefer_tokens: use known ids (a chat's record, or a ``tokens.prompt`` that decodes to the
            text) instead of encoding again. ``False`` always encodes.
        on_overlong: what happens to prompts that leave no room in the context: ``"error"``,
            ``"drop"`` (an empty, aborted response) or ``"truncate"`` (from the left).
            ``overlong_counts`` counts them.
        max_prompt_length: most tokens of a prompt; ``None`` if only the context limits it.
        policy_version: version of the weights, written into the trace of every sampled token.

    Raises:
        ConfigError: a value is impossible or would have no effect.
    """

    input_mode: InputMode = "history"
    input_key: NestedKey | None = None
    attention_mask_key: NestedKey = "attention_mask"
    generate: bool = True
    generate_kwargs: Mapping[str, Any] | None = None
    tokenizer_kwargs: Mapping[str, Any] | None = None
    pad_output: bool = False
    inplace: bool | Literal["empty"] | None = None
    layout: torch.layout | None = None
    num_samples: int | None = None
    chat_template_name: str | None = None
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] | None = None
    tools: Sequence[Any] | None = None
    on_rewrite: Literal["fork", "keep", "error"] = "fork"
    return_log_probs: bool | None = None
    history_key: str = "history"
    text_key: str = "text"
    tokens_key: str = "tokens"
    masks_key: str = "masks"
    log_probs_key: str = "log_probs"
    trace_key: str = "trace"
    support_key: str = "support"
    batching: bool | None = None
    min_batch_size: int | None = None
    max_batch_size: int | None = None
    batching_timeout: float = 10.0
    prefer_tokens: bool = True
    on_overlong: OnOverlong = "error"
    max_prompt_length: Annotated[int, Ge(1)] | None = None
    policy_version: int = 0

    def __post_init__(self) -> None:
        if self.tokenizer_kwargs is not None:
            kept = {
                name: value
                for name, value in self.tokenizer_kwargs.items()
                if name not in _TOKENIZER_NEUTRAL or value != _TOKENIZER_NEUTRAL[name]
            }
            object.__setattr__(self, "tokenizer_kwargs", kept or None)
        check_mode(self.input_mode, self.layout, vars(self))

    def changed(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return a policy's arguments with some changes, without arguments that lose their effect.

        Args:
            changes: names and values.
        """
        dropped = set()
        if changes.get("generate") is False:
            dropped |= {"generate_kwargs", "num_samples", "return_log_probs"}
        if changes.get("input_mode", "history") != "history":
            dropped |= {name for name, (mode, _) in _OF_A_MODE.items() if mode == "history"}
        kept = {name: value for name, value in vars(self).items() if name not in dropped}
        return {**kept, **changes}


def take_options(constructor: Callable[..., None]) -> Callable[..., None]:
    """Let a policy's constructor with ``**options`` accept the arguments listed above by name.

    The arguments are added to the signature of the constructor, which ``inspect``, notebook help
    and the reference pages read. An unknown name raises a ``TypeError`` with the nearest known
    name, before a model is loaded or an engine starts.

    Args:
        constructor: an ``__init__``; it is not changed if it has no ``**options``.
    """
    shown = inspect.signature(constructor)
    own = [p for p in shown.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if len(own) == len(shown.parameters):
        return constructor
    common = [
        inspect.Parameter(f.name, own[0].KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in fields(PolicyOptions)
        if f.name not in shown.parameters
    ]
    whole = shown.replace(parameters=[*own, *common])

    @wraps(constructor)
    def construct(self: Any, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in whole.parameters:
                hint = _hint(name, whole.parameters)
                raise TypeError(f"{type(self).__name__}() has no argument {name!r}{hint}")
        constructor(self, *args, **given)

    construct.__signature__ = whole
    return construct


def check_mode(input_mode: str, layout: torch.layout | None, settings: Mapping[str, Any]) -> None:
    """Check a policy's input mode; raise or warn for arguments that it would not use.

    Args:
        input_mode: mode of the policy.
        layout: argument of the constructor.
        settings: arguments by name.

    Raises:
        ConfigError: for an unknown mode, a layout that is not offered, or the first argument
            without effect.
    """
    if layout not in (None, torch.strided):
        raise ConfigError(
            f"layout must be None or torch.strided, got {layout}: rows are ragged lists or padded; "
            "jagged tensors can be neither indexed nor stacked"
        )
    for name, (mode, neutral) in _OF_A_MODE.items():
        if settings.get(name, neutral) == neutral or input_mode == mode:
            continue
        without = f"{name} has no effect with input_mode={input_mode!r}"
        if name not in _TAKEN_IN_EVERY_MODE:
            raise ConfigError(without)
        warn(without, stacklevel=2)


@dataclass(frozen=True)
class GenerationArguments:
    """Generation arguments, checked.

    Args:
        params: how to sample; ``num_samples`` is 1 unless it was given.
        skip_special_tokens: whether to leave special tokens out of the text columns.
        log_probs: whether the log-probs are written; ``None`` if the arguments do not set it.
        num_samples: as given; ``None`` if it was not given.
    """

    params: SamplingParams
    skip_special_tokens: bool
    log_probs: bool | None
    num_samples: int | None


def common_names(kwargs: Mapping[str, Any], backend: Backend) -> dict[str, Any]:
    """Return generation arguments under the common names, without those that have no effect.

    Args:
        kwargs: see :func:`parse_generate_kwargs`.
        backend: see :func:`parse_generate_kwargs`.

    Raises:
        ConfigError: an argument has two values, or end ids of the model are missing.

    Example:
        >>> from torchrl_llm.modules.backends import FakeBackend
        >>> common_names({"max_tokens": 8}, FakeBackend(vocab_size=8, eos_token_ids=(2,)))
        {'max_new_tokens': 8}
    """
    given = dict(kwargs)
    for old, new in _NAMES["legacy"].items():
        if old in given and given[old] != given.setdefault(new, given[old]):
            raise ConfigError(
                f"{old}={given[old]} contradicts {new}={given[new]}; they mean the same, give one"
            )
        given.pop(old, None)
    ends = given.pop("eos_token_id", None)
    if ends is not None:
        ends = {ends} if isinstance(ends, int) else set(ends)
        if lost := set(backend.eos_token_ids) - ends:
            raise ConfigError(
                f"eos_token_id={sorted(ends)} leaves out {sorted(lost)}, which end a response of "
                "this model; add further ends with stop_token_ids; ignore_eos=True removes all ends"
            )
        given["stop_token_ids"] = tuple(sorted(ends.union(given.get("stop_token_ids") or ())))
    for name in sorted(_WITHOUT_EFFECT.keys() & given.keys() - backend.native_arguments):
        warn(f"generate_kwargs: {name} has no effect, {_WITHOUT_EFFECT[name]}", stacklevel=2)
        del given[name]
    return given


def parse_generate_kwargs(kwargs: Mapping[str, Any], backend: Backend) -> GenerationArguments:
    """Check generation arguments and make them explicit.

    Common to all backends: ``max_new_tokens``, ``num_samples`` (``num_return_sequences``),
    ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``, ``do_sample``,
    ``stop_sequences``, ``stop_token_ids``, ``seed``, ``ignore_eos``, ``record_support``,
    ``skip_special_tokens``, ``logprobs``; further names are those of ``backend.native_arguments``.
    ``max_tokens`` and ``n``, vLLM's names, mean ``max_new_tokens`` and ``num_return_sequences``, as
    in TorchRL; ``eos_token_id`` means ``stop_token_ids`` and must include the model's own ids.
    TorchRL's names without effect in torchrl_llm are dropped with a warning.

    Args:
        kwargs: names and values; ``None`` means "not given", as everywhere in transformers.
        backend: provides the further names.

    Raises:
        ConfigError: for an unknown name (with the nearest known one), an old name (with the new
            one), beam search, or values that contradict each other.

    Example:
        >>> from torchrl_llm.modules.backends import FakeBackend
        >>> fake = FakeBackend(vocab_size=8, eos_token_ids=(2,))
        >>> parse_generate_kwargs({"do_sample": False}, fake).params.greedy
        True
    """
    given = common_names(kwargs, backend)
    _check_names(given, backend)
    given = {name: value for name, value in given.items() if value is not None}
    for name, neutral in _NAMES["beams"].items():
        if given.pop(name, neutral) != neutral:
            raise ConfigError(
                f"{name} belongs to beam search, which is not sampling: its results have no "
                "log-prob that a loss could use; remove it"
            )
    num_samples = given.pop("num_samples", None)
    same = given.pop("num_return_sequences", num_samples)
    if num_samples not in (None, same):
        raise ConfigError(
            f"num_samples={num_samples} contradicts num_return_sequences={same}; they mean the same"
        )
    stop = given.pop("stop_sequences", ())
    log_probs = given.pop("logprobs", None)
    skip_special_tokens = bool(given.pop("skip_special_tokens", False))
    params = SamplingParams(
        max_new_tokens=given.pop("max_new_tokens", DEFAULT_MAX_NEW_TOKENS),
        temperature=_temperature(given.pop("do_sample", None), given.pop("temperature", None)),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(given.pop("stop_token_ids", ())),
        num_samples=1 if same is None else same,
        native={name: given.pop(name) for name in list(given) if name not in _COMMON},
        **given,
    )
    if params.record_support and not backend.records_support:
        raise ConfigError(
            f"{type(backend).__name__} cannot tell which ids it kept, so record_support is out of "
            "reach; sample with top_p=1, top_k=0, min_p=0"
        )
    return GenerationArguments(
        params, skip_special_tokens, None if log_probs is None else bool(log_probs), same
    )


def settle_generation(
    kwargs: Mapping[str, Any],
    backend: Backend,
    generate: bool,
    num_samples: int | None,
    return_log_probs: bool | None,
) -> GenerationArguments:
    """Return a policy's generation arguments, including those that its constructor takes by name.

    Args:
        kwargs: see :func:`parse_generate_kwargs`.
        backend: see :func:`parse_generate_kwargs`.
        generate: whether the policy samples. If not, the arguments are checked but have no effect,
            so that a sampling and a scoring policy can share one dictionary.
        num_samples: argument of the constructor.
        return_log_probs: argument of the constructor.

    Raises:
        ConfigError: an argument has two values or no effect.
    """
    if not generate and return_log_probs is False:
        raise ConfigError(
            "return_log_probs=False has no effect with generate=False, which writes log-probs and "
            "nothing else; leave it out"
        )
    arguments = parse_generate_kwargs(kwargs, backend)
    samples = _agree("num_samples", num_samples, arguments.num_samples)
    check("num_samples", samples, Annotated[int, Ge(1)] | None)
    if not generate:
        scoring = SamplingParams(max_new_tokens=DEFAULT_MAX_NEW_TOKENS)
        return GenerationArguments(scoring, False, True, samples)
    log_probs = _agree("return_log_probs (logprobs)", return_log_probs, arguments.log_probs)
    return replace(
        arguments,
        params=replace(arguments.params, num_samples=samples or 1),
        num_samples=samples,
        log_probs=True if log_probs is None else log_probs,
    )


def override_generation(
    kwargs: Mapping[str, Any], backend: Backend, own: GenerationArguments
) -> GenerationArguments:
    """Return the generation arguments of one call.

    Args:
        kwargs: arguments of the constructor, overridden by arguments of the call.
        backend: see :func:`parse_generate_kwargs`.
        own: the policy's arguments from construction.

    Raises:
        ConfigError: an argument would change the form of the output, which is fixed at
            construction.
    """
    arguments = settle_generation(kwargs, backend, True, own.num_samples, own.log_probs)
    for name, now, before in (
        ("num_samples", arguments.num_samples, own.num_samples),
        ("skip_special_tokens", arguments.skip_special_tokens, own.skip_special_tokens),
        ("record_support", arguments.params.record_support, own.params.record_support),
    ):
        if now != before:
            raise ConfigError(
                f"{name} shapes the output and is fixed at construction; use get_new_version(...)"
            )
    return arguments


def _agree(name: str, first: Any, second: Any) -> Any:
    if first is not None and second is not None and first != second:
        raise ConfigError(
            f"{name}={first} and generate_kwargs, which say {second}, contradict each other; "
            "what shapes the output is fixed at construction"
        )
    return second if first is None else first


def _check_names(given: Iterable[str], backend: Backend) -> None:
    known = {*_COMMON, *backend.native_arguments}
    for name in given:
        if name in known:
            continue
        if other := _NAMES["renamed"].get(name):
            raise ConfigError(f"generation argument {name!r} is renamed to {other!r}")
        raise ConfigError(f"unknown generation argument {name!r}{_hint(name, known)}")


def _hint(name: str, known: Iterable[str]) -> str:
    return did_you_mean(name, known) or f"; known are {sorted(known)}"


def _temperature(do_sample: bool | None, temperature: float | None) -> float:
    if do_sample is False:
        if temperature:
            raise ConfigError(
                f"do_sample=False decodes greedily, which temperature={temperature} contradicts; "
                "pass temperature=0 or leave it out"
            )
        return 0.0
    if do_sample and temperature == 0:
        raise ConfigError("do_sample=True samples, which temperature=0 contradicts")
    return 1.0 if temperature is None else float(temperature)
