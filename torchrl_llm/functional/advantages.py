r"""Functions that turn rewards into advantages, within a group or a batch, and SPO's tracker.

Group functions accept two forms: groups as the last dimension, ``[..., G]``, or flat rewards
``[N]`` with a group id per member. Invalid members are excluded from all statistics and get
advantage 0, even if their reward is NaN. If all valid rewards of a group are equal, its advantages
are exactly 0, so that no rounding error is divided by a tiny deviation. Rewards count as equal when
float32 cannot distinguish them (:func:`are_equal`).

The tracker of Single-stream Policy Optimization (arXiv:2509.13232, section 3) gives each prompt a
Beta distribution :math:`(\alpha, \beta)` over its success rate. The baseline of the next reward is
:math:`v = \alpha / (\alpha + \beta)`. Older observations count less if the policy has changed more.

Floating dtypes are kept and other dtypes become float32. Intermediate results are float64.

Shape legend: ``G`` members of a group, ``N`` members of all groups (or prompts), ``T`` steps.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    r"""Compute DAPO's soft penalty for long responses, arXiv:2503.14476 equation 13.

    .. math::
        R_\mathrm{length}(y) = \begin{cases}
            0 & |y| \le L_\mathrm{max} - L_\mathrm{cache} \\
            \frac{(L_\mathrm{max} - L_\mathrm{cache}) - |y|}{L_\mathrm{cache}} & \text{between} \\
            -1 & |y| > L_\mathrm{max}
        \end{cases}

    Args:
        lengths: tokens of each response, any shape.
        max_length: :math:`L_\mathrm{max}`, tokens.
        cache: :math:`L_\mathrm{cache}`, number of tokens before the limit over which the penalty
            grows.

    Returns:
        A number between -1 and 0 per response; float32 unless ``lengths`` is float64.

    Raises:
        ValueError: unless ``0 < cache <= max_length``.

    Example:
        >>> overlong_penalty(torch.tensor([5, 8, 9, 10, 12]), max_length=10, cache=4)
        tensor([ 0.0000, -0.5000, -0.7500, -1.0000, -1.0000])
    """
    if not 0 < cache <= max_length:
        raise ValueError(
            f"cache must be above 0 and at most max_length={max_length} tokens, got {cache}"
        )
    dtype = lengths.dtype if lengths.dtype is torch.float64 else torch.float32
    return ((max_length - cache - lengths.to(dtype)) / cache).clamp(-1.0, 0.0)


def adapted_kl_coefficient(coefficient: float, kl: float, *, target: float, gain: float) -> float:
    r"""Take one step of the controller that keeps a KL divergence near a target.

    arXiv:1909.08593 section 2.2: :math:`e = \mathrm{clip}((\mathrm{KL} - t) / t, -0.2, 0.2)` and
    :math:`\beta \leftarrow \beta (1 + K_\beta e)`, with :math:`K_\beta = 0.1` in the paper.

    Args:
        coefficient: :math:`\beta`.
        kl: measured divergence, nats.
        target: :math:`t`, target divergence, nats.
        gain: :math:`K_\beta`.

    Returns:
        The new :math:`\beta`.

    Example:
        >>> adapted_kl_coefficient(1.0, 12.0, target=6.0, gain=0.1)
        1.02
    """
    error = min(max((kl - target) / target, -0.2), 0.2)
    return coefficient * (1 + gain * error)


# A reward is rounded three times: when it is computed, when its parts are weighted, and when the
# parts are added.
_RESOLUTION = 4 * torch.finfo(torch.float32).eps


def are_equal(returns: Tensor, magnitudes: Tensor) -> bool:
    """Whether returns are equal within the precision of float32, in which rewards are computed.

    Args:
        returns: ``[N]``, at least one.
        magnitudes: ``[N]``, for each return the sum of the absolute values of its terms.

    Returns:
        Whether the returns differ by at most 4.8e-7 of the largest magnitude.

    Example:
        >>> returns = torch.tensor([0.1 + 0.2 - 0.3, 0.0])
        >>> are_equal(returns, returns.abs()), are_equal(returns, torch.tensor([0.6, 0.0]))
        (False, True)
    """
    return bool(returns.max() - returns.min() <= _RESOLUTION * magnitudes.max())


Deviation = Literal["sample", "population", "none"]
_DEVIATIONS = ("sample", "population", "none")
EpsilonAs = Literal["floor", "added"]
_EPSILON_AS = ("floor", "added")


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    normalize: Deviation = "sample",
    eps: float = 1e-6,
    eps_as: EpsilonAs = "floor",
    positive_only: bool | Literal["before_std"] = False,
) -> Tensor:
    r"""Compare with the group's mean, :math:`A_i = (r_i - \bar r) / \max(\sigma, \epsilon)`.

    This is GRPO, arXiv:2402.03300 section 4.1.2; the paper does not say whether it uses the sample
    or the population deviation. Without the division it is Dr. GRPO, arXiv:2503.20783. The smallest
    deviation is the same as in TorchRL. TRL adds 1e-4 to the sample deviation (``eps=1e-4,
    eps_as="added"``). Ludic adds 1e-8 to the population deviation.

    Args:
        rewards: ``[..., G]``, or ``[N]`` when ``group_ids`` are given.
        group_ids: integers ``[N]``, equal within a group; in any order.
        valid: bool, shaped like ``rewards``; all valid by default.
        normalize: the standard deviation: ``"sample"`` (computed with G - 1) or ``"population"``
            (computed with G). ``"none"`` does not divide the advantage.
        eps: small number that prevents a division by 0.
        eps_as: ``"floor"``: the deviation is at least ``eps``; ``"added"``: ``eps`` is added to the
            deviation.
        positive_only: negative advantages become 0. ``"before_std"`` sets them to 0 before the
            deviation is computed, as Ludic does.

    Returns:
        Shaped like ``rewards``; all zeros in a group with fewer than two valid members.

    Raises:
        ValueError: for unknown options or shapes that differ.

    Example:
        >>> group_advantages(torch.tensor([0.0, 1.0, 1.0, 0.0]), normalize="population")
        tensor([-1.,  1.,  1., -1.])
        >>> group_advantages(
        ...     torch.tensor([0.0, 5.0, 2.0, 6.0]), torch.tensor([7, 9, 7, 9]), normalize="none"
        ... )
        tensor([-1.0000, -0.5000,  1.0000,  0.5000])
    """
    _check_option("normalize", normalize, _DEVIATIONS)
    _check_option("eps_as", eps_as, _EPSILON_AS)
    _check_option("positive_only", positive_only, (False, True, "before_std"))
    groups = _Groups.of(rewards, group_ids, valid)
    advantages = groups.centred()
    if positive_only:
        advantages = advantages.clamp(min=0)
    if normalize != "none":
        spread = advantages
        before = positive_only == "before_std"
        spread = groups.minus_mean(advantages) if before else groups.centred()
        degrees = (groups.count - int(normalize == "sample")).clamp(min=1)
        deviation = (groups.sum(spread.square()) / degrees).sqrt()
        advantages = advantages / _guarded(deviation, eps, eps_as)[groups.index]
    return groups.finish(advantages, rewards)


def leave_one_out(
    rewards: Tensor, group_ids: Tensor | None = None, *, valid: Tensor | None = None
) -> Tensor:
    r"""Subtract the mean of the others, :math:`A_i = r_i - \frac{1}{G-1}\sum_{j \ne i} r_j`.

    RLOO, arXiv:2402.14740, section 2.3. The result equals the reward minus the group's mean, times
    G / (G - 1).

    Args:
        rewards: ``[..., G]``, or ``[N]`` when ``group_ids`` are given.
        group_ids: integers ``[N]``, equal within a group; in any order.
        valid: bool, shaped like ``rewards``; all valid by default.

    Returns:
        Shaped like ``rewards``; all zeros in a group with fewer than two valid members.

    Raises:
        ValueError: for shapes that differ.

    Example:
        >>> leave_one_out(torch.tensor([0.0, 0.0, 3.0]))
        tensor([-1.5000, -1.5000,  3.0000])
    """
    groups = _Groups.of(rewards, group_ids, valid)
    others = groups.count / (groups.count - 1).clamp(min=1)
    return groups.finish(groups.centred() * others[groups.index], rewards)


def hybrid_advantages(
    rewards: Tensor,
    group_ids: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    normalize: Deviation = "population",
    deviation_of: Literal["advantages", "returns"] = "advantages",
    eps: float = 1e-6,
    eps_as: EpsilonAs = "floor",
) -> Tensor:
    r"""Subtract the group's mean from each reward, and divide by the deviation of the whole batch.

    :math:`A_i = (r_i - \bar r_{group(i)}) / \max(\sigma_{batch}, \epsilon)`: ScaleRL,
    arXiv:2510.13786, where :math:`\sigma_{batch}` is the deviation of the centred rewards. Ludic
    adds 1e-8 to it (``eps=1e-8, eps_as="added"``). TRL's ``scale_rewards="batch"`` divides by the
    sample deviation of the rewards themselves (``normalize="sample", deviation_of="returns"``) plus
    1e-4. Groups with fewer than two valid members are not part of the batch.

    Args:
        rewards: ``[..., G]``, or ``[N]`` when ``group_ids`` are given.
        group_ids: integers ``[N]``, equal within a group; in any order.
        valid: bool, shaped like ``rewards``; all valid by default.
        normalize: as in :func:`group_advantages`.
        deviation_of: whether the deviation is computed from the centred rewards (``"advantages"``)
            or from the rewards (``"returns"``).
        eps: small number that prevents a division by 0.
        eps_as: ``"floor"``: the deviation is at least ``eps``; ``"added"``: ``eps`` is added to the
                deviation.

    Returns:
        Shaped like ``rewards``.

    Raises:
        ValueError: for unknown options or shapes that differ.

    Example:
        >>> hybrid_advantages(torch.tensor([[0.0, 2.0], [0.0, 4.0]]), normalize="none")
        tensor([[-1.,  1.],
                [-2.,  2.]])
    """
    _check_option("normalize", normalize, _DEVIATIONS)
    _check_option("deviation_of", deviation_of, ("advantages", "returns"))
    _check_option("eps_as", eps_as, _EPSILON_AS)
    groups = _Groups.of(rewards, group_ids, valid)
    advantages = groups.centred()
    if normalize != "none":
        counted = groups.valid & (groups.count > 1)[groups.index]
        values = advantages if deviation_of == "advantages" else groups.values
        weights = counted.to(values.dtype)
        number = weights.sum()
        mean = (values * weights).sum() / number.clamp(min=1)
        squares = ((values - mean).square() * weights).sum()
        degrees = (number - int(normalize == "sample")).clamp(min=1)
        advantages = advantages / _guarded((squares / degrees).sqrt(), eps, eps_as)
    return groups.finish(advantages, rewards)


def batch_normalize(
    values_N: Tensor,
    weights_N: Tensor | None = None,
    *,
    center: bool = True,
    normalize: Deviation = "population",
    eps: float = 1e-6,
    eps_as: EpsilonAs = "floor",
) -> Tensor:
    r"""Standardise values over the whole batch, :math:`(x - \mu) / \sigma`.

    This is the global advantage normalisation of REINFORCE++ (arXiv:2501.03262). Its batch consists
    of tokens. If several tokens have the same value, pass the number of these tokens as the weight
    of the value. SPO (arXiv:2509.13232) and implementations of PPO normalise in the same way.

    Args:
        values_N: ``[N]``.
        weights_N: ``[N]``, how often each value counts, once by default. A value with weight 0 is
            excluded from the statistics, and its result is 0.
        center: subtract the mean.
        normalize: the standard deviation: ``"sample"`` (computed with the sum of the weights minus
            1) or ``"population"``. ``"none"`` does not divide.
        eps: small number that prevents a division by 0.
        eps_as: ``"floor"``: the deviation is at least ``eps``; ``"added"``: ``eps`` is added to the
                deviation.

    Returns:
        ``[N]``; zeros where all values are equal and ``center`` is set.

    Raises:
        ValueError: for unknown options or shapes that differ.

    Example:
        >>> batch_normalize(torch.tensor([0.0, 4.0]), torch.tensor([3.0, 1.0]), normalize="none")
        tensor([-1.,  3.])
    """
    _check_option("normalize", normalize, _DEVIATIONS)
    _check_option("eps_as", eps_as, _EPSILON_AS)
    values = values_N.double()
    weights = torch.ones_like(values) if weights_N is None else weights_N.to(values.dtype)
    if weights.shape != values.shape:
        raise ValueError(
            f"weights must have the shape of values, got {tuple(weights.shape)} and "
            f"{tuple(values.shape)}"
        )
    counted = weights > 0
    values = values.where(counted, 0.0)
    total = weights.sum()
    mean = (values * weights).sum() / total.clamp(min=1e-12)
    centred = (values - mean).where(counted, 0.0)
    if center:
        highest = values.where(counted, -torch.inf).amax() if values.numel() else values.sum()
        lowest = values.where(counted, torch.inf).amin() if values.numel() else values.sum()
        differ = highest - lowest > _RESOLUTION * torch.maximum(highest, -lowest)
        values = centred.where(differ, 0.0)
    if normalize == "none":
        return values.to(_floating(values_N).dtype)
    degrees = total - int(normalize == "sample")
    variance = (centred.square() * weights).sum() / degrees.clamp(min=1e-12)
    return (values / _guarded(variance.sqrt(), eps, eps_as)).to(_floating(values_N).dtype)


def discounted_returns(
    rewards_T: Tensor, gamma: float = 1.0, *, bootstrap: Tensor | float = 0.0
) -> Tensor:
    r"""Compute the return from each step on, :math:`G_t = r_t + \gamma G_{t+1}`.

    Args:
        rewards_T: ``[..., T]``, ordered by time.
        gamma: discount from one step to the next, in [0, 1].
        bootstrap: ``[...]``, the value :math:`G_T` of the state after the last step: 0 where the
            episode ended, a critic's estimate where the episode was cut.

    Returns:
        ``[..., T]``.

    Raises:
        ValueError: for a discount outside [0, 1].

    Example:
        >>> discounted_returns(torch.tensor([1.0, 0.0, 2.0]), 0.5)
        tensor([1.5000, 1.0000, 2.0000])
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be in [0, 1], got {gamma}")
    rewards = _floating(rewards_T)
    following = torch.as_tensor(bootstrap, dtype=rewards.dtype, device=rewards.device)
    returns = []
    for reward in reversed(rewards.unbind(-1)):
        following = reward + gamma * following
        returns.append(following)
    return torch.stack(returns[::-1], -1) if returns else rewards.clone()


