"""Divergence from a reference that is in a Ray actor: one reference for many environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from torchrl_llm._ray import ActorOptions, RemoteObject, require_ray
from torchrl_llm._registry import FullSignature
from torchrl_llm.data.scoring import ScoreExtras, TokenScorer, TokenScores
from torchrl_llm.envs.transforms.kl.kl_penalty import KLRewardTransform, RetrieveKL, made


def _model(model: Any, factory: Callable[[], Any] | None, device: Any) -> Any:
    """The model in the actor."""
    model = made(model, factory)
    return model if device is None else model.to(device)


class RayScorer(TokenScorer):
    """Scores tokens with a model in a Ray actor, without gradients; copies ask the same actor.

    Args:
        model: the model, sent to the actor.
        factory: makes it there instead.
        device: move the model there, in the actor.
        options: resources of the actor.

    Raises:
        ConfigError: unless there is exactly one of model and factory.
        MissingExtraError: Ray is not installed.
        ResourceError: Ray is not running, or has too few resources.
    """

    def __init__(
        self,
        model: TokenScorer | None,
        factory: Callable[[], TokenScorer] | None,
        device: torch.device | str | None,
        options: ActorOptions,
    ) -> None:
        require_ray("RayScorer")
        self._remote = RemoteObject(
            partial(_model, model, factory, device), options, what="a reference model"
        )

    def token_scores(
        self,
        sequences: Sequence[Tensor],
        select: Sequence[Tensor],
        *,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
        extras: ScoreExtras | None = None,
    ) -> TokenScores:
        """See :meth:`~torchrl_llm.data.scoring.TokenScorer.token_scores`."""
        scores = self._remote.call(
            "token_scores",
            list(sequences),
            list(select),
            temperature=temperature,
            entropy=entropy,
            extras=extras,
        )
        return scores._replace(log_probs=scores.log_probs.detach().cpu())


class RayRetrieveKL(RetrieveKL):
    """A :class:`RetrieveKL` whose models are in Ray actors.

    Args:
        gen_model: see :class:`RetrieveKL`; a model is sent to an actor.
        ref_model: the reference, sent to an actor.
        gen_model_factory: makes the model in the actor instead.
        ref_model_factory: makes the reference in the actor instead.
        num_cpus: CPUs that each actor holds.
        num_gpus: GPUs that each holds.
        device: move the models there, in the actors.
        actor_name: name of the reference's actor; a running actor of this name is reused.
        kwargs: further arguments of :class:`RetrieveKL`.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect.
        MissingExtraError: Ray is not installed.
        ResourceError: Ray is not running, or has too few CPUs or GPUs.
    """

    __signature__ = FullSignature()

    def __init__(
        self,
        gen_model: TokenScorer | Literal["from_collector"] = "from_collector",
        ref_model: TokenScorer | None = None,
        *,
        gen_model_factory: Callable[[], TokenScorer] | None = None,
        ref_model_factory: Callable[[], TokenScorer] | None = None,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        device: torch.device | str | None = None,
        actor_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        options = partial(ActorOptions, num_cpus=num_cpus, num_gpus=num_gpus)
        if gen_model_factory is not None or not isinstance(gen_model, str | None):
            asked = None if isinstance(gen_model, str) else gen_model
            gen_model = RayScorer(asked, gen_model_factory, device, options())
        reference = RayScorer(ref_model, ref_model_factory, device, options(name=actor_name))
        super().__init__(gen_model or "from_collector", reference, **kwargs)


class RayKLRewardTransform(KLRewardTransform):
    """A :class:`KLRewardTransform` whose reference is in a Ray actor.

    Args:
        ref_model: the reference, sent to the actor.
        ref_model_factory: makes it in the actor instead.
        num_cpus: CPUs that the actor holds.
        num_gpus: GPUs that it holds.
        device: move the reference there, in the actor.
        actor_name: name of the actor; a running actor of this name is reused.
        kwargs: further arguments of :class:`KLRewardTransform`.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect.
        MissingExtraError: Ray is not installed.
        ResourceError: Ray is not running, or has too few CPUs or GPUs.
    """

    __signature__ = FullSignature()

    def __init__(
        self,
        ref_model: TokenScorer | None = None,
        *,
        ref_model_factory: Callable[[], TokenScorer] | None = None,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        device: torch.device | str | None = None,
        actor_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        options = ActorOptions(num_cpus=num_cpus, num_gpus=num_gpus, name=actor_name)
        super().__init__(RayScorer(ref_model, ref_model_factory, device, options), **kwargs)
