"""Backend for a server with OpenAI's protocol, given by its URL.

Requests and answers contain token ids. A server that encodes prompts again or returns only text is
rejected. The backend is made for vLLM's own server. :doc:`/howto/use_a_server` shows how to start
one.

:mod:`~torchrl_llm.modules.backends.openai_protocol` implements requests and answers,
:mod:`~torchrl_llm.modules.backends.server` weight updates.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm._http import Cancellation, HTTPClient, RequestThreads, server_root
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.logit_scores import only_support, score_logits
from torchrl_llm.data.scoring import ScoreExtras, Support, TokenScores
from torchrl_llm.errors import BackendError, ConfigError, OverlongError, WorkerError
from torchrl_llm.modules.backends import openai_protocol as protocol
from torchrl_llm.modules.backends.backend_port import Backend, Completion, SamplingParams
from torchrl_llm.modules.backends.server import InFlight, VLLMServer
from torchrl_llm.weights.weight_source import WeightReceipt, WeightSource

_COOLEST = 0.01


class OpenAIBackend(Backend):
    """Samples and scores with a server, one request per response.

    The backend draws the seed of each response from torch's generator. So a run can be repeated,
    and a request that is retried after a broken connection returns the same response. Single
    prompts cannot be cancelled: :meth:`generate_cancellable` is the same as :meth:`generate`.

    Args:
        url: ``http://host:port``, with or without ``/v1``.
        model: name of the model on the server; by default its only model.
        tokenizer: defines ``vocab_size`` and ``eos_token_ids`` if they are omitted.
        vocab_size: number of ids of the model.
        eos_token_ids: ids that end a response.
        max_length: context in tokens; the server's context by default.
        api_key: sent as a bearer token.
        timeout_s: most seconds for one request.
        start_timeout_s: seconds to wait for the server to start.
        max_retries: most retries of a rejected or interrupted request.
        concurrency: most requests at the same time, of all threads together.
        on_failure: action after the last retry failed: ``"raise"``
            :class:`~torchrl_llm.errors.WorkerError`, or return an empty response with ``"abort"``.
        on_other_prompt: action if the ids that the server read differ from the sent ids:
            ``"raise"`` or ``"warn"``.
        in_flight: what happens to running requests when weights are updated, see
            :class:`~torchrl_llm.modules.backends.server.VLLMServer`.
        exchange_dir: folder shared by client and server, for sending weights; without one, the
            requests contain the weights.

    Attributes:
        server: vLLM's control plane.
        version: version of the last weights sent by this backend; ``None`` before.

    Raises:
        ConfigError: for a wrong address or model, or unknown ``vocab_size`` and ``eos_token_ids``.
        WorkerError: the server cannot be reached.
    """

    native_arguments = protocol.NATIVE_ARGUMENTS
    records_support = True
    begins_to_count = True
    vocab_size: int = 0
    max_length: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @checked
    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        tokenizer: Any = None,
        vocab_size: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        max_length: int | None = None,
        api_key: str | None = None,
        timeout_s: Annotated[float, Gt(0)] = 600.0,
        start_timeout_s: float = 30.0,
        max_retries: int = 4,
        concurrency: Annotated[int, Ge(1)] = 64,
        on_failure: Literal["raise", "abort"] = "raise",
        on_other_prompt: Literal["raise", "warn"] = "raise",
        in_flight: InFlight = "wait",
        exchange_dir: str | None = None,
    ) -> None:
        if tokenizer is None and (vocab_size is None or eos_token_ids is None):
            raise ConfigError("without a tokenizer pass vocab_size= and eos_token_ids=")
        self.tokenizer = tokenizer
        self.version: int | None = None
        self.vocab_size = len(tokenizer) if vocab_size is None else vocab_size
        ends = [tokenizer.eos_token_id] if eos_token_ids is None else eos_token_ids
        self.eos_token_ids = tuple(ends)
        if None in self.eos_token_ids:
            raise ConfigError("the tokenizer has no eos token; pass eos_token_ids=")
        self._timeout_s = timeout_s
        self._on_failure, self._on_other_prompt = on_failure, on_other_prompt
        self._http = HTTPClient(server_root(url), api_key=api_key, max_retries=max_retries)
        self.server = VLLMServer(
            self._http, timeout_s=timeout_s, in_flight=in_flight, exchange_dir=exchange_dir
        )
        card = protocol.model_card(self._http, model, start_timeout_s)
        self.model_name = card["id"]
        limits = [n for n in (card.get("max_model_len"), max_length) if n is not None]
        self.max_length = min(limits, default=None)
        # Whether the log-probs belong to the sampled distribution; checked on the server when
        # needed.
        self._processed: bool | None = None
        self._threads = RequestThreads(concurrency)

    def close(self) -> None:
        """Close connections and stop threads; the next call opens them again."""
        self._threads.close()
        self._http.close()

    @property
    def num_retries(self) -> int:
        """Number of retries so far."""
        return self._http.num_retries

    # -- sampling ---------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Tensor], params: SamplingParams) -> list[list[Completion]]:
        """See :meth:`Backend.generate`.

        Raises:
            ConfigError: the server does not return the requested fields.
            BackendError: the server rejects a request or returns an invalid answer.
            WorkerError: the server did not answer, with ``on_failure="raise"``.
        """
        self.check_prompts(prompts)
        if not prompts:
            return []
        if 0 < params.temperature < _COOLEST:
            raise ConfigError(
                f"vLLM raises temperatures to {_COOLEST}, got {params.temperature}; 0 is greedy"
            )
        if not params.greedy and (
            params.temperature != 1 or params.truncates_support or params.keeps_ids
        ):
            self._check_processed()
        rows = [prompt for prompt in prompts for _ in range(params.num_samples)]
        generator = None
        if params.seed is not None:
            generator = torch.Generator().manual_seed(params.seed)
        seeds = torch.randint(2**63 - 1, (len(rows),), generator=generator).tolist()
        ends = set(() if params.ignore_eos else self.eos_token_ids)
        ends = sorted(ends.union(params.stop_token_ids))
        jobs = [
            partial(self._complete, prompt, params, seed, ends)
            for prompt, seed in zip(rows, seeds, strict=True)
        ]
        flat = self._threads.run(jobs)
        size = params.num_samples
        return [flat[start : start + size] for start in range(0, len(flat), size)]

    def _complete(
        self,
        prompt: Tensor,
        params: SamplingParams,
        seed: int,
        ends: list[int],
        cancellation: Cancellation,
    ) -> Completion:
        room = params.max_new_tokens
        if self.max_length is not None:
            room = min(room, self.max_length - len(prompt))
        body = protocol.completion_body(
            self.model_name, prompt, params, max_tokens=room, seed=seed, end_ids=ends
        )
        # The version is read before the request, so the weights are at least as new, even during an
        # update.
        version = self.version
        try:
            choice = self._choice(body, cancellation)
        except WorkerError:
            if self._on_failure == "raise":
                raise
            none = torch.zeros(0, dtype=torch.int64)
            support = Support.whole(0) if params.record_support else None
            return Completion(none, torch.zeros(0), FinishReason.ABORT, support)
        found = protocol.read_completion(choice, params, max_tokens=room, end_ids=ends)
        largest = max(found.token_ids.tolist(), default=0)
        if largest >= self.vocab_size:
            raise BackendError(
                f"the server sampled the id {largest}, but vocab_size is {self.vocab_size}; pass "
                "the number of rows of the model's embedding"
            )
        penalized = params.repetition_penalty != 1 or params.native
        if params.greedy and penalized and found.token_ids.numel():
            # Penalties affected the choice of the token; the log-probs are those of the model
            # itself.
            whole = self._score_plain(torch.cat([prompt, found.token_ids]), cancellation)
            found = found._replace(log_probs=whole[len(prompt) :])
        if version is not None:
            versions = torch.full(found.token_ids.shape, version, dtype=torch.int32)
            found = found._replace(versions=versions)
        return found

    def _check_processed(self) -> None:
        """Reject a server whose log-probs belong to a different distribution than its samples."""
        if self._processed is None:
            params = SamplingParams(max_new_tokens=1, native={"allowed_token_ids": [0]})
            body = self._one_token(torch.tensor([0]), params)
            [choice] = self._threads.run([partial(self._choice, body)])
            found = protocol.read_completion(choice, params, max_tokens=1, end_ids=())
            # Only one id was allowed, so its probability was 1.
            self._processed = float(found.log_probs) > -1e-4
        if not self._processed:
            raise ConfigError(
                "the server returns log-probs before temperature, top-k and top-p, so the ratio of "
                "an unchanged policy would not be 1; start it with --logprobs-mode "
                "processed_logprobs, or sample at temperature 1 from the whole vocabulary"
            )

    # -- scoring ----------------------------------------------------------------------------------

    def token_scores(
        self,
        sequences: Sequence[Tensor],
        select: Sequence[Tensor],
        *,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
        extras: ScoreExtras | None = None,
    ) -> TokenScores:
        """See :meth:`TokenScorer.token_scores`; without gradients; the only extra is the support.

        A temperature other than 1, entropy and support need the log-probs of the whole vocabulary.
        A server returns them only with ``--max-logprobs -1``, and slowly.
        """
        extras = only_support(extras, "a server returns log-probs alone", has_logits=False)
        self.check_scoring(sequences, select)
        self._check_lengths(sequences)
        if not isinstance(temperature, Tensor):
            temperature = torch.full((len(sequences),), float(temperature))
        rows = zip(sequences, select, temperature.tolist(), extras.of_rows(select), strict=True)
        jobs = [
            partial(self._score, ids, mask, heat, entropy, own)
            for ids, mask, heat, own in rows
            if bool(mask.any())
        ]
        return TokenScores.join(self._threads.run(jobs), entropy=entropy)

    def _check_lengths(self, sequences: Sequence[Tensor]) -> None:
        for row, ids in enumerate(sequences):
            if self.max_length is not None and len(ids) > self.max_length:
                raise OverlongError(
                    f"row {row} has {len(ids)} tokens and the model's context holds "
                    f"{self.max_length}"
                )

    def _score(
        self,
        ids: Tensor,
        mask: Tensor,
        temperature: float,
        entropy: bool,
        extras: ScoreExtras,
        cancellation: Cancellation,
    ) -> TokenScores:
        at = mask.nonzero().squeeze(-1)
        ids = ids[: int(at[-1]) + 1]
        if temperature == 1 and not entropy and extras.support is None:
            return TokenScores(self._score_plain(ids, cancellation)[at])
        logits_NV = self._distributions(ids, cancellation)[at - 1]
        return score_logits(
            logits_NV, ids[at], temperature=temperature, entropy=entropy, extras=extras
        )

    def _score_plain(self, ids: Tensor, cancellation: Cancellation) -> Tensor:
        """Return the log-probs of all tokens of a row, ``[T]``; index 0 is 0.0."""
        choice, full = self._scored(ids, cancellation, whole_vocabulary=False)
        if not full:
            return protocol.read_prompt_scores(choice, ids)
        last = protocol.read_last_scores(choice)[int(ids[-1])]
        return torch.cat([protocol.read_prompt_scores(choice, ids[:-1]), torch.tensor([last])])

    def _distributions(self, ids: Tensor, cancellation: Cancellation) -> Tensor:
        """Return log-probs of all ids after each token but the last, ``[T - 1, V]``."""
        choice, full = self._scored(ids, cancellation, whole_vocabulary=True)
        rows = protocol.read_prompt_distributions(choice, len(ids) - full, self.vocab_size)
        if full:
            last = protocol.last_distribution(choice, self.vocab_size)
            rows = torch.cat([rows.reshape(-1, len(last)), last[None]])
        return rows

    def _scored(
        self, ids: Tensor, cancellation: Cancellation, *, whole_vocabulary: bool
    ) -> tuple[dict[str, Any], bool]:
        """Return the server's answer for a row, and whether the row fills the context."""
        full = len(ids) == self.max_length
        body = protocol.scoring_body(
            self.model_name, ids, whole_vocabulary=whole_vocabulary, fills_context=full
        )
        return self._choice(body, cancellation), full

    def logits(self, sequences: Sequence[Tensor]) -> Tensor:
        """See :meth:`Backend.logits`: log-probs, which are logits up to a constant of each token.

        They are 0 after a token that fills the context, because the server computes no logits
        there.
        """
        self.check_ids(sequences)
        self._check_lengths(sequences)
        rows = self._threads.run([partial(self._logits, ids) for ids in sequences])
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def _logits(self, ids: Tensor, cancellation: Cancellation) -> Tensor:
        rows = self._distributions(ids, cancellation)
        after = torch.zeros(self.vocab_size)
        if len(ids) != self.max_length:
            body = self._one_token(ids, SamplingParams(max_new_tokens=1, temperature=0))
            body |= {"logprobs": -1, "return_tokens_as_token_ids": True}
            after = protocol.last_distribution(self._choice(body, cancellation), self.vocab_size)
        return torch.cat([rows.reshape(-1, len(after)), after[None]])

    def _one_token(self, ids: Tensor, params: SamplingParams) -> dict[str, Any]:
        return protocol.completion_body(
            self.model_name, ids, params, max_tokens=1, seed=0, end_ids=()
        )

    # -- weights ----------------------------------------------------------------------------------

    def update_weights(self, source: WeightSource, *, version: int) -> list[WeightReceipt]:
        """See :meth:`Backend.update_weights`; needs a vLLM server started for it."""
        receipts = self.server.update_weights(source, version=version)
        self.version, self.counts_versions = version, True
        return receipts

    # -- requests ---------------------------------------------------------------------------------

    def _choice(self, body: dict[str, Any], cancellation: Cancellation) -> dict[str, Any]:
        reply = self._http.call(
            "POST", "/v1/completions", body, timeout_s=self._timeout_s, cancellation=cancellation
        )
        self._http.check(reply, "/v1/completions")
        choice, same = protocol.only_choice(reply.data, body["prompt"])
        if not same:
            problem = (
                f"the server read {len(choice['prompt_token_ids'])} ids where {len(body['prompt'])}"
                " were sent, or different ids: it encodes prompts again, so its samples do not "
                "continue the trainer's prompts"
            )
            if self._on_other_prompt == "raise":
                raise BackendError(problem)
            warnings.warn(problem, stacklevel=2)
        return choice
