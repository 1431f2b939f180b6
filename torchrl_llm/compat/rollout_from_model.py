"""Roll-outs of a Hugging Face model, one token a step: :class:`RolloutFromModel`.

The classical form of RLHF (arXiv:2203.02155): a reward model scores the finished answer, a
reference model makes drifting away expensive, token by token. It needs no environment and no
wrapper, and holds the whole prefix at every step: ``[B, N, L + N]`` ids. Conversations with turns,
tools or long answers belong into a :class:`torchrl_llm.envs.ChatEnv`.

Shape legend: ``B`` rows, ``L`` tokens of a prompt's row, ``N = max_new_tokens``, ``V`` vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import GenerationConfig

from torchrl_llm.compat.prompt_data import PromptData
from torchrl_llm.data.kl_controllers import KLController
from torchrl_llm.data.ragged import pad_rows
from torchrl_llm.errors import ConfigError, DataError, RewardError
from torchrl_llm.functional import selective_log_softmax


class Generated(NamedTuple):
    """Answers of a model.

    Attributes:
        token_ids: int64 ``[B, L + N]``, prompt and answer, padded on the right.
        log_probs: float32 ``[B, N, 1]``, nats, of each answered token under the model; 0.0 behind
            the answer's end.
        log_ratio: float32 ``[B, N]``, nats, log-probs less those under the reference model; 0.0
            behind the answer's end.
    """

    token_ids: Tensor
    log_probs: Tensor
    log_ratio: Tensor


class RolloutFromModel:
    r"""Lets a model answer prompts and scores the answers.

    The reward of a token is :math:`-\beta (\log \pi(x_t) - \log \pi_\mathrm{ref}(x_t))`; the last
    token of an answer gets the reward model's score besides, less its score of the row's label,
    clipped. An answer ends with its first end-of-sequence token, which is a token like others, or
    after ``max_new_tokens``. Masks come from lengths, never from comparing ids with a padding id.

    Sampling is plain (temperature 1, no truncation) whatever the model's ``generation_config``
    says, and both models run without dropout.

    Args:
        model: a Hugging Face causal model.
        ref_model: the same before training; it may be on another device.
        reward_model: called with ``input_ids`` and ``attention_mask``; returns a score a row
            (``[B]`` or ``[B, 1]``), an object with ``logits``, or a pair of scores a token and
            scores a row.
        kl_coef: :math:`\beta`; a ``kl_scheduler`` brings its own.
        max_new_tokens: most tokens of an answer.
        score_clip: limit of the score, on both sides.
        kl_scheduler: moves :math:`\beta` at each :meth:`step_scheduler`.
        num_steps: the scheduler sees the divergences of so many roll-outs at most, the last ones.
        eos_token_id: ends an answer; the model's if not given.
        pad_token_id: fills rows; the model's, else ``eos_token_id``, if not given.

    Raises:
        ConfigError: when the model names no end of sequence, or for impossible numbers.
        RewardError: at a score that is not one number per row.

    Example:
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from torchrl_llm.assets import embedded_model_path
        >>> from torchrl_llm.data import PromptTensorDictTokenizer
        >>> model = AutoModelForCausalLM.from_pretrained(embedded_model_path())
        >>> tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
        >>> process = PromptTensorDictTokenizer(tokenizer, max_length=8)
        >>> data = process({"prompt": ["1+2=", "3="], "label": ["3", "3"]}).exclude("valid_sample")
        >>> def score(input_ids, attention_mask):
        ...     return attention_mask.sum(1).float()
        >>> rollout = RolloutFromModel(model, model, score, max_new_tokens=4)
        >>> td = rollout.rollout_from_data(PromptData(**data, batch_size=[2]))
        >>> td["next", "reward"].shape, td["next", "done"].sum(1).flatten().tolist()
        (torch.Size([2, 4, 1]), [1, 1])
    """

    def __init__(
        self,
        model: Any,
        ref_model: Any,
        reward_model: Callable[..., Any],
        kl_coef: float = 0.1,
        max_new_tokens: int = 50,
        score_clip: float = 10.0,
        kl_scheduler: KLController | None = None,
        num_steps: int | None = None,
        *,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
    ) -> None:
        if max_new_tokens < 1 or score_clip <= 0 or kl_coef < 0:
            raise ConfigError(
                "max_new_tokens must be at least 1, score_clip above 0 and kl_coef not negative, "
                f"got {max_new_tokens}, {score_clip} and {kl_coef}"
            )
        if num_steps is not None and num_steps < 1:
            raise ConfigError(f"num_steps must be at least 1, got {num_steps}")
        self.model = model
        self.ref_model = ref_model
        self.reward_model = reward_model
        self.kl_coef = kl_coef if kl_scheduler is None else kl_scheduler.coef
        self.max_new_tokens = max_new_tokens
        self.score_clip = score_clip
        self.kl_scheduler = kl_scheduler
        self._divergences: deque[list[float]] = deque(maxlen=num_steps)
        ends = _ids(eos_token_id if eos_token_id is not None else _configured(model, "eos"))
        if not ends:
            raise ConfigError("the model names no end of sequence: pass eos_token_id=...")
        self.eos_token_ids = ends
        pads = _ids(pad_token_id if pad_token_id is not None else _configured(model, "pad"))
        self.pad_token_id = (pads or ends)[0]

    # -- sampling ---------------------------------------------------------------------------------

    @torch.no_grad()
    def rollout_from_data(self, batch: PromptData) -> TensorDict:
        """Answer a batch of prompts; see :meth:`create_rollout_td` for what is returned."""
        return self.create_rollout_td(batch, *self.generate(batch))

    @torch.no_grad()
    def generate(
        self, batch: PromptData, generation_config: GenerationConfig | None = None
    ) -> Generated:
        """Answer a batch of prompts.

        Args:
            batch: ``[B]``; its labels are not read.
            generation_config: how to sample instead. Log-probs remain those of the model itself,
                at temperature 1.

        Raises:
            DataError: for a row without a prompt.
            ConfigError: when ``generation_config`` cuts answers short.
        """
        lengths = self._prompt_lengths(batch)
        prompts = [ids[:size] for ids, size in zip(batch.input_ids, lengths.tolist(), strict=True)]
        ones = [torch.ones_like(ids) for ids in prompts]
        config = self._plain_sampling if generation_config is None else generation_config
        with _evaluating(self.model):
            sampled = self.model.generate(
                input_ids=pad_rows(prompts, self.pad_token_id, side="left"),
                attention_mask=pad_rows(ones, 0, side="left"),
                generation_config=config,
            )
        sampled = getattr(sampled, "sequences", sampled)[:, int(lengths.max()) :]
        answers = sampled[:, : self.max_new_tokens]
        sizes = self._answer_lengths(answers)
        if answers.shape[1] < self.max_new_tokens and bool((sizes > answers.shape[1]).any()):
            raise ConfigError(
                f"generation_config ended an answer after {answers.shape[1]} tokens without an end "
                f"of sequence; let it go on to max_new_tokens={self.max_new_tokens}"
            )
        token_ids = batch.input_ids.new_full(
            (len(prompts), batch.input_ids.shape[1] + self.max_new_tokens), self.pad_token_id
        )
        for row, (prompt, answer, size) in enumerate(
            zip(prompts, answers, sizes.tolist(), strict=True)
        ):
            token_ids[row, : len(prompt) + size] = torch.cat([prompt, answer[:size]])
        inside_BN = self._steps(token_ids) < sizes.unsqueeze(1)
        log_probs_BN = self._log_probs(self.model, token_ids, lengths, sizes)
        ref_BN = self._log_probs(self.ref_model, token_ids, lengths, sizes)
        log_probs_BN, ref_BN = (x.masked_fill(~inside_BN, 0.0) for x in (log_probs_BN, ref_BN))
        return Generated(token_ids, log_probs_BN.unsqueeze(-1), log_probs_BN - ref_BN)

    @property
    def _plain_sampling(self) -> GenerationConfig:
        # Every field that shapes the distribution: what is left out, the model's own fills in.
        return GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            typical_p=1.0,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            num_beams=1,
            num_return_sequences=1,
            max_new_tokens=self.max_new_tokens,
            eos_token_id=list(self.eos_token_ids),
            pad_token_id=self.pad_token_id,
        )

    def _prompt_lengths(self, batch: PromptData) -> Tensor:
        if batch.input_ids.ndim != 2:
            raise DataError(f"input_ids must be [B, L], got {tuple(batch.input_ids.shape)}")
        lengths = batch.prompt_rindex + 1
        if bool((lengths < 1).any()):
            row = int((lengths < 1).nonzero()[0])
            raise DataError(f"row {row} has no prompt (prompt_rindex {batch.prompt_rindex[row]})")
        return lengths

    def _answer_lengths(self, answers: Tensor) -> Tensor:
        """Tokens up to the first end of sequence, which counts; the most without one."""
        ended = torch.isin(answers, torch.tensor(self.eos_token_ids, device=answers.device))
        first = ended.int().argmax(1) + 1
        return torch.where(ended.any(1), first, self.max_new_tokens)

    def _steps(self, like: Tensor) -> Tensor:
        return torch.arange(self.max_new_tokens, device=like.device).unsqueeze(0)

    def _places(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        """Index of each answered token, ``[B, N]``."""
        places = lengths.unsqueeze(1) + self._steps(token_ids)
        return places.clamp(max=token_ids.shape[1] - 1)

    def _log_probs(self, model: Any, token_ids: Tensor, lengths: Tensor, sizes: Tensor) -> Tensor:
        whole = lengths + sizes
        longest = int(whole.max())
        device = getattr(model, "device", token_ids.device)
        ids = token_ids[:, :longest].to(device)
        places = torch.arange(longest, device=ids.device)
        mask = (places < whole.to(ids.device).unsqueeze(1)).to(torch.int64)
        with _evaluating(model):
            logits_BTV = model(input_ids=ids, attention_mask=mask).logits
        target = self._places(token_ids, lengths).to(ids.device).clamp(max=longest - 1)
        before = (target - 1).unsqueeze(-1).expand(-1, -1, logits_BTV.shape[-1])
        logits_BNV = logits_BTV.gather(1, before).float()
        return selective_log_softmax(logits_BNV, ids.gather(1, target)).to(token_ids.device)

    # -- the roll-out -----------------------------------------------------------------------------

    @torch.no_grad()
    def create_rollout_td(
        self, batch: PromptData, generated: Tensor, log_probs: Tensor, log_ratio: Tensor
    ) -> TensorDict:
        """The answers as an environment of one token a step would have given them.

        Args:
            batch: the prompts, with labels.
            generated: ``token_ids`` of :class:`Generated`.
            log_probs: of the same.
            log_ratio: of the same.

        Returns:
            ``[B, N]``: ``action`` and ``sample_log_prob`` ``[B, N, 1]``; ``input_ids`` and
            ``attention_mask`` ``[B, N, L + N]``, the prefix before the token and, under ``next``,
            behind it; ``("next", "reward")``, ``reward_raw`` (the score) and ``reward_kl``,
            ``done``, ``terminated`` (by an end of sequence) and ``truncated``, ``[B, N, 1]``.
            ``mask`` ``[B, N]`` is true up to the end of the answer; behind it there are no rewards.
        """
        lengths = self._prompt_lengths(batch)
        places_BN = self._places(generated, lengths)
        action_BN = generated.gather(1, places_BN)
        sizes = self._answer_lengths(action_BN)
        mask_BN = self._steps(generated) < sizes.unsqueeze(1)
        done_BN = self._steps(generated) == (sizes - 1).unsqueeze(1)
        ends = torch.tensor(self.eos_token_ids, device=generated.device)
        terminated_BN = done_BN & torch.isin(action_BN, ends)
        held = lengths.unsqueeze(1) + torch.arange(self.max_new_tokens + 1, device=generated.device)
        held = torch.minimum(held, (lengths + sizes).unsqueeze(1)).unsqueeze(-1)
        inside = torch.arange(generated.shape[1], device=generated.device) < held
        prefixes = torch.where(inside, generated.unsqueeze(1), self.pad_token_id)
        scores = self._scores(prefixes[:, -1], inside[:, -1].to(torch.int64))
        scores = scores - self._scores(batch.input_ids, batch.attention_mask)
        scores = scores.clamp(-self.score_clip, self.score_clip).to(log_ratio)
        raw_BN = torch.where(done_BN, scores.unsqueeze(1), 0.0)
        kl_BN = -self.kl_coef * log_ratio.masked_fill(~mask_BN, 0.0)
        self._divergences.append((log_ratio * mask_BN).sum(1).tolist())
        flags = {
            "done": done_BN,
            "terminated": terminated_BN,
            "truncated": done_BN & ~terminated_BN,
        }
        rewards = {"reward": raw_BN + kl_BN, "reward_raw": raw_BN, "reward_kl": kl_BN}
        after = {name: value.unsqueeze(-1) for name, value in {**flags, **rewards}.items()}
        after |= {"input_ids": prefixes[:, 1:].clone(), "attention_mask": inside[:, 1:].clone()}
        return TensorDict(
            {
                "action": action_BN.masked_fill(~mask_BN, self.pad_token_id),
                "input_ids": prefixes[:, :-1].clone(),
                "attention_mask": inside[:, :-1].clone(),
                "sample_log_prob": log_probs,
                "mask": mask_BN,
                "next": TensorDict(after, batch_size=mask_BN.shape),
            },
            batch_size=mask_BN.shape,
            device=generated.device,
            names=[None, "time"],
        )

    def _scores(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        device = getattr(self.reward_model, "device", input_ids.device)
        with _evaluating(self.reward_model):
            out = self.reward_model(
                input_ids=input_ids.to(device), attention_mask=attention_mask.to(device)
            )
        scores = out if isinstance(out, Tensor) else getattr(out, "logits", None)
        if scores is None and isinstance(out, tuple) and len(out) == 2:
            scores = out[1]
        if not isinstance(scores, Tensor) or scores.numel() != len(input_ids):
            got = tuple(scores.shape) if isinstance(scores, Tensor) else type(out).__name__
            raise RewardError(
                f"a reward model gives one score a row, [{len(input_ids)}], got {got}"
            )
        return scores.reshape(-1).to(input_ids.device)

    @staticmethod
    def logprobs_of_labels(logits: Tensor, labels: Tensor) -> Tensor:
        """Log-probs of labels ``[B, T]`` under logits ``[B, T, V]``, nats."""
        return selective_log_softmax(logits, labels)

    def step_scheduler(self) -> float:
        """Move the coefficient by the divergences since the last call, nats an answer.

        Returns:
            The coefficient from now on.

        Raises:
            ConfigError: without a ``kl_scheduler``.
        """
        if self.kl_scheduler is None:
            raise ConfigError("there is no kl_scheduler to step")
        seen = [value for values in self._divergences for value in values]
        self._divergences.clear()
        self.kl_coef = self.kl_scheduler.update(seen)
        return self.kl_coef


def _configured(model: Any, kind: str) -> Any:
    configs = (getattr(model, "generation_config", None), getattr(model, "config", None))
    found = (getattr(config, f"{kind}_token_id", None) for config in configs)
    return next((value for value in found if value is not None), None)


def _ids(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)


@contextmanager
def _evaluating(model: Any) -> Any:
    """Dropout off for the time of a call."""
    training = isinstance(model, nn.Module) and model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()
