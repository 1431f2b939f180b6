"""Table of the algorithms of papers: the names of a loss and an advantage estimator for each.

The table is ``presets.yaml``. If a record lacks a value, the default of the class applies. Each
record has a function ``make_*`` in this file, whose docstring describes the algorithm. The
function's signature, its checks and the list of arguments in its docstring come from the record.
Tests compare the pages of the docs and the files of ``sota-implementations/grpo/config`` with the
record. ``make_opd`` and ``make_mopd`` have separate signatures: they take teachers, which score the
student's samples.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Unpack

import yaml
from torch import nn
from torchrl.envs import Transform

from torchrl_llm._checked import checked
from torchrl_llm._registry import constructor_arguments, did_you_mean, find
from torchrl_llm.algorithms.algorithm import Algorithm, NoModel
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.envs.transforms import OverlongPenalty, RetrieveTeacherLogProb, RetrieveValues
from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives import MCAdvantage, PolicyLossSettings

Actor = nn.Module | TokenScorer
Style = Literal["paper", "ludic"]
_DOCSTRING = """{text}

Args:
{arguments}

Raises:
    ConfigError: an argument is impossible, missing, or fixed by the style.
    TypeError: an argument does not exist, or is fixed by the preset.
{example}"""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A pair of loss and advantage estimator that a paper uses.

    Attributes:
        name: the function is called ``make_<name>``.
        paper: the publication; empty if there is none.
        loss: name among the registered ``"losses"``, or ``"module:name"``.
        advantage: name among the registered ``"advantages"``; ``None`` if none is needed.
        loss_arguments: arguments in which the paper differs from the loss's defaults.
        advantage_arguments: arguments in which the paper differs from the advantage estimator's
            defaults.
        ludic_loss: arguments of the loss with ``style="ludic"``, where Ludic's code differs.
        ludic_advantage: the same of the advantage estimator.
        group_size: responses to a prompt, by default; ``None`` if there are no groups.
        grouped: arguments of the advantage estimator if the user makes groups, although the preset
            does not.
        arguments: names of the preset's own arguments, as the signature lists them: ``style``,
            ``group_size``, and arguments of the loss, the advantage estimator or ``transforms``.
        fixed: arguments of the loss that define the algorithm and cannot be given.
        transforms: function that makes the transforms of rows before advantages are written, from
            the actor and its own arguments.
        recipe: overrides of ``grpo-sync.py`` besides loss and advantage estimator, or the folder of
            ``sota-implementations`` that has the algorithm.

    Example:
        >>> mine = Preset(name="mine", loss="gspo", advantage="leave_one_out", group_size=4,
        ...     loss_arguments={"level": "sequence"}, arguments=("group_size", "level"))
        >>> make_mine = mine.maker("Mine: GSPO with another baseline.")
        >>> signature = inspect.signature(make_mine).parameters
        >>> {name: signature[name].default for name in mine.arguments}
        {'group_size': 4, 'level': 'sequence'}
    """

    name: str
    paper: str = ""
    loss: str
    advantage: str | None
    loss_arguments: Mapping[str, Any] = field(default_factory=dict)
    advantage_arguments: Mapping[str, Any] = field(default_factory=dict)
    ludic_loss: Mapping[str, Any] = field(default_factory=dict)
    ludic_advantage: Mapping[str, Any] = field(default_factory=dict)
    group_size: int | None = None
    grouped: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    transforms: Callable[..., tuple[Transform, ...]] | None = None
    recipe: str = ""

    @checked
    def pair_arguments(self, style: Style = "paper") -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of the loss and of the advantage estimator that differ from their defaults.

        Args:
            style: ``"paper"`` or ``"ludic"``.

        Raises:
            ConfigError: for any other style.
        """
        ludic = (self.ludic_loss, self.ludic_advantage) if style == "ludic" else ({}, {})
        return {**self.loss_arguments, **ludic[0]}, {**self.advantage_arguments, **ludic[1]}

    def build(self, actor: Actor | None = None, **given: Any) -> Algorithm:
        """Build the algorithm; :meth:`maker` adds the signature of the preset.

        Args:
            actor: the policy, or anything else that scores tokens; ``None`` if
                :meth:`Algorithm.bind` sets it later.
            **given: arguments of the preset and of its loss, which override the preset's values. If
                the styles differ in an argument of the preset, ``None`` means the value of the
                style.

        Raises:
            ConfigError: an argument is impossible, missing, or fixed by the style.
            TypeError: an argument does not exist, or is fixed by the preset.
        """
        for name in given.keys() - self._known.keys():
            hint = "" if name in self.fixed else did_you_mean(name, self._known)
            raise TypeError(f"make_{self.name}() takes no argument {name!r}{hint}")
        later = partial(self.build, **given) if actor is None else None
        actor = NoModel() if actor is None else actor
        given = {k: v for k, v in given.items() if v is not None or k not in self._of_style}
        style, size = given.pop("style", "paper"), given.pop("group_size", None)
        loss, advantage = self.pair_arguments(style)
        if style == "ludic" and (both := given.keys() & self.ludic_advantage.keys()):
            raise ConfigError(f"{min(both)} has no effect with style='ludic', which fixes it")
        if size is not None and self.group_size is None:
            advantage.update(self.grouped)
        if "masking_strategy" in self._known:
            loss = {"masking_strategy": "rlhf", **loss}  # unless it says otherwise
        parts = {"loss": loss, "advantage": advantage, "transforms": {}}
        for name, value in given.items():
            parts[self._known[name][0]][name] = value
        sizes = [n for n in (size, self.group_size) if n is not None][:1]
        made = self._targets
        return Algorithm(
            name=self.name,
            credit=made["advantage"](*sizes, **advantage) if self.advantage else None,
            loss=made["loss"](actor, **loss),
            transforms=made["transforms"](actor, **parts["transforms"]) if self.transforms else (),
            build=later,
        )

    def maker(self, text: str) -> Callable[..., Algorithm]:
        """A function that builds the algorithm, with the preset's signature and help.

        Args:
            text: its docstring, without its arguments: ``"Title: what it is."`` in the first line.
        """

        def make(actor: Actor | None = None, **settings: Any) -> Algorithm:
            return self.build(actor, **settings)

        kind = inspect.Parameter
        parameters = [
            kind("actor", kind.POSITIONAL_OR_KEYWORD, default=None, annotation=Actor | None),
            *(self._known[name][1] for name in self.arguments),
            kind("settings", kind.VAR_KEYWORD, annotation=Any),
        ]
        make.__name__ = make.__qualname__ = f"make_{self.name}"
        make.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": Algorithm}
        make.__signature__ = inspect.Signature(parameters, return_annotation=Algorithm)
        text, _, example = inspect.cleandoc(text).partition("\n\nExample:")
        entries = _argument_help(*self._targets.values())
        entries["**settings"] = f"further arguments of {self._targets['loss'].__name__}."
        names = ("actor", *self.arguments, "**settings")
        make.__doc__ = _DOCSTRING.format(
            text=text.replace(":", f" ({self.paper}):", 1) if self.paper else text,
            arguments="\n".join(f"    {name}: {entries[name]}" for name in names),
            example=example and f"\nExample:{example}\n",
        )
        return make

    @property
    def _of_style(self) -> set[str]:
        """Arguments of the preset in which the styles differ."""
        return set(self.arguments) & {*self.ludic_loss, *self.ludic_advantage}

    @cached_property
    def _targets(self) -> dict[str, Callable[..., Any]]:
        """The callables that take arguments."""
        found = {"preset": _own_arguments, "transforms": self.transforms}
        found["advantage"] = self.advantage and find("advantages", self.advantage)
        found["loss"] = find("losses", self.loss)
        return {part: target for part, target in found.items() if target is not None}

    @cached_property
    def _known(self) -> dict[str, tuple[str, inspect.Parameter]]:
        """Every argument that can be given: which target takes it, and its parameter."""
        found = {}
        loss, advantage = self.pair_arguments()
        written = {"preset": {"group_size": self.group_size}, "advantage": advantage, "loss": loss}
        for part, target in self._targets.items():
            for name, p in constructor_arguments(target).items():
                if found.get(name, "")[:1] == ("preset",):
                    continue  # e.g. a group size, which the preset passes itself
                default, hint = written.get(part, {}).get(name, p.default), p.annotation
                if name in self._of_style:
                    default, hint = None, hint | None
                if name in self.arguments or part == "loss":
                    p = p.replace(kind=p.KEYWORD_ONLY, default=default, annotation=hint)
                    found[name] = part, p
        return {k: v for k, v in found.items() if k not in ("actor_network", *self.fixed)}


class _Tuples(yaml.SafeLoader):
    """Reads lists of YAML as tuples."""

    def construct_yaml_seq(self, node: yaml.SequenceNode) -> tuple[Any, ...]:
        return tuple(self.construct_sequence(node))


_Tuples.add_constructor("tag:yaml.org,2002:seq", _Tuples.construct_yaml_seq)
_TABLE = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
PRESETS = {name: Preset(name=name, **record) for name, record in yaml.load(_TABLE, _Tuples).items()}
"""Every preset by its name, as ``presets.yaml`` describes it."""


def _argument_help(*targets: Callable[..., Any]) -> dict[str, str]:
    """Descriptions of arguments from docstrings of functions, and of classes and their bases."""
    found: dict[str, str] = {}
    for layer in [layer for t in targets for layer in reversed(getattr(t, "__mro__", (t,)))]:
        text = inspect.cleandoc(layer.__doc__ or "")
        entries = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", text, re.MULTILINE)
        found.update((name, re.sub(r"\s+", " ", entry)) for name, entry in entries)
    return found


def _own_arguments(actor: Actor, style: Style = "paper", group_size: int | None = None) -> None:
    """Arguments of a preset that have this name neither in the loss nor in the estimator.

    Args:
        actor: the policy, or anything else that scores tokens; without one, ``algorithm.bind`` of
            the returned algorithm sets it.
        style: ``"paper"``, or ``"ludic"`` for the values of Ludic's code, if they differ.
        group_size: responses to a prompt.
    """


def _overlong(actor: Actor, overlong: tuple[int, int] | None = None) -> tuple[Transform, ...]:
    """The transforms that get the rows of DAPO first.

    Args:
        actor: not used.
        overlong: ``(max_length, cache)`` of the soft punishment of long responses, see
            :class:`~torchrl_llm.envs.transforms.OverlongPenalty`; ``None`` for none.
    """
    return () if overlong is None else (OverlongPenalty(*overlong),)


def _preset(
    described: Callable[[], None], transforms: Callable[..., tuple[Transform, ...]] | None = None
) -> Callable[..., Algorithm]:
    """Make the function of a preset from a function with its name and text but no body."""
    preset = PRESETS[described.__name__.removeprefix("make_")]
    if transforms is not None:
        preset = PRESETS[preset.name] = replace(preset, transforms=transforms)
    return preset.maker(described.__doc__)


@_preset
def make_grpo() -> None:
    """GRPO: advantages normalised in the group, a clipped ratio per token, a mean per response.

    The recipe's own default is the same with a mean over all tokens, as in TorchRL.

    The paper does not define the standard deviation by which it divides; the default is
    ``"sample"``. Ludic divides by the population's deviation plus 1e-8, which is fixed, and sums
    over a response's tokens.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> policy = CausalScorer(Qwen2ForCausalLM(config))
        >>> algorithm = make_grpo(policy, group_size=16, kl_to_ref_coeff=0.04)
        >>> algorithm.loss.aggregation, algorithm.credit.group_size
        ('sequence_mean', 16)
    """


@_preset
def make_dr_grpo() -> None:
    """Dr. GRPO: no division by a deviation, nor by each response's length.

    It divides by a constant (``constant_length``). So length is not rewarded, and questions that
    are nearly always or never solved get no additional weight.

    The constant is required. Ludic also leaves out the division by the constant, and rejects it.
    """


@partial(_preset, transforms=_overlong)
def make_dapo() -> None:
    """DAPO: a wider upper bound, the mean over all tokens, dynamic sampling.

    Further prompts replace groups without a signal, and long responses get a gradual penalty
    (``reward.overlong_cache=...``).

    Groups whose rewards are all equal are not written; a loop that has to fill its batch collects
    further prompts (``BatchSource(max_resamples=...)``). Ludic has no preset of it.
    """


@_preset
def make_gspo() -> None:
    """GSPO: one ratio and one clip for a whole response.

    Training is more stable for mixtures of experts.

    Ludic: its deviation of the group (see ``make_grpo``).
    """


@_preset
def make_gmpo() -> None:
    """GMPO: the geometric mean of clipped ratios.

    The bounds apply to the log-ratio of a token.

    Ludic: its deviation of the group. Its formula has no lower bound, regardless of its setting;
    the loss here follows the paper in both styles.
    """


@_preset
def make_cispo() -> None:
    """CISPO: the clipped ratio as a weight, so that every token has a gradient.

    The bounds apply to the weight.

    Ludic: its deviation of the group; and it first averages over each response's tokens.
    """


@_preset
def make_sapo() -> None:
    """SAPO: a soft gate on the ratio instead of a clip.

    The gate is narrower for negative advantages.

    Ludic: its deviation of the group, and the sum over a response's tokens.
    """


@_preset
def make_reinforce() -> None:
    """REINFORCE: the score function times the return, without a baseline.

    It needs no group.

    On rows of an older policy each token is weighted by its ratio. Ludic weights by the product of
    a whole response's ratios, so long responses need a ``truncation``.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> policy = CausalScorer(Qwen2ForCausalLM(config))
        >>> make_reinforce(policy).loss.level, make_reinforce(policy, style="ludic").loss.level
        ('token', 'sequence')
    """


@_preset
def make_reinforce_plus_plus() -> None:
    """REINFORCE++: returns normalised over the batch, and PPO's clip.

    With ``advantage.baseline=group`` (in this function a ``group_size``) the group's mean is
    subtracted first.

    The paper subtracts the divergence from a reference model from the reward
    (:class:`~torchrl_llm.envs.transforms.KLRewardTransform`), or in its variant with a baseline
    puts it into the loss: ``kl_to_ref_coeff=..., kl_estimator="k2"``.
    """


@_preset
def make_rloo() -> None:
    """RLOO: REINFORCE against the mean of the other responses to the prompt.

    The paper is on-policy; on older rows each token is weighted by its ratio.

    Ludic has no preset of it.
    """


@partial(_preset, transforms=lambda actor: (RetrieveValues(actor),))
def make_ppo() -> None:
    """PPO: a value head and an advantage for each token.

    Responses to a prompt are not compared.

    Every sampled token is a step. Values are computed for the rows before advantages are written;
    the actor needs a :class:`~torchrl_llm.modules.ValueHead`. Ludic has no preset of it; the
    defaults are picoRL's.
    """


@_preset
def make_scalerl() -> None:
    """ScaleRL: CISPO, centred in the group, divided by the deviation of the batch.

    The loss is averaged over the responses of each prompt and then over prompts, which needs
    ``group_id``.

    Groups of equal rewards are not written. By default a weight is at most 4; the results of the
    paper hardly differ between its values of this bound. The rest of the recipe does not concern
    the loss and advantages: log-probs from float32 logits (always the case in this package), a
    pipeline of samplers, and dropping prompts that are nearly always solved.

    Ludic: 1e-8 added to the deviation, weights between 0.8 and 1.28, averaged over each response,
    and trajectories without an advantage are left out. (Ludic leaves out advantages of at most
    1e-4; this package only leaves out advantages of 0.)
    """


@_preset
def make_sft() -> None:
    """Supervised fine-tuning: cross-entropy of the assistant's tokens, a mean over each row first.

    Also MinorSFT (arXiv:2408.10642). Rows may have a weight, ``"loss_weight"``.

    Ludic's preset sums over a row's tokens instead.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> make_sft(CausalScorer(Qwen2ForCausalLM(config))).credit is None
        True
    """


Estimator = Literal["advantage", "k2", "full_vocabulary"]


def make_opd(
    actor: Actor,
    teacher: TokenScorer,
    *,
    estimator: Estimator = "advantage",
    coeff: float = 1.0,
    **settings: Unpack[PolicyLossSettings],
) -> Algorithm:
    """On-policy distillation: the reverse divergence from a teacher on the student's samples.

    Thinking Machines, *On-Policy Distillation*, 2025. Rewards are not read. By default the
    advantage of a token is the teacher's log-prob minus the student's. Ludic's preset
    differentiates this difference instead. The expected gradient of that loss does not depend on
    the teacher, so this package does not offer it.

    Args:
        actor: the student.
        teacher: scores the student's tokens; it must have the same vocabulary.
        estimator: how the divergence is estimated, see
            :class:`~torchrl_llm.objectives.OnPolicyDistillationLoss`.
        coeff: weight of the divergence.
        **settings: further arguments of the loss.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> student, teacher = (CausalScorer(Qwen2ForCausalLM(config)) for _ in range(2))
        >>> [type(scorer).__name__ for scorer in make_opd(student, teacher).scorers]
        ['RetrieveTeacherLogProb']
    """
    return _distilled("opd", actor, teacher, estimator=estimator, coeff=coeff, **settings)


def make_mopd(
    actor: Actor,
    teachers: Mapping[str, TokenScorer],
    *,
    group_size: int = 8,
    estimator: Estimator = "advantage",
    coeff: float = 1.0,
    outcome_coeff: float = 0.0,
    **settings: Unpack[PolicyLossSettings],
) -> Algorithm:
    """On-policy distillation from several teachers: each row names its own under ``"domain"``.

    As in MiMo-V2-Flash (arXiv:2601.02780) the reward may contribute in addition to the teachers:
    with ``outcome_coeff`` the advantage in the group is added to the advantage of the distillation.

    Args:
        actor: the student.
        teachers: name to scorer; all must have the student's vocabulary.
        group_size: responses to a prompt, with ``outcome_coeff``.
        estimator: how the divergence is estimated, see
            :class:`~torchrl_llm.objectives.OnPolicyDistillationLoss`.
        coeff: weight of the divergence.
        outcome_coeff: weight of the reward's advantage in the group; with 0 the reward is not read.
        **settings: further arguments of the loss.
    """
    algorithm = _distilled(
        "mopd",
        actor,
        teachers,
        estimator=estimator,
        coeff=coeff,
        outcome_coeff=outcome_coeff,
        **settings,
    )
    return replace(algorithm, credit=MCAdvantage(group_size)) if outcome_coeff else algorithm


def _distilled(
    name: str, actor: Actor, teachers: TokenScorer | Mapping[str, TokenScorer], **settings: Any
) -> Algorithm:
    # ``full_vocabulary`` needs the teachers themselves; other estimators only need their log-probs
    # of the rows.
    if settings["estimator"] == "full_vocabulary":
        return PRESETS[name].build(actor, teachers=teachers, **settings)
    scorers = (RetrieveTeacherLogProb(teachers, student=actor),)
    return replace(PRESETS[name].build(actor, **settings), scorers=scorers)
