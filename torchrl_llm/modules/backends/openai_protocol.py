"""Requests to ``/v1/completions`` of an OpenAI-compatible server with token ids, and its answers.

The functions are pure and convert between tensors and JSON; :func:`model_card` reads the server's
list of models. Requests use fields of OpenAI and of vLLM (``return_token_ids``, ``stop_token_ids``,
``prompt_logprobs``, ...). The answer shows whether a server ignored them.

Shape legend: ``T`` tokens of a row, ``R`` sampled tokens, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_llm._http import HTTPClient
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.scoring import Support
from torchrl_llm.errors import BackendError, ConfigError, DataError
from torchrl_llm.modules.backends.backend_port import Completion, SamplingParams

NATIVE_ARGUMENTS = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "logit_bias",
        "min_tokens",
        "presence_penalty",
        "repetition_detection",
        "response_format",
        "structured_outputs",
        "thinking_token_budget",
        "vllm_xargs",
    }
)
"""Sampling fields of ``/v1/completions`` that vLLM's server supports."""

# Every field is sent, because a server reads missing fields from the model's generation config.
_NEUTRAL = {
    "n": 1,
    "stream": False,
    "echo": False,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_tokens": 0,
    "add_special_tokens": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "return_token_ids": True,
    # Ends of a response are sent as ids, so that client and server agree.
    "ignore_eos": True,
}
_ID = "token_id:"
# JSON has no infinity; a server writes -9999 for the log of 0.
_IMPOSSIBLE = -9000.0


def completion_body(
    model: str,
    prompt: Tensor,
    params: SamplingParams,
    *,
    max_tokens: int,
    seed: int,
    end_ids: Sequence[int],
) -> dict[str, Any]:
    """Return the request for one response to one prompt.

    Args:
        model: name of the model at the server.
        prompt: int64 ``[T]``.
        params: how to sample; ``num_samples`` and ``seed`` are ignored.
        max_tokens: most tokens of the response.
        seed: seed of this response's own generator, in ``[0, 2**63)``.
        end_ids: ids that end the response.
    """
    body = {
        **_NEUTRAL,
        "model": model,
        "prompt": prompt.tolist(),
        "max_tokens": max_tokens,
        "temperature": float(params.temperature),
        "repetition_penalty": float(params.repetition_penalty),
        "stop": list(params.stop),
        "stop_token_ids": list(end_ids),
        "logprobs": 0,
    }
    if not params.greedy:
        body |= {"top_p": float(params.top_p), "min_p": float(params.min_p), "seed": seed}
        body["top_k"] = params.top_k
    if params.keeps_ids:
        # The ids that top-k keeps are among the k most probable; otherwise all ids are needed.
        body |= {"logprobs": params.top_k or -1, "return_tokens_as_token_ids": True}
    return {**body, **params.native}


def scoring_body(
    model: str, ids: Tensor, *, whole_vocabulary: bool, fills_context: bool
) -> dict[str, Any]:
    """Return the request that scores a row.

    A server samples at least one token. If the row leaves no room for it, the request omits the
    last token and asks for its log-prob at the sampled position.

    Args:
        model: name of the model at the server.
        ids: int64 ``[T]``.
        whole_vocabulary: whether to request the log-probs of all ids at each position.
        fills_context: whether the row leaves no room for a further token.
    """
    body = {**_NEUTRAL, "model": model, "prompt": ids.tolist(), "max_tokens": 1}
    body["prompt_logprobs"] = -1 if whole_vocabulary else 0
    if fills_context:
        body["prompt"] = ids[:-1].tolist()
        body |= {"logprobs": -1 if whole_vocabulary else 1, "return_tokens_as_token_ids": True}
        if not whole_vocabulary:
            body["logprob_token_ids"] = [int(ids[-1])]
    return body