class _Groups(NamedTuple):
    """Flat members with the index of their group, and the number of valid members per group."""

    values: Tensor
    index: Tensor
    valid: Tensor
    count: Tensor

    @classmethod
    def of(cls, rewards: Tensor, group_ids: Tensor | None, valid: Tensor | None) -> _Groups:
        if valid is not None and valid.shape != rewards.shape:
            raise ValueError(
                f"valid must have the shape of rewards, got {tuple(valid.shape)} and "
                f"{tuple(rewards.shape)}"
            )
        if group_ids is None:
            number = rewards.shape[:-1].numel()
            index = torch.arange(number, device=rewards.device).unsqueeze(-1)
            index = index.expand(number, rewards.shape[-1]).reshape(-1)
        elif group_ids.shape != rewards.shape or rewards.ndim != 1:
            raise ValueError(
                f"rewards and group_ids must both be [N], got {tuple(rewards.shape)} and "
                f"{tuple(group_ids.shape)}"
            )
        else:
            names, index = group_ids.unique(return_inverse=True)
            number = names.shape[0]
        values = rewards.reshape(-1).double()  # for finite squares and sums
        valid = torch.ones_like(index, dtype=torch.bool) if valid is None else valid.reshape(-1)
        count = values.new_zeros(number).index_add(0, index, valid.to(values.dtype))
        return cls(values.where(valid, 0.0), index, valid, count)

    def sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.count.shape).index_add(0, self.index, values)

    def minus_mean(self, values: Tensor) -> Tensor:
        mean = self.sum(values) / self.count.clamp(min=1)
        return (values - mean[self.index]).where(self.valid, 0.0)

    def centred(self) -> Tensor:
        """Subtract the group's mean; exactly 0 if float32 cannot distinguish the members."""
        highest, lowest = (
            self.values.new_full(self.count.shape, -sign * torch.inf).scatter_reduce(
                0, self.index, self.values.where(self.valid, -sign * torch.inf), reduce
            )
            for sign, reduce in ((1, "amax"), (-1, "amin"))
        )
        differ = highest - lowest > _RESOLUTION * torch.maximum(highest, -lowest)
        return self.minus_mean(self.values).where(differ[self.index], 0.0)

    def finish(self, advantages: Tensor, rewards: Tensor) -> Tensor:
        advantages = advantages.where((self.count > 1)[self.index], 0.0)
        return advantages.to(_floating(rewards).dtype).reshape(rewards.shape)


