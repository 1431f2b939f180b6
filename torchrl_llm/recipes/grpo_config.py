"""Complete configuration of the GRPO recipes: invalid combinations, and loading."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

import torch

from torchrl_llm._settings import ensure, naming, own
from torchrl_llm.data.scoring import TokenScorer, TokenScores
from torchrl_llm.objectives import CreditAssigner, PairLoss, PolicyGradientLoss
from torchrl_llm.recipes import groups
from torchrl_llm.recipes import objective_groups as objective
from torchrl_llm.recipes.agent_group import AgentConfig
from torchrl_llm.recipes.curriculum_config import CurriculumConfig
from torchrl_llm.recipes.other_names import RENAMED
from torchrl_llm.recipes.shared_keys import SampledConfig
from torchrl_llm.recipes.strict_config import from_mapping, valid_keys
from torchrl_llm.recipes.tasks import task_class
from torchrl_llm.trainers.run_config import LoggingConfig


class GRPOGroups(SampledConfig):
    """Settings that ``grpo-sync.py`` and ``grpo-async.py`` share."""

    curriculum: CurriculumConfig
    inference_model: groups.EngineConfig
    ref_model: groups.RefModelConfig
    loss: objective.LossConfig
    advantage: objective.AdvantageConfig
    agent: AgentConfig
    correction: objective.CorrectionConfig
    reward: objective.RewardConfig
    filter: objective.FilterConfig
    logging: LoggingConfig = own(experiment_name="grpo")

    @property
    def merges(self) -> str | None:
        """The key that makes a sampler get merged whole weights; ``None`` if no key does."""
        return "this recipe, which sends whole weights to its collectors"

    @property
    def num_players(self) -> int:
        """Rows per episode: more than one if several players share an episode."""
        return task_class(self.env.dataset).num_players(self.env.options)

    @property
    def group_size(self) -> int:
        """Responses that are compared: the responses of one player to a prompt."""
        return self.env.repeats // self.num_players

    @property
    def stores_proximal(self) -> bool:
        """Whether the trainer's log-probs from before the first update must be kept.

        A correction compares the sampler's log-probs with them. If a batch is used for only one
        update, the loss computes the same log-probs anyway.
        """
        return self.correction.enabled and self.updates_per_batch > 1

    @property
    def needs_reference(self) -> bool:
        """Whether anything reads the log-probs of the reference policy."""
        kl = self.train.kl_to_ref_coeff > 0 or self.reward.kl_coeff > 0
        return kl or self.loss.compares_pairs

    def build_loss(self, actor: TokenScorer) -> PolicyGradientLoss | PairLoss:
        """The configured loss over the sampled tokens of every turn.

        Args:
            actor: the policy.

        Raises:
            ConfigError: impossible arguments of the loss, or arguments without effect.
        """
        if self.loss.compares_pairs:
            return self.loss.build(actor)
        given: dict[str, Any] = {
            "masking_strategy": "rlhf",
            "kl_to_ref_coeff": self.train.kl_to_ref_coeff or None,
            "correction": self.correction.build(stored=self.stores_proximal),
        }
        options = self.loss.options
        if options.get("aggregation") == "constant" and options.get("constant_length") is None:
            given["constant_length"] = self.inference_model.max_tokens
        return self.loss.build(actor, **given)

    def build_credit(self) -> CreditAssigner:
        """The configured advantage estimator, with the settings of ``filter`` for groups.

        Raises:
            ConfigError: impossible arguments of the estimator, or a filter that it does not
                support.
        """
        keep, bounds = self.filter.zero_variance == "keep", self.filter.return_bounds
        if self.advantage.compares_group:
            kept = {"keep_zero_variance": keep, "keep_return_bounds": bounds}
            return self.advantage.build(self.group_size, **kept)
        advice = "it does not compare the responses to one prompt"
        ensure(keep, f"filter.zero_variance has no effect, for {advice}")
        ensure(bounds is None, f"filter.return_bounds has no effect, for {advice}")
        return self.advantage.build()

    def __post_init__(self) -> None:
        super().__post_init__()
        size, group = self.train.optim_batch_size, self.env.repeats
        if size is not None:
            ensure(
                self.rows_per_batch % size == 0,
                f"train.optim_batch_size={size} does not divide the batch of "
                f"{self.rows_per_batch} responses (train.prompts_per_batch="
                f"{self.train.prompts_per_batch} x env.repeats={group})",
            )
            ensure(
                size % group == 0,
                f"env.repeats={group} does not divide train.optim_batch_size={size}: a group would "
                "be cut over two optimizer steps",
            )
        ensure(
            self.ref_model == groups.RefModelConfig() or self.needs_reference,
            "ref_model has no effect without train.kl_to_ref_coeff or reward.kl_coeff above 0, or "
            "a loss of pairs",
        )
        ensure(
            self.ref_model.num_devices == 0
            or self.ref_model.name is not None
            or not self.train_model.lora.enabled,
            "ref_model.num_devices has no effect with LoRA: the reference is the policy itself, "
            "with its adapters off",
        )
        ensure(
            self.model.quantization is None or self.merges is None,
            f"model.quantization={self.model.quantization} does not go with {self.merges}: an "
            "adapter is not merged into quantized weights; choose grpo-sync.py with "
            "weight_sync.type=adapter",
        )
        players = self.num_players
        ensure(
            group % players == 0,
            f"env.repeats={group} counts rows, and an episode of {self.env.dataset} has {players}, "
            "one for each player: choose a multiple",
        )
        ensure(
            self.group_size >= 2 or not self.advantage.compares_group,
            f"env.repeats must be at least {2 * players} for advantage={self.advantage.type}, "
            f"which compares the responses to one prompt; got {group}",
        )
        ensure(
            players == 1 or self.eval.repeats == 1,
            f"eval.repeats={self.eval.repeats} does not go with env.dataset={self.env.dataset}, "
            f"whose {players} players share an episode",
        )
        self._check_credit()
        self._check_pairs()
        cache, longest = self.reward.overlong_cache, self.inference_model.max_tokens
        ensure(
            cache is None or cache < longest,
            f"reward.overlong_cache={cache} must be below inference_model.max_tokens={longest}",
        )
        ensure(
            (self.loss.type == "ppo") == (self.advantage.type == "gae"),
            f"loss={self.loss.type} does not go with advantage={self.advantage.type}: the critic "
            "whose values advantage=gae reads is trained by loss=ppo, towards targets that only "
            "advantage=gae writes",
        )
        ensure(
            self.loss.options.get("aggregation") != "none",
            "loss.aggregation=none leaves nothing to call backward on",
        )
        ensure(
            self.train.parallel == "none" or self.ref_model.num_devices == 0,
            "ref_model.num_devices=1 needs a GPU next to that of each rank, and with "
            f"train.parallel={self.train.parallel} that is another rank's",
        )
        ensure(
            not (self.train_model.dtype == "bfloat16" and self.train.mixed_precision == "float32"),
            "train_model.dtype=bfloat16 cannot train with train.mixed_precision=float32",
        )
        # The constructors check the combinations of their arguments.
        parts = {"loss": partial(self.build_loss, _NoActor()), "advantage": self.build_credit}
        for group, build in (parts | {"agent": self.agent.build}).items():
            with naming(f"{group}={getattr(self, group).type}"):
                build()

    def _check_credit(self) -> None:
        type_, reward, options = self.advantage.type, self.reward, self.advantage.options
        size = options.get("batch_size")
        ensure(
            size is None or (size > 0 and self.rows_per_batch % size == 0),
            f"advantage.batch_size={size} does not divide the batch of {self.rows_per_batch} "
            "responses (train.prompts_per_batch x env.repeats): a step would complete more rows "
            "than it has room for",
        )
        changed = [
            f"reward.{name}"
            for name, is_on in (
                ("overlong_cache", reward.overlong_cache is not None),
                ("cut_penalty", reward.cut_penalty > 0),
                ("kl_coeff", reward.kl_coeff > 0),
            )
            if is_on
        ]
        parts = ["reward.components"] if reward.changes_the_reward else []
        ensure(
            type_ != "constant" or not changed + parts,
            f"{' and '.join(changed + parts)} without effect: advantage=constant reads no reward",
        )
        ensure(
            type_ != "spo" or not changed,
            f"{' and '.join(changed)} would take rewards below 0, and advantage=spo tracks rates "
            "of success in [0, 1]; train.kl_to_ref_coeff puts a divergence into the loss",
        )
        by_token = self.advantage.reads_tokens
        ensure(
            reward.kl_reduction != "token"
            or by_token
            or (type_ == "batch" and not self.advantage.compares_group),
            f"reward.kl_reduction=token is the same as sum with advantage={type_}, which adds up "
            "the rewards of a response",
        )

    def check_sampling_elsewhere(self) -> None:
        """Reject settings that do not go with collectors in other processes.

        Raises:
            ConfigError: such a setting.
        """
        ensure(
            self.weight_sync.in_flight != "keep" or self.inference_model.backend == "vllm",
            "weight_sync.in_flight=keep changes weights in the middle of a response, which needs "
            "inference_model.backend=vllm",
        )
        ensure(
            self.advantage.type != "spo",
            "advantage=spo follows the policy that samples in this process; grpo-sync.py has it",
        )

    def _check_pairs(self) -> None:
        """Check that a loss of pairs gets both answers of a pair, complete, in one update."""
        loss, train, filter_ = self.loss, self.train, self.filter
        which = f"advantage={self.advantage.type}"
        ensure(
            not self.advantage.makes_pairs or filter_.zero_variance == "keep",
            f"filter.zero_variance has no effect with {which}, which trains two answers of each "
            "group, and groups without a difference not at all",
        )
        if not loss.compares_pairs:
            return
        which = f"with loss={loss.type}"
        ensure(
            self.advantage.makes_pairs,
            f"loss={loss.type} compares the best and the worst answer of a group: choose "
            f"advantage=best_worst, got {self.advantage.type}",
        )
        held = f"{which}: loss.beta holds the policy to its reference"
        train.only("kl_to_ref_coeff", False, held)
        ensure(not self.correction.enabled, f"correction has no effect {which}")
        options = self.advantage.options
        ensure(
            not options["positive_only"] and options["keep_zero_advantage"],
            f"advantage.positive_only and keep_zero_advantage have no effect {which}, which reads "
            "no advantages",
        )
        parts = "which may leave one answer of a pair without the other"
        ensure(
            train.optim_batch_size is None,
            f"train.optim_batch_size does not go {which}, {parts}: leave it out",
        )
        stale = getattr(train, "on_stale", None)  # of collectors that run during training
        for key, value in (("filter.truncated", filter_.truncated), ("train.on_stale", stale)):
            ensure(value != "mask", f"{key}=mask does not go {which}, {parts}: choose drop")
        ensure(
            not self.inference_model.arguments["record_support"],
            f"inference_model.top_p, top_k and min_p do not go {which}, which compares log-probs "
            "over the whole vocabulary",
        )


class GRPOConfig(GRPOGroups):
    """All settings of ``grpo-sync.py``."""

    inference_model: groups.SleepingEngineConfig
    weight_sync: groups.WeightSyncConfig

    @property
    def merges(self) -> str | None:
        """See :attr:`GRPOGroups.merges`."""
        if self.inference_model.sleep and self.weight_sync.type != "shared":
            return "inference_model.sleep=true, after which an engine gets whole weights"
        type_ = self.weight_sync.type
        is_whole = type_ in ("shared", "load", "delta", "files")
        return f"weight_sync.type={type_}, which sends whole weights" if is_whole else None

    def __post_init__(self) -> None:
        super().__post_init__()
        ensure(
            self.model.quantization != "8bit" or self.inference_model.backend != "vllm",
            "model.quantization=8bit does not go with inference_model.backend=vllm, which rounds "
            "to four bits only while it reads weights; choose 4bit",
        )
        if self.train.parallel != "none":
            self._check_parallel()
        sync, lora = self.weight_sync, self.train_model.lora.enabled
        ensure(
            self.inference_model.backend != "transformers" or sync == groups.WeightSyncConfig(),
            "weight_sync has no effect with inference_model.backend=transformers, which samples "
            "with the trained module itself",
        )
        ensure(
            lora or sync.type != "adapter",
            "weight_sync.type=adapter needs train_model.lora.enabled=true",
        )
        ensure(
            not (lora and sync.type in ("shared", "delta")),
            f"weight_sync.type={sync.type} is for training without LoRA; with it choose adapter, "
            "or load for merged weights",
        )
        ensure(
            not self.inference_model.sleep or sync.type in ("auto", "load", "shared"),
            f"weight_sync.type={sync.type} does not go with inference_model.sleep=true: an engine "
            "that sleeps forgets its weights, and type=load brings all of them (with LoRA merged); "
            "with type=shared it keeps them",
        )
        ensure(
            self.inference_model.num_devices == 1 or sync.type != "shared",
            f"inference_model.num_devices={self.inference_model.num_devices} spreads the engine "
            "over processes, which cannot have the trainer's memory (weight_sync.type=shared); "
            "choose load or delta",
        )

    def _check_parallel(self) -> None:
        """Check settings of parallel training: each rank has its own rows, tracker and engine."""
        parallel, kind = f"train.parallel={self.train.parallel}", self.advantage.type
        ensure(
            kind != "spo",
            f"advantage=spo with {parallel} would know on one rank only how a prompt went; choose "
            "another advantage, or train.parallel=none",
        )
        ensure(
            kind not in ("batch", "hybrid", "gae") or self.advantage.options["normalize"] == "none",
            f"advantage={kind} with {parallel} would divide by the deviation of one rank's rows, "
            "not of the step's: choose advantage.normalize=none, an advantage in the group, or "
            "grpo-async.py, where one rank has the rows of all",
        )
        ensure(
            self.reward.kl_target is None,
            f"reward.kl_target with {parallel} would steer another reward.kl_coeff on each rank; "
            "leave it out for a constant one",
        )
        ensure(
            not (self.curriculum.follows_results and self.filter.resamples),
            f"filter.zero_variance=resample with {parallel} and curriculum.order="
            f"{self.curriculum.order}: ranks that draw unequally often would share prompts; "
            "choose drop, or another order",
        )
        ensure(
            self.inference_model.num_devices == 1,
            f"inference_model.num_devices={self.inference_model.num_devices} with {parallel}: each "
            "rank has an engine of its own on its GPU; choose 1, or grpo-async.py",
        )
        ensure(
            self.train.parallel != "fsdp2" or self.weight_sync.type != "shared",
            "weight_sync.type=shared with train.parallel=fsdp2: an engine cannot sample with a "
            "part of the weights; choose load or delta",
        )


class AsyncGRPOConfig(GRPOGroups):
    """All settings of ``grpo-async.py``."""

    train: groups.AsyncTrainConfig
    train_model: groups.AsyncTrainModelConfig
    weight_sync: groups.AsyncWeightSyncConfig
    ray: groups.RayConfig

    @property
    def rows_per_claim(self) -> int:
        """Responses that a collector samples at once, in whole groups."""
        prompts = self.ray.prompts_per_claim
        return (prompts or self.train.prompts_per_batch // self.ray.num_collectors) * (
            self.env.repeats
        )

    @property
    def gpus_per_collector(self) -> float:
        """GPUs that each collector reserves."""
        if self.ray.gpus_per_collector is not None:
            return self.ray.gpus_per_collector
        on_cpu = self.train.device == "cpu" or not torch.cuda.is_available()
        return 0 if on_cpu else self.inference_model.num_devices

    def __post_init__(self) -> None:
        super().__post_init__()
        prompts, ray = self.train.prompts_per_batch, self.ray
        share = "train.prompts_per_batch={} is not a multiple of {}: a step would get more rows, or"
        share = share.format(prompts, "{}") + " fewer, than it has room for"
        if ray.prompts_per_claim is None:
            ensure(
                prompts % ray.num_collectors == 0,
                share.format(f"ray.num_collectors={ray.num_collectors}")
                + "; or give ray.prompts_per_claim",
            )
        else:
            ensure(
                prompts % ray.prompts_per_claim == 0,
                share.format(f"ray.prompts_per_claim={ray.prompts_per_claim}"),
            )
        self.check_sampling_elsewhere()
        if self.weight_sync.type in ("nccl", "ipc"):
            self._check_transfer(self.weight_sync.type)

    def _check_transfer(self, type_: str) -> None:
        ensure(
            self.inference_model.backend == "vllm" and self.gpus_per_collector > 0,
            f"weight_sync.type={type_} goes from GPU to GPU by vLLM's transfer: it needs GPUs, and "
            "inference_model.backend=vllm; choose ray or files",
        )
        ensure(
            (type_ == "ipc") == (self.train_model.num_devices == 0),
            "weight_sync.type=nccl joins the trainer's GPU with others (train_model.num_devices=1),"
            " and ipc processes that share its GPU (train_model.num_devices=0)",
        )
        ensure(
            type_ == "nccl" or self.train.parallel == "none",
            f"weight_sync.type=ipc with train.parallel={self.train.parallel}: collectors share the "
            "GPU of one rank; choose nccl, ray or files",
        )


class _NoActor(TokenScorer):
    """Placeholder for the policy while the arguments of a loss are checked."""

    def token_scores(self, *args: Any, **kwargs: Any) -> TokenScores:
        raise RuntimeError("this actor scores nothing")


Config = TypeVar("Config", bound=GRPOGroups)


def load_config(values: Mapping[str, Any], schema: type[Config] = GRPOConfig) -> Config:
    """Validate a composed configuration.

    Args:
        values: nested mapping, for instance the ``DictConfig`` of Hydra.
        schema: :class:`GRPOConfig` or :class:`AsyncGRPOConfig`.

    Raises:
        ConfigError: an unknown or renamed key, a value of the wrong type, or an invalid
            combination.

    Example:
        >>> load_config({"train": {"max_steps": 5}, "optimizer": {"lr": 0}}).train.max_steps
        5
        >>> load_config({"train": {"optim_batch_size": 12}})
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.ConfigError: train.optim_batch_size=12 does not divide the batch of 128 \
responses (train.prompts_per_batch=16 x env.repeats=8)
    """
    return from_mapping(schema, values, renamed=RENAMED | _elsewhere(schema))


def _elsewhere(schema: type[GRPOGroups]) -> dict[str, str]:
    """Messages for keys of the other recipe."""
    other, name = {
        GRPOConfig: (AsyncGRPOConfig, "grpo-async.py"),
        AsyncGRPOConfig: (GRPOConfig, "grpo-sync.py"),
    }[schema]
    own = set(valid_keys(schema))
    return {key: f"a key of {name}" for key in valid_keys(other) if key not in own}
