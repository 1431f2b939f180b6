"""Engine that answers prompts with a policy of this process.

While the model samples, further prompts wait; prompts with equal sampling settings are then sampled
together. A backend outside this process takes many calls at once and batches them itself.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from torchrl._utils import logger

from torchrl_llm.data.record import respond_records
from torchrl_llm.gateway.calls import RefusedCallError
from torchrl_llm.gateway.session import Engine, EngineLimits, Pending
from torchrl_llm.modules import LLMWrapperBase
from torchrl_llm.modules.backends.backend_port import SamplingParams
from torchrl_llm.modules.backends.local_backend import LocalBackend
from torchrl_llm.modules.policies.row_sampling import alike, own_params

_THREADS = 64


def limits_of(policy: LLMWrapperBase, *, trains: bool = False) -> EngineLimits:
    """Limits of calls to a policy.

    Args:
        policy: a policy in history mode.
        trains: whether answers are used for training.
    """
    params = policy.sampling_defaults
    return EngineLimits(
        longest_prompt=policy.longest_prompt,
        max_new_tokens=params.max_new_tokens,
        vocab_size=policy.backend.vocab_size,
        keeps_support=params.record_support,
        trains=trains,
    )


class PolicyEngine(Engine):
    """Samples with a policy's backend, in separate threads.

    Args:
        policy: in history mode; its generation arguments are the defaults of calls.
        max_batch: maximum number of prompts of one call of the model.
        max_waiting: maximum number of waiting prompts; further prompts are rejected as ``"busy"``.
        patience_s: maximum number of seconds between two prompts of one batch. If several prompts
            came the last time, a model of this process waits for further prompts while they arrive
            within this time.

    Example:
        >>> from torchrl_llm.modules import FakeWrapper, load_tokenizer
        >>> with PolicyEngine(FakeWrapper("Yes.", tokenizer=load_tokenizer())) as engine:
        ...     engine.limits.max_new_tokens
        256
    """

    def __init__(
        self,
        policy: LLMWrapperBase,
        *,
        max_batch: int = 256,
        max_waiting: int = 4096,
        patience_s: float = 0.02,
    ) -> None:
        self.policy, self.limits = policy, limits_of(policy)
        self._params = policy.sampling_defaults
        self._max_batch, self._max_waiting = max_batch, max_waiting
        self._patience_s, self._last = patience_s, 1
        self._changed = threading.Condition()
        self._waiting: deque[Pending] = deque()
        self._closed = False
        is_local = isinstance(policy.backend, LocalBackend)
        self._alone = not is_local
        self._threads = [
            threading.Thread(target=self._work, name="gateway-policy", daemon=True)
            for _ in range(1 if is_local else _THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, pending: Pending) -> None:
        """See :meth:`Engine.submit`."""
        with self._changed:
            if self._closed:
                raise RefusedCallError("the server is closing", kind="busy")
            if len(self._waiting) >= self._max_waiting:
                raise RefusedCallError(
                    f"{self._max_waiting} requests are waiting; try again later", kind="busy"
                )
            self._waiting.append(pending)
            self._changed.notify()

    def withdraw(self, pending: Pending) -> None:
        """See :meth:`Engine.withdraw`; sampling in progress ends after a few steps.

        If the backend does not support this, the answer is sampled to its end.
        """
        with self._changed:
            if pending in self._waiting:
                self._waiting.remove(pending)

    def close(self) -> None:
        """Finish the prompts in progress, and reject the others."""
        with self._changed:
            self._closed = True
            waiting, self._waiting = list(self._waiting), deque()
            self._changed.notify_all()
        for pending in waiting:
            pending.resolve(RefusedCallError("the server is closing", kind="busy"))
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> PolicyEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- threads ----------------------------------------------------------------------------------

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            params = [own_params(self._params, dict(each.sampling)) for each in batch]
            for own, places in alike(range(len(batch)), params):
                self._sample([batch[place] for place in places], own)

    def _next(self) -> list[Pending] | None:
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            if self._alone:
                return [self._waiting.popleft()]
            seen = 0
            while self._last > 1 and seen < len(self._waiting) < self._max_batch:
                seen = len(self._waiting)
                self._changed.wait(self._patience_s)
            count = self._last = min(len(self._waiting), self._max_batch)
            return [self._waiting.popleft() for _ in range(count)]

    def _sample(self, batch: list[Pending], params: SamplingParams) -> None:
        prompts = [pending.chat.record for pending in batch]
        try:
            found = self.policy.backend.generate_cancellable(
                [each.token_ids for each in prompts],
                params,
                [pending.answered.cancelled for pending in batch],
            )
            completions = [completion for [completion] in found]
            outcomes: list[Any] = respond_records(prompts, completions, self.policy.policy_version)
        except Exception as error:  # waiting callers get the error of a failed backend call
            logger.error(f"the gateway's model call failed: {type(error).__name__}: {error}")
            outcomes = [RefusedCallError(f"the model call failed: {error}", kind="server")] * len(
                batch
            )
        for pending, outcome in zip(batch, outcomes, strict=True):
            pending.resolve(outcome)