def _floating(values: Tensor) -> Tensor:
    return values if values.is_floating_point() else values.float()


def _guarded(deviation: Tensor, eps: float, eps_as: EpsilonAs) -> Tensor:
    return deviation + eps if eps_as == "added" else deviation.clamp(min=eps)


def _check_option(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be {', '.join(map(str, allowed))}; got {value!r}")


def forgetting_factor(
    kl: Tensor | float, *, half_life: float = 0.1, bounds: tuple[float, float] = (0.875, 0.96)
) -> Tensor:
    r"""Return the factor that discounts past observations.

    :math:`\rho = clip(2^{-KL / D_{half}}, \rho_{min}, \rho_{max})`.

    Args:
        kl: divergence of the current policy from the policy at the last update of the prompt, nats.
        half_life: divergence in nats that halves the weight of the past.
        bounds: ``(rho_min, rho_max)``. The default is the paper's: past observations count like 8
            to 25 samples.

    Returns:
        Shaped like ``kl``.

    Example:
        >>> forgetting_factor(torch.tensor([0.0, 0.01, 1.0]))
        tensor([0.9600, 0.9330, 0.8750])
    """
    return torch.exp2(-torch.as_tensor(kl) / half_life).clamp(*bounds)


def beta_update(
    alpha: Tensor, beta: Tensor, reward: Tensor, rho: Tensor | float, count: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    r""":math:`\alpha \leftarrow \rho \alpha + r` and :math:`\beta \leftarrow \rho \beta + 1 - r`.

    Args:
        alpha: successes so far.
        beta: failures so far.
        reward: a reward in [0, 1], or the sum of ``count`` rewards.
        rho: see :func:`forgetting_factor`.
        count: number of rewards in the sum.

    Returns:
        The new ``(alpha, beta)``.

    Example:
        >>> one = torch.tensor(1.0)
        >>> beta_update(one, one, one, 0.5)
        (tensor(1.5000), tensor(0.5000))
    """
    return rho * alpha + reward, rho * beta + count - reward


def uncertainty_weight(value: Tensor, *, floor: float = 0.05) -> Tensor:
    r"""Return how often a prompt should be drawn, :math:`\sqrt{v (1 - v)} + \epsilon`.

    Prompts that always or never succeed give little signal. The floor makes sure that they are
    still drawn sometimes.

    Args:
        value: success rates in [0, 1].
        floor: the smallest weight.

    Returns:
        Shaped like ``value``, not normalised.

    Example:
        >>> uncertainty_weight(torch.tensor([0.0, 0.5]))
        tensor([0.0500, 0.5500])
    """
    return (value * (1 - value)).sqrt() + floor
