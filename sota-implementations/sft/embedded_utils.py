"""Parts of embedded.py: configuration, tokenizer, model, demonstrations, figures.

The library itself does not need this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import torch
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from torchrl_llm._checked import Ge, Gt, In
from torchrl_llm._settings import Count, Group, ensure, own
from torchrl_llm.data import ChatHistory, History
from torchrl_llm.data.text.families import BUILTIN_TEMPLATES
from torchrl_llm.envs import ArithmeticEnv
from torchrl_llm.envs.datasets.number_tasks import (
    CalculatorEnv,
    addition_pairs,
    addition_problem,
    calculator_problem,
    calculator_problems,
)
from torchrl_llm.errors import ConfigError
from torchrl_llm.evaluation import Evaluation, evaluate
from torchrl_llm.modules import TransformersWrapper
from torchrl_llm.recipes import OptimizerConfig
from torchrl_llm.recipes.strict_config import from_mapping
from torchrl_llm.tools.calculator import Calculator

# Longest answer: three digits and the end of the turn; the rest is for wrong answers.
_MAX_ANSWER_TOKENS = 8
_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Words of the template and of the task become one token each; everything else stays bytes.
_WORDS = ["system", "user", "assistant", "What", " is", "Use", " the", " calculator"]
# With these words a call of the calculator takes 27 tokens instead of 79.
_WORDS += [
    "<tool",
    "tool",
    "_call",
    "_response",
    '{"',
    "name",
    '":',
    ' "',
    "calculator",
    '",',
    "arguments",
]
_WORDS += [' {"', "expression", '"}}\n', "</", ">\n"]


class ModelConfig(Group, key="model"):
    """Shape of the trained Llama.

    Attributes:
        hidden_size: width.
        intermediate_size: width of the feed-forward layers.
        num_layers: layers.
        num_heads: attention heads.
        num_key_value_heads: heads of keys and values.
        max_length: context, tokens.
        initializer_range: standard deviation of the initial weights. At 0.08, near ``hidden_size **
            -0.5``, the model learns several times sooner than at the usual 0.02.
    """

    hidden_size: Count = 128
    intermediate_size: Count = 256
    num_layers: Count = 2
    num_heads: Count = 4
    num_key_value_heads: Count = 2
    max_length: Count = 2048
    initializer_range: Annotated[float, Gt(0)] = 0.08

    def __post_init__(self) -> None:
        super().__post_init__()
        ensure(
            self.hidden_size % self.num_heads == self.num_heads % self.num_key_value_heads == 0,
            f"model.num_key_value_heads={self.num_key_value_heads} must divide model.num_heads="
            f"{self.num_heads}, and that model.hidden_size={self.hidden_size}",
        )


class DataConfig(Group, key="data"):
    """Pupils whose answers are demonstrated.

    Attributes:
        lessons: share of the run, at its start, in which every pupil is careful.
        forgetful: after the lessons, the share of answers by pupils who never carry.
        rough: after the lessons, the share of answers by pupils who round to tens; the others are
            careful.
        calls: conversations with the calculator in each step, besides the sums.
        hasty: after the lessons, the share of these conversations whose pupil answers without a
            call. Rows have equal weight for any length, so a token of these short rows counts eight
            times as much as a token of a call.
        adding: after the lessons, the share of products for which the pupil calls the calculator
            with a sum.
    """

    lessons: Annotated[float, In("[0, 1]")] = 0.6
    forgetful: float = 0.40
    rough: float = 0.45
    calls: Annotated[int, Ge(0)] = 32
    hasty: float = 0.05
    adding: float = 0.55

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.forgetful, self.rough) < 0 or self.forgetful + self.rough > 1:
            raise ConfigError(
                "data.forgetful and data.rough are shares of the answers, together at most 1, got "
                f"{self.forgetful} and {self.rough}"
            )
        if min(self.hasty, self.adding) < 0 or self.hasty + self.adding > 1:
            raise ConfigError(
                "data.hasty and data.adding are shares of the calls, together at most 1, got "
                f"{self.hasty} and {self.adding}"
            )


class TrainConfig(Group, key="train"):
    """The training loop.

    Attributes:
        max_steps: optimizer steps.
        batch_size: conversations per step.
        num_threads: CPU threads of torch; fixed, because the order of summation depends on it.
    """

    max_steps: Count = 1400
    batch_size: Count = 64
    num_threads: Count = 1


class EvalConfig(Group, key="eval"):
    """Final accuracy.

    Attributes:
        num_prompts: held-out problems; 0 for no evaluation.
        batch_size: problems that are answered together.
    """

    num_prompts: Annotated[int, Ge(0)] = 512
    batch_size: Count = 256


class EmbeddedConfig(Group):
    """All settings of ``embedded.py``.

    Attributes:
        output: folder of the finished model; ``None`` for ``model`` in the run's folder.
        seed: seeds weights and demonstrations.
    """

    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig = own(
        lr=3e-3, weight_decay=0.1, betas=(0.9, 0.98), scheduler="linear", warmup_steps=0.036
    )
    eval: EvalConfig
    output: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.optimizer.check_warmup(self.train.max_steps)


def load_config(values: Mapping[str, Any]) -> EmbeddedConfig:
    """Validate a composed configuration; errors for unknown keys name the nearest valid key."""
    return from_mapping(EmbeddedConfig, values)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that encodes any text, each digit on its own."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,  # more than the number of merges in the words
        min_frequency=1,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_WORDS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=BUILTIN_TEMPLATES["qwen"],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def make_model(config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained Llama for a tokenizer, in float32."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_length,
            initializer_range=config.initializer_range,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )


def careful(first: int, second: int) -> int:
    """The correct sum."""
    return first + second


def forgetful(first: int, second: int) -> int:
    """The last digit of each column, without a carry: 37+85=12."""
    return (first // 10 + second // 10) % 10 * 10 + (first % 10 + second % 10) % 10


def rough(first: int, second: int) -> int:
    """The sum rounded to tens, halves up: 37+85=120."""
    return (first + second + 5) // 10 * 10


def demonstrations(config: EmbeddedConfig) -> Iterator[TensorDict]:
    """The conversations of each optimizer step, from the seed alone.

    Yields:
        Rows ``[batch_size + calls]`` with ``("history", "full")``: sums and problems for the
        calculator, of the training splits, each with the answer of a random pupil.
    """
    generators = (torch.Generator().manual_seed(config.seed + part) for part in range(2))
    parts = zip(_sums(config, next(generators)), _calls(config, next(generators)), strict=True)
    for sums, calls in parts:
        chats = [*sums, *calls]
        history = ChatHistory(full=History.from_chats(chats), batch_size=[len(chats)])
        yield TensorDict({"history": history}, batch_size=[len(chats)])


def _sums(config: EmbeddedConfig, generator: torch.Generator) -> Iterator[list[list[dict]]]:
    pairs = addition_pairs("train")
    pupils = [careful, forgetful, rough]
    shares = torch.tensor([0.0, config.data.forgetful, config.data.rough])
    shares[0] = 1 - shares.sum()
    size = config.train.batch_size
    for step in range(config.train.max_steps):
        in_lessons = step < config.data.lessons * config.train.max_steps
        now = torch.tensor([1.0, 0.0, 0.0]) if in_lessons else shares
        problems = torch.randint(len(pairs), (size,), generator=generator).tolist()
        chosen = torch.multinomial(now, size, replacement=True, generator=generator).tolist()
        yield [
            _chat(*pairs[problem], pupils[pupil](*pairs[problem]))
            for problem, pupil in zip(problems, chosen, strict=True)
        ]


def _calls(config: EmbeddedConfig, generator: torch.Generator) -> Iterator[list[list[dict]]]:
    numbers = calculator_problems("train")
    size, data = config.data.calls, config.data
    for step in range(config.train.max_steps):
        in_lessons = step < data.lessons * config.train.max_steps
        problems = numbers[torch.randint(len(numbers), (size,), generator=generator)].tolist()
        mood = torch.rand(size, generator=generator).tolist()
        yield [
            _conversation(
                calculator_problem(problem),
                hasty=not in_lessons and drawn < data.hasty,
                adding=not in_lessons and data.hasty <= drawn < data.hasty + data.adding,
            )
            for problem, drawn in zip(problems, mood, strict=True)
        ]


def _conversation(row: Mapping[str, str], *, hasty: bool, adding: bool) -> list[dict]:
    """A problem for the calculator, and a pupil's solution."""
    asked = [
        {"role": "system", "content": CalculatorEnv.SYSTEM_PROMPT},
        {"role": "user", "content": row["query"]},
    ]
    expression, answer = row["expression"], row["answer"]
    if hasty:  # answers with the first number
        return [*asked, {"role": "assistant", "content": expression[:3]}]
    if adding and "*" in expression:
        first, second = expression.split("*")
        expression, answer = f"{first}+{second}", str(int(first) + int(second))
    function = {"name": Calculator.name, "arguments": {"expression": expression}}
    return [
        *asked,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": answer},
    ]


def _chat(first: int, second: int, answer: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": addition_problem(first, second)["query"]},
        {"role": "assistant", "content": str(answer)},
    ]


def measure(policy: TransformersWrapper, config: EvalConfig) -> dict[str, Evaluation]:
    """Held-out accuracy of sampled answers (temperature 1) and of greedy ones, in both tasks."""
    tasks = {"sums": (ArithmeticEnv, _MAX_ANSWER_TOKENS), "calculator": (CalculatorEnv, 40)}
    results = {}
    for task, (env_class, max_new_tokens) in tasks.items():
        env = env_class(
            split="test",
            shuffle=False,
            num_envs=min(config.batch_size, config.num_prompts),
            tokenizer=policy.tokenizer,
        )
        for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
            arguments = {"max_new_tokens": max_new_tokens, "temperature": temperature}
            results[f"{task}, {name}"] = evaluate(
                env,
                policy.get_new_version(generate_kwargs=arguments),
                num_prompts=config.num_prompts,
                max_turns=env.max_turns(),
            )
    return results