def only_choice(data: Any, prompt: Sequence[int]) -> tuple[dict[str, Any], bool]:
    """Return the requested response, and whether it answers the ids that were sent.

    Args:
        data: the server's answer.
        prompt: the ids that were sent.

    Raises:
        BackendError: an answer with a different format.
        ConfigError: a server that returns no token ids.
    """
    try:
        [choice] = data["choices"]
        known = choice.get("prompt_token_ids"), choice.get("token_ids")
    except (TypeError, KeyError, ValueError, AttributeError):
        raise BackendError(
            f"the server's answer is not one completion: {str(data)[:200]}"
        ) from None
    if None in known:
        raise ConfigError(
            "the server returned no token ids, so training on its answers would need to "
            "encode them again; it must support return_token_ids (vLLM 0.10.2 and newer)"
        )
    return choice, list(known[0]) == list(prompt)


def read_completion(
    choice: dict[str, Any], params: SamplingParams, *, max_tokens: int, end_ids: Sequence[int]
) -> Completion:
    """Convert a response to a completion.

    Args:
        choice: see :func:`only_choice`.
        params: parameters of the request.
        max_tokens: as sent.
        end_ids: as sent.

    Raises:
        BackendError: inconsistent ids and log-probs, or an end that was not requested.
        DataError: not all kept ids were returned.
    """
    ids, given = choice["token_ids"], choice.get("logprobs") or {}
    log_probs = given.get("token_logprobs") or []
    if len(ids) != len(log_probs) or len(ids) > max_tokens:
        raise BackendError(
            f"the server returned {len(ids)} ids and {len(log_probs)} log-probs, but the request "
            f"allows at most {max_tokens} tokens with one log-prob each"
        )
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in log_probs):
        raise BackendError("the server returned log-probs that are not finite numbers")
    support = None
    if params.record_support:
        support = _support(choice) if params.keeps_ids else Support.whole(len(ids))
    return Completion(
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(log_probs, dtype=torch.float32),
        _reason(choice, ids, params, max_tokens, end_ids),
        support,
    )


def _support(choice: dict[str, Any]) -> Support:
    """Return the kept ids of each token: those with a probability above 0."""
    kept: list[int] = []
    counts: list[int] = []
    for entry in _named(choice):
        left = {token: value for token, value in entry.items() if value > _IMPOSSIBLE}
        mass = sum(math.exp(value) for value in left.values())
        if abs(mass - 1) > 1e-3:
            raise DataError(
                f"the {len(left)} kept ids that the server returned have {mass:.4f} of the "
                "probability; there were more, or the log-probs are not of the sampled "
                "distribution: start it with --max-logprobs -1 --logprobs-mode processed_logprobs"
            )
        kept += sorted(left)
        counts.append(len(left))
    return Support(torch.tensor(kept, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32))


def _reason(
    choice: dict[str, Any],
    ids: list[int],
    params: SamplingParams,
    max_tokens: int,
    end_ids: Sequence[int],
) -> FinishReason:
    said, by = choice.get("finish_reason"), choice.get("stop_reason")
    if said == "abort":
        return FinishReason.ABORT
    by_text = said == "stop" and by in params.stop
    by_repetition = said == "repetition" and "repetition_detection" in params.native
    if set(ids[-1:]) & set(end_ids) or by_text or by_repetition:
        return FinishReason.STOP
    if said == "length" and len(ids) == max_tokens:
        return FinishReason.LENGTH
    raise BackendError(
        f"a response of {len(ids)} of at most {max_tokens} tokens ended with {said!r} (by {by!r}), "
        "which was not requested; start the server with --generation-config vllm, so that "
        "it adds no stop conditions"
    )


def read_prompt_scores(choice: dict[str, Any], prompt: Tensor) -> Tensor:
    """Return the log-probs of a prompt's own tokens.

    Args:
        choice: see :func:`only_choice`.
        prompt: int64 ``[T]``, as sent.

    Returns:
        float32 ``[T]`` in nats, index 0 is 0.0.

    Raises:
        BackendError: the answer does not contain the log-probs.
    """
    entries = _entries(choice, len(prompt))
    own = [
        entry[str(token)]["logprob"]
        for entry, token in zip(entries, prompt[1:].tolist(), strict=True)
    ]
    return torch.tensor([0.0, *own], dtype=torch.float32)


