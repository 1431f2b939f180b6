r"""Divergence from a reference: tokens, means, and the term in the reward.

The objective of arXiv:1909.08593 (equation 2) is the reward less :math:`\beta` times the divergence
from a reference, :math:`R(x, y) = r(x, y) - \beta \log \frac{\pi(y|x)}{\rho(y|x)}`. A subclass of
:class:`KLTransform` provides the log-probs under :math:`\pi` and :math:`\rho`.

Shape legend: ``B`` rows, ``T_b`` tokens of row ``b``, ``R_b`` tokens of its response.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Composite

from torchrl_llm._checked import checked
from torchrl_llm._ray import RayService, check_service
from torchrl_llm._registry import FullSignature
from torchrl_llm.data.kl_controllers import ConstantKLController, KLController
from torchrl_llm.data.replay_buffers.trajectory_queues import as_path, task_path
from torchrl_llm.data.row_transform import Path, RowTransform, RowView
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.data.specs import RaggedSpec
from torchrl_llm.envs.transforms.retrieve_scores import RetrieveLogProb, tell_padding_side
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.functional.kl import KL_ESTIMATORS, KLEstimator

KLReduction = Literal["sum", "mean", "token"]


class Sources(NamedTuple):
    """Log-probs of the tokens of each row.

    Attributes:
        gen: ``B`` float32 tensors ``[T_b]`` under the policy that sampled, nats.
        ref: the same under the reference.
        columns: further columns to write.
    """

    gen: list[Tensor]
    ref: list[Tensor]
    columns: dict[Path, list[Tensor]]


class KLTransform(RowTransform):
    r"""Base of the transforms that measure, and penalise, the divergence from a reference.

    Only tokens that the policy sampled in the row's turn count, so every token of a conversation is
    penalised once; prompts, templates and tools never count. In a recorded conversation, which has
    no ``("tokens", "response")``, every scored token counts (only the assistant's, if the rows have
    a mask of these), and without a reward the divergence is only measured. Written under ``("next",
    kl_key)``: ``"full"``, the estimate of each token, float32 ``[T_b]`` in nats, 0.0 if a token
    does not count; ``"sum"`` and ``"mean"`` over the tokens that count, and ``"coeff"``, the
    coefficient of the penalty, float32 ``[1]``.

    Append it after the transform that writes the reward: to an environment, or to a replay buffer
    after its credit assigner, which then sees the penalised reward. The task's own reward stays
    next to it, ``("next", "reward_before_kl")``, ``[1, 1]``: filters of groups read it, and it
    decides whether a group has zero variance.

    Args:
        coeff: :math:`\beta`: a number, or a controller that follows the divergence of the rows (its
            target has the unit of ``reduction``: nats per response or per token). Its state is part
            of the transform's state.
        add_to_reward: whether to penalise the reward; otherwise the divergence is only measured.
        reduction: divergence that is subtracted from a reward ``[1, 1]``: the ``"sum"`` over
            tokens, which is the divergence of the whole response; or the ``"mean"``, which does not
            grow with length. ``"token"`` (in a replay buffer only) makes rewards per token ``[R,
            1]``: the last token has the response's reward, and each token's own divergence is
            subtracted. Rewards that are already per token stay per token.
        estimator: ``"k1"``, the log-ratio, whose expectation is the divergence and whose use as a
            reward has the gradient of the divergence; ``"k2"`` or ``"k3"``, never negative, biased
            as rewards (see :mod:`torchrl_llm.functional.kl`).
        reward_key: the reward, under ``"next"``.
        penalised_key: key of the penalised reward; ``reward_key`` by default.
        kl_key: name of the node of the divergences.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect.
    """

    @checked
    def __init__(
        self,
        *,
        coeff: float | KLController = 1.0,
        add_to_reward: bool = True,
        reduction: KLReduction = "sum",
        estimator: KLEstimator = "k1",
        reward_key: NestedKey = ("next", "reward"),
        penalised_key: NestedKey | None = None,
        kl_key: str = "kl_penalty",
    ) -> None:
        super().__init__()
        if not isinstance(kl_key, str):
            raise ConfigError(f"kl_key names a node under 'next' and is a string, got {kl_key!r}")
        if not add_to_reward and isinstance(coeff, KLController):
            raise ConfigError("a KL controller has no effect with add_to_reward=False")
        controller = coeff
        if not isinstance(coeff, KLController):
            controller = ConstantKLController(kl_coef=coeff)
        self.controller: KLController = controller
        self.add_to_reward, self.reduction, self.estimator = add_to_reward, reduction, estimator
        self.reward_key = as_path(reward_key)
        self.penalised_key = self.reward_key if penalised_key is None else as_path(penalised_key)
        for key in (self.reward_key, self.penalised_key):
            if len(key) != 2 or key[0] != "next":
                raise ConfigError(f"a reward is at ('next', name), got {key!r}")
        self.kl_key = kl_key
        self.out_keys = [kl_key, self.penalised_key[1]] if add_to_reward else [kl_key]

    @abstractmethod
    def sources(self, rows: RowView) -> Sources:
        """Log-probs under the policy that sampled and under the reference.

        Args:
            rows: the ``B`` rows.
        """

    @property
    def coeff(self) -> float:
        """The current coefficient."""
        return self.controller.coef

    @property
    def written(self) -> Path:
        """Where the divergences are."""
        return ("next", self.kl_key, "full")

    def is_written(self, row: TensorDictBase) -> bool:
        """Whether the divergence is written, and is in the reward if requested."""
        if row.get(self.written, None) is None:
            return False
        applied = row.get(("next", self.kl_key, "coeff"), None)
        return not self.add_to_reward or applied is None or bool((applied != 0).all())

    def columns(self, rows: RowView) -> dict[Path, list[Tensor]]:
        """Divergences, rewards, and the columns of the sources."""
        gen, ref, columns = self.sources(rows)
        recorded = rows.read(("tokens", "response")) is None
        masks = _scored_tokens(rows, gen, ref) if recorded else rows.sampled()
        kl = [
            self._per_token(row, *parts)
            for row, parts in enumerate(zip(gen, ref, masks, strict=True))
        ]
        sums = torch.stack([values.sum() for values in kl])
        counts = torch.stack([mask.sum() for mask in masks])
        means = sums / counts.clamp_min(1)
        # A dataset's conversations may have no reward; they are only measured.
        measured = not self.add_to_reward or (recorded and rows.read(self.reward_key) is None)
        coeff = 0.0 if measured else self.coeff
        node = ("next", self.kl_key)
        columns = {
            **columns,
            (*node, "full"): kl,
            (*node, "sum"): list(sums.unsqueeze(1).unbind(0)),
            (*node, "mean"): list(means.unsqueeze(1).unbind(0)),
            (*node, "coeff"): [torch.tensor([coeff]) for _ in kl],
        }
        if not measured:
            rewards = rows.read(self.reward_key, "append this after the transform that writes it")
            responses = gen if recorded else rows.read(("tokens", "response"))
            task = task_path(self.penalised_key)
            if rows.read(task) is None:  # otherwise an earlier penalty has written it
                columns[task] = [reward.sum().reshape(1, 1) for reward in rewards]
            columns[self.penalised_key] = [
                self._penalised(reward, values, response.shape[0], count)
                for reward, values, response, count in zip(
                    rewards, kl, responses, counts.tolist(), strict=True
                )
            ]
            seen = counts > 0
            self.controller.update((means if self.reduction == "mean" else sums)[seen].tolist())
        return columns

    def _per_token(self, row: int, gen: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
        if not gen.shape == ref.shape == mask.shape:
            raise DataError(
                f"row {row} has {mask.shape[0]} tokens, log-probs of shape {tuple(gen.shape)} and "
                f"reference log-probs of shape {tuple(ref.shape)}; all must be aligned"
            )
        kl = KL_ESTIMATORS[self.estimator](ref.float() - gen.float().to(ref.device))
        mask = mask.to(kl.device)
        if not bool(kl[mask].isfinite().all()):
            raise DataError(f"a log-prob of row {row} is NaN or infinite at a sampled token")
        # Tokens that do not count may have any value, even NaN.
        return kl.masked_fill(~mask, 0.0)

    def _penalised(self, reward: Tensor, kl: Tensor, length: int, count: int) -> Tensor:
        reward = reward if reward.is_floating_point() else reward.float()
        kl = kl[kl.shape[0] - length :].unsqueeze(-1).to(reward)
        if self.reduction == "mean":
            kl = kl / max(count, 1)
        if reward.numel() == 1:
            if self.reduction != "token" or length < 2:
                return reward - self.coeff * kl.sum()
            whole, reward = reward, reward.new_zeros(length, 1)
            reward[-1] = whole.reshape(1)
        if reward.shape != kl.shape:
            raise DataError(
                f"a reward must be [1, 1], or [R, 1] for R={length} tokens of the response, got "
                f"{tuple(reward.shape)}"
            )
        return reward - self.coeff * kl

    # -- in an environment ------------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        if self.add_to_reward and self.reduction == "token":
            raise ConfigError(
                "an environment's rewards have one shape for all rows; append a KL transform with "
                "reduction='token' to the replay buffer"
            )
        return super()._step(tensordict, next_tensordict)

    def empty_columns(self) -> dict[Path, Tensor]:
        """No token, no divergence."""
        node = ("next", self.kl_key)
        empty = {(*node, name): torch.zeros(1) for name in ("sum", "mean", "coeff")}
        return {(*node, "full"): torch.zeros(0), **empty}

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the divergences."""
        fields = dict.fromkeys(("full", "sum", "mean", "coeff"), torch.float32)
        observation_spec[self.kl_key] = RaggedSpec(fields, shape=observation_spec.shape)
        return observation_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Adds the task's own reward, and the penalised one if it has a separate name."""
        reward = reward_spec.get(self.reward_key[1], None)
        if self.add_to_reward and reward is not None:
            for key in (self.penalised_key, task_path(self.penalised_key)):
                reward_spec[key[1]] = reward.clone()
        return reward_spec

    # -- state ------------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """The controller's state."""
        return self.controller.state_dict()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`get_extra_state` was taken."""
        self.controller.load_state_dict(state)


def _scored_tokens(rows: RowView, gen: list[Tensor], ref: list[Tensor]) -> list[Tensor]:
    """Bool ``[T_b]``: tokens with a log-prob; tokens that were not scored have 0.0."""
    assistant = rows.read(("masks", "all_assistant_mask"))
    masks = []
    for row, stepped in enumerate(rows.stepped()):
        mask = gen[row] != 0.0 if assistant is None else assistant[row].bool()
        if mask.shape == gen[row].shape == ref[row].shape:  # otherwise an error reports the shapes
            scored = (gen[row] != 0.0) | (ref[row] != 0.0).to(gen[row].device)
            mask = scored & stepped & (True if assistant is None else mask.to(scored.device))
        masks.append(mask)
    return masks


class KLComputation(KLTransform):
    """Measures and penalises the divergence between two columns of log-probs.

    It is for stored log-probs of a reference, written by
    :class:`~torchrl_llm.envs.transforms.RetrieveLogProb`, or part of a dataset.

    Args:
        gen_log_probs_full_key: log-probs under the policy, by default those recorded when it
            sampled; looked for in the row, then under its ``"next"``.
        ref_log_probs_full_key: log-probs under the reference; looked for under ``"next"``, then in
            the row.
        padding_side: no effect; divergences are aligned with the tokens.
        kwargs: arguments of :class:`~torchrl_llm.envs.transforms.kl.kl_penalty.KLTransform`.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect.
        DataError: for rows without one of the columns, misaligned ones, or log-probs that are not
            finite at a sampled token.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> ids = torch.arange(3)
        >>> row = TensorDict(
        ...     tokens={"full": ids, "response": ids[1:]},
        ...     log_probs={"full": torch.tensor([0.0, -1.0, -2.0])},
        ...     next={
        ...         "ref_log_probs": {"full": torch.tensor([0.0, -1.5, -3.0])},
        ...         "reward": torch.ones(1, 1),
        ...     },
        ... )
        >>> row = KLComputation(coeff=0.1)(row)
        >>> round(row["next", "reward"].item(), 4), row["next", "kl_penalty", "full"].tolist()
        (0.85, [0.0, 0.5, 1.0])
    """

    __signature__ = FullSignature()

    @checked
    def __init__(
        self,
        gen_log_probs_full_key: NestedKey = ("log_probs", "full"),
        ref_log_probs_full_key: NestedKey = ("ref_log_probs", "full"),
        *,
        padding_side: Literal["left", "right"] = "left",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        tell_padding_side(padding_side)
        self.padding_side = padding_side
        self.gen_log_probs_full_key = as_path(gen_log_probs_full_key)
        self.ref_log_probs_full_key = as_path(ref_log_probs_full_key)
        read = [self.gen_log_probs_full_key, self.ref_log_probs_full_key]
        self.in_keys = [*read, self.reward_key[1]] if self.add_to_reward else read

    def sources(self, rows: RowView) -> Sources:
        """The two columns."""
        gen, ref = self.gen_log_probs_full_key, self.ref_log_probs_full_key
        return Sources(
            _first_of(rows, gen, ("next", *gen), "the policy writes it"),
            _first_of(rows, ("next", *ref), ref, "RetrieveLogProb with the reference writes it"),
            {},
        )


def _first_of(rows: RowView, first: Path, second: Path, advice: str) -> list[Tensor]:
    values = rows.read(first)
    return rows.read(second, advice) if values is None else values


_RECORDED = "from_collector"


class RetrieveKL(RayService, KLTransform):
    """Scores rows with a reference (and with a policy), measures and penalises the divergence.

    The reference's log-probs are kept under ``("next", *ref_log_probs_full_key)``, where losses
    look for them. For the reference use a second model, or the policy with its adapters off
    (:class:`~torchrl_llm.modules.AdapterDisabled`); for stored log-probs use
    :class:`KLComputation`.

    Args:
        gen_model: ``"from_collector"``: the log-probs that the policy recorded when it sampled,
            which costs nothing; or a model that scores the rows again.
        ref_model: the reference.
        gen_model_factory: makes the model instead.
        ref_model_factory: makes the reference instead.
        assistant_only: score the assistant's tokens only, or all tokens with a prefix. In both
            cases only sampled tokens are penalised.
        tokenizer_kwargs: see :class:`~torchrl_llm.envs.transforms.RetrieveLogProb`.
        detach: score without gradients.
        device: move the models there once.
        tokenizer: see :class:`~torchrl_llm.envs.transforms.RetrieveLogProb`.
        padding_side: no effect; log-probs are aligned with the tokens.
        gen_log_probs_full_key: where the log-probs of the policy are, or go when a model scores:
            by default ``("log_probs", "full")`` in the row, or ``("gen_log_probs", "full")`` under
            ``"next"``.
        ref_log_probs_full_key: where the log-probs of the reference go.
        use_ray_service: make a :class:`RayRetrieveKL`, with its arguments.
        service_backend: ``"ray"`` does the same; ``"direct"`` is the default.
        service_backend_options: must be empty; the options of the actor are separate arguments.
        kwargs: arguments of :class:`~torchrl_llm.envs.transforms.kl.kl_penalty.KLTransform`.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect.
        DataError: for rows that lack a column that is needed.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.scoring import TokenScores
        >>> class Coin(TokenScorer):
        ...     def token_scores(self, sequences, select, **_):
        ...         return TokenScores(torch.full((sum(int(s.sum()) for s in select),), -0.75))
        >>> ids = torch.arange(3)
        >>> row = TensorDict(
        ...     tokens={"full": ids, "response": ids[1:]},
        ...     masks={"all_assistant_mask": ids > 0},
        ...     log_probs={"full": torch.tensor([0.0, -0.5, -0.5])},
        ...     next={"reward": torch.ones(1, 1)},
        ... )
        >>> RetrieveKL(ref_model=Coin(), coeff=0.1)(row)["next", "reward"].item()
        0.949999988079071
    """

    __signature__ = FullSignature()
    in_ray = "torchrl_llm.envs.transforms.kl.ray_kl.RayRetrieveKL"

    @checked
    def __init__(
        self,
        gen_model: TokenScorer | torch.nn.Module | Literal["from_collector"] = _RECORDED,
        ref_model: TokenScorer | None = None,
        *,
        gen_model_factory: Callable[[], TokenScorer] | None = None,
        ref_model_factory: Callable[[], TokenScorer] | None = None,
        assistant_only: bool = True,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        detach: bool = True,
        device: torch.device | str | None = None,
        tokenizer: Any = None,
        padding_side: Literal["left", "right"] = "left",
        gen_log_probs_full_key: NestedKey | None = None,
        ref_log_probs_full_key: NestedKey = ("ref_log_probs", "full"),
        use_ray_service: bool = False,
        service_backend: Literal["direct", "ray"] | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        check_service(service_backend_options)
        super().__init__(**kwargs)
        if gen_model_factory is not None:
            if gen_model != _RECORDED:
                raise ConfigError("give gen_model or gen_model_factory, not both")
            gen_model = gen_model_factory()
        options = {
            "assistant_only": assistant_only,
            "tokenizer_kwargs": tokenizer_kwargs,
            "detach": detach,
            "device": device,
            "tokenizer": tokenizer,
            "padding_side": padding_side,
        }
        self.reference = RetrieveLogProb(
            made(ref_model, ref_model_factory), log_probs_full_key=ref_log_probs_full_key, **options
        )
        self.in_keys = [*self.reference.in_keys]
        if self.add_to_reward:
            self.in_keys.insert(0, self.reward_key[1])
        self.out_keys = [*self.out_keys, ref_log_probs_full_key]
        self.generator = None
        self.gen_log_probs_full_key = gen_log_probs_full_key or ("log_probs", "full")
        if not isinstance(gen_model, str):
            self.gen_log_probs_full_key = gen_log_probs_full_key or ("gen_log_probs", "full")
            self.generator = RetrieveLogProb(
                gen_model, log_probs_full_key=self.gen_log_probs_full_key, **options
            )

    def sources(self, rows: RowView) -> Sources:
        """Scores of the reference, and scores or recorded log-probs of the policy."""
        columns = self.reference.columns(rows)
        if self.generator is None:
            advice = "the policy writes it when it samples; score recorded rows with gen_model="
            gen = rows.read(self.gen_log_probs_full_key, advice)
        else:
            own = self.generator.columns(rows)
            gen, columns = own[self.generator.written], {**columns, **own}
        return Sources(gen, columns[self.reference.written], columns)

    def _scored(self) -> list[RetrieveLogProb]:
        return [self.reference, *([] if self.generator is None else [self.generator])]

    def empty_columns(self) -> dict[Path, Tensor]:
        """No token has a log-prob or divergence yet."""
        empty = super().empty_columns()
        for part in self._scored():
            empty |= part.empty_columns()
        return empty

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds log-probs and divergences."""
        for part in self._scored():
            observation_spec = part.transform_observation_spec(observation_spec)
        return super().transform_observation_spec(observation_spec)