def read_prompt_distributions(choice: dict[str, Any], length: int, vocab_size: int) -> Tensor:
    """Return the log-probs of the whole vocabulary at each position of a prompt.

    Args:
        choice: see :func:`only_choice`.
        length: ``T``, number of tokens of the prompt.
        vocab_size: number of required ids.

    Returns:
        float32 ``[T - 1, V]`` in nats, ``V`` at least ``vocab_size``; row ``t`` predicts token
        ``t + 1``.

    Raises:
        BackendError: the answer does not contain the log-probs.
        ConfigError: the server returns fewer log-probs.
    """
    rows = [
        _dense({int(key): item["logprob"] for key, item in entry.items()}, vocab_size)
        for entry in _entries(choice, length)
    ]
    return torch.stack(rows) if rows else torch.zeros(0, vocab_size)


def read_last_scores(choice: dict[str, Any]) -> dict[int, float]:
    """Return the log-probs that the server reported for the one sampled token.

    Args:
        choice: see :func:`only_choice`; from a request that filled the context.

    Returns:
        Id to log-prob in nats.

    Raises:
        BackendError: the answer does not contain the log-probs.
    """
    entries = _named(choice)
    if len(entries) != 1:
        raise BackendError(f"one token was requested, but the server sampled {len(entries)}")
    return entries[0]


def last_distribution(choice: dict[str, Any], vocab_size: int) -> Tensor:
    """Return log-probs of the whole vocabulary for the one sampled token, float32 ``[V]``.

    Raises:
        BackendError: the answer does not contain the log-probs.
        ConfigError: the server returns fewer log-probs.
    """
    return _dense(read_last_scores(choice), vocab_size)


def _named(choice: dict[str, Any]) -> list[dict[int, float]]:
    """Return the log-probs that the server reported for each sampled token, by id."""
    try:
        return [
            {int(key.removeprefix(_ID)): value for key, value in entry.items()}
            for entry in choice["logprobs"]["top_logprobs"]
        ]
    except (TypeError, KeyError, ValueError, AttributeError):
        raise BackendError("the server did not return log-probs by token id") from None


def _entries(choice: dict[str, Any], length: int) -> list[dict[str, Any]]:
    entries = choice.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != length or None in entries[1:]:
        raise BackendError(
            "the server returned no prompt_logprobs, so it cannot score tokens; score "
            "with the trained model, or use a vLLM server"
        )
    return entries[1:]


def _dense(values: dict[int, float], vocab_size: int) -> Tensor:
    if len(values) < vocab_size:
        raise ConfigError(
            f"the server returned log-probs of {len(values)} of {vocab_size} ids; "
            "a temperature other than 1, entropy and kept ids need all of them: start it with "
            "--max-logprobs -1, and check vocab_size"
        )
    # Embedding rows without a token also count in the normalisation.
    row = [-math.inf] * (max(values) + 1)
    for token, value in values.items():
        row[token] = value
    return torch.tensor(row)


def model_card(http: HTTPClient, model: str | None, timeout_s: float) -> dict[str, Any]:
    """Return the entry of a model in the server's list; wait until the server answers.

    Args:
        http: the server.
        model: its name on the server; ``None`` for the only model.
        timeout_s: most seconds to wait.

    Raises:
        ConfigError: the model or the list of models does not exist.
        WorkerError: the server cannot be reached.
    """
    reply = http.call("GET", "/v1/models", timeout_s=timeout_s, max_retries=10**6)
    http.check(reply, "/v1/models")
    try:
        cards = {card["id"]: card for card in reply.data["data"]}
    except (TypeError, KeyError):
        raise ConfigError(
            f"{http.url} lists no models; it answered {str(reply.data)[:200]}"
        ) from None
    if model is None and len(cards) == 1:
        [model] = cards
    if model not in cards:
        wanted = "model= must name one" if model is None else f"{model!r} is not one"
        raise ConfigError(f"{http.url} serves the models {sorted(cards)}; {wanted} of them")
    return cards[model]