def made(model: TokenScorer | None, factory: Callable[[], TokenScorer] | None) -> TokenScorer:
    """A given reference, or one from the factory.

    Args:
        model: the model.
        factory: makes one.

    Raises:
        ConfigError: unless there is exactly one of the two.
    """
    if (model is None) == (factory is None):
        raise ConfigError("give a reference: ref_model or ref_model_factory, and not both")
    return factory() if model is None else model


class KLRewardTransform(RetrieveKL):
    """Reward less ``coef`` times the divergence of the recorded log-probs from a reference.

    It is the same as :class:`RetrieveKL` with ``gen_model="from_collector"``, for scripts written
    for TorchRL. It subtracts the penalty of the whole response once, from a reward ``[1, 1]``;
    TorchRL spreads the reward over all tokens.

    Args:
        ref_model: the reference.
        ref_model_factory: makes the reference instead.
        coef: a number or a controller, see
            :class:`~torchrl_llm.envs.transforms.kl.kl_penalty.KLTransform`.
        coeff: the same argument by the name of :class:`RetrieveKL`; give only one of the two.
        in_keys: the reward's name under ``"next"``, ``["reward"]`` by default.
        out_keys: names under ``"next"`` of the penalised reward, and optionally of the divergences
            and of the reference's log-probs; ``["reward", "kl_penalty", "ref_log_probs"]`` by
            default.
        log_prob_key: where the policy recorded its log-probs.
        device: move the reference there once.
        add_to_reward: see :class:`~torchrl_llm.envs.transforms.kl.kl_penalty.KLTransform`.
        tokenizer: see :class:`~torchrl_llm.envs.transforms.RetrieveLogProb`.
        assistant_only: score the assistant's tokens only.
        padding_side: no effect; log-probs are aligned with the tokens.
        reduction: see :class:`~torchrl_llm.envs.transforms.kl.kl_penalty.KLTransform`.
        estimator: see :class:`~torchrl_llm.envs.transforms.kl.kl_penalty.KLTransform`.
        use_ray_service: make a :class:`RayKLRewardTransform`, with its arguments.
        service_backend: see :class:`RetrieveKL`.
        service_backend_options: see :class:`RetrieveKL`.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect.
        DataError: for rows that lack a column that is needed.

    Example:
        >>> from torchrl_llm.envs import DatasetChatEnv
        >>> from torchrl_llm.modules import TransformersBackend, load_model
        >>> env = DatasetChatEnv(dataset=[{"query": "Hi"}])
        >>> reference = TransformersBackend(load_model().requires_grad_(False))
        >>> env = env.append_transform(KLRewardTransform(reference, coef=0.05))
        >>> sorted(env.reset()["kl_penalty"].keys())
        ['coeff', 'full', 'mean', 'sum']
    """

    DEFAULT_IN_KEYS = ("reward",)
    in_ray = "torchrl_llm.envs.transforms.kl.ray_kl.RayKLRewardTransform"

    def __init__(
        self,
        ref_model: TokenScorer | None = None,
        *,
        ref_model_factory: Callable[[], TokenScorer] | None = None,
        coef: float | KLController = 1.0,
        coeff: float | KLController | None = None,
        in_keys: Sequence[str] | None = None,
        out_keys: Sequence[str] | None = None,
        log_prob_key: NestedKey = ("log_probs", "full"),
        device: torch.device | str | None = None,
        add_to_reward: bool = True,
        tokenizer: Any = None,
        assistant_only: bool = True,
        padding_side: Literal["left", "right"] = "left",
        reduction: KLReduction = "sum",
        estimator: KLEstimator = "k1",
        use_ray_service: bool = False,
        service_backend: Literal["direct", "ray"] | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
    ) -> None:
        if coeff is not None:
            if coef != 1.0:
                raise ConfigError(
                    f"coef and coeff are the same setting: got {coef} and {coeff}, give one"
                )
            coef = coeff
        in_keys = list(self.DEFAULT_IN_KEYS if in_keys is None else in_keys)
        out_keys = in_keys if out_keys is None else list(out_keys)
        if len(in_keys) != 1 or len(out_keys) not in (1, 3):
            raise ConfigError(
                "in_keys names the reward and out_keys the new one (and the divergences and the "
                f"reference's log-probs), got {in_keys} and {out_keys}"
            )
        names = out_keys if len(out_keys) == 3 else [*out_keys, "kl_penalty", "ref_log_probs"]
        super().__init__(
            ref_model=ref_model,
            ref_model_factory=ref_model_factory,
            assistant_only=assistant_only,
            device=device,
            tokenizer=tokenizer,
            padding_side=padding_side,
            gen_log_probs_full_key=as_path(log_prob_key),
            ref_log_probs_full_key=(names[2], "full"),
            coeff=coef,
            add_to_reward=add_to_reward,
            reduction=reduction,
            estimator=estimator,
            reward_key=("next", in_keys[0]),
            penalised_key=("next", names[0]),
            kl_key=names[1],
            use_ray_service=use_ray_service,
            service_backend=service_backend,
            service_backend_options=service_backend_options,
        )
        self.out_keys = names

    @property
    def coef(self) -> float:
        """The current coefficient."""
        return self.coeff

    @property
    def log_prob_full_key(self) -> NestedKey:
        """Where the policy recorded its log-probs."""
        return self.gen_log_probs_full_key

    @property
    def ref_model(self) -> Any:
        """The reference, as given."""
        return self.reference.model

    @property
    def pad_output(self) -> bool:
        """Whether the reference writes padded tensors."""
        return bool(getattr(self.ref_model, "pad_output", False))

    @property
    def assistant_only(self) -> bool:
        """Whether only the assistant's tokens are scored."""
        return self.reference.assistant_only

    @property
    def tokenizer(self) -> Any:
        """The encoder of rows that have only conversations."""
        return self.reference.tokenizer

    @property
    def padding_side(self) -> str:
        """As given; without effect."""
        return self.reference.padding_side
