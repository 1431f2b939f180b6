"""The wrong inputs of ``wrong_inputs.py``: what is typed, and what must be said about it."""

from __future__ import annotations

import shlex
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What an input is to be answered with."""

    KEY = "refused before heavy imports"
    REFUSED = ""
    THEIRS = "the traceback is of the user's own code"
    PYTHON = "raised in the user's program"
    GOES_ON = "said, and goes on"


class Case(NamedTuple):
    """A wrong input.

    Attributes:
        group: heading in the table.
        command: as typed into a shell.
        says: patterns that the answer has, spaces and line ends made equal.
        kind: of answer.
    """

    group: str
    command: str
    says: tuple[str, ...]
    kind: Kind = Kind.REFUSED


FILES = {
    "qa.csv": "question,answer\n" + "".join(f"What is {n}+{n}?,{n + n}\n" for n in range(10, 50)),
    "bare.csv": "prompt\n" + "".join(f"Say {n}.\n" for n in range(40)),
    "odd.csv": "riddle,result\n" + "".join(f"What is {n}+1?,{n + 1}\n" for n in range(40)),
    "empty.jsonl": "",
    "only_head.csv": "question,answer\n",
    "broken.jsonl": '{"question": "1+1?", "answer": "2"}\n{"question": "1+2?", "answer": \n',
    "mixed.jsonl": '{"question": "1+1?", "answer": "2"}\n' * 20 + '{"prompt": "1+2?"}\n' * 20,
    "long.csv": "question,answer\n" + f"{'What is 1+1? ' * 400},2\n" * 40,
    "notes.txt": "nothing that has columns\n",
    "a_file": "",
    "texts/readme.md": "no table\n",
    "no_run/notes.txt": "nothing\n",
    "headless/metrics.csv": "",
    "only_names/metrics.csv": "train/step,train/reward\n",
    "r_typo.py": "def exactly(response, answer):\n    return response.strp() == answer\n",
    "r_syntax.py": "def exactly(response, answer)\n    return 1.0\n",
    "r_import.py": "import numpyy\n\ndef exactly(response, answer):\n    return 1.0\n",
    "r_raises.py": "LIMIT = 1 / 0\n\ndef exactly(response, answer):\n    return 1.0\n",
    "r_fine.py": "def exactly(response, answer):\n    return response.strip() == answer\n",
    "r_none.py": "def nothing(response, answer):\n    response.strip() == answer\n",
    "r_text.py": "def text(response, answer):\n    return 'good'\n",
    "r_nan.py": "def nan(response, answer):\n    return float('nan')\n",
    "r_args.py": "def wrong(response, answer, alpha, beta):\n    return 1.0\n",
    "r_noargs.py": "def wrong():\n    return 1.0\n",
    "r_trl.py": "def reward(prompts, completions, **kwargs):\n    return [1.0] * 8\n",
    "r_number.py": "exactly = 1.0\n",
    "t_untyped.py": "def double(x):\n    return 2 * x\n",
    "t_number.py": "double = 2\n",
    "t_syntax.py": "def double(x: int) -> int\n    return 2 * x\n",
    "math.jsonl": '{"problem": "Half of $1$?", "answer": "0.5"}\n' * 8,
}

GRPO = "torchrl-llm train grpo"
DATA = f"{GRPO} reward=exact train.max_steps=1 train.prompts_per_batch=2"
SHORT = "train.max_steps=1 train.prompts_per_batch=2 eval.num_prompts=2"
OWN = f"{GRPO} data=qa.csv {SHORT}"


def _keys() -> list[Case]:
    """Names of TRL, verl and others; each answer names our key."""
    meant = {
        "learning_rate=1e-6": "optimizer.lr",
        "num_generations=8": "env.repeats",
        "max_steps=10": "train.max_steps",
        "use_vllm=true": "inference_model.backend=vllm",
        "beta=0.04": "train.kl_to_ref_coeff",
        "per_device_train_batch_size=8": "train.micro_token_budget",
        "max_completion_length=256": "inference_model.max_tokens",
        "num_train_epochs=3": "train",
        "output_dir=out": "hydra.run.dir",
        "loss_type=dapo": "loss",
        "report_to=wandb": "logging.backend",
        "gradient_accumulation_steps=4": "train.micro_token_budget|train.optim_batch_size",
        "actor_rollout_ref.rollout.n=5": "env.repeats",
        "actor_rollout_ref.actor.optim.lr=1e-6": "optimizer.lr",
        "trainer.total_epochs=15": "train.max_steps",
        "algorithm.adv_estimator=grpo": "advantage",
        "data.train_files=qa.csv": "data.source",
        "trainer.save_freq=10": "checkpoint.interval",
        # typing errors
        "train.max_step=10": "train.max_steps",
        "optimzer.lr=1e-4": "optimizer.lr",
        "env.repeat=4": "env.repeats",
        "inference_model.temprature=0.7": "inference_model.temperature",
        "loss.epsilon_hgih=0.3": "loss.clip_epsilon",
        "banana=1": "--help lists all keys",
        "ray.num_collectors=2": "grpo-async",
        # values of groups
        "loss=gsop": "'gspo'",
        "env=gsmk8": "'gsm8k'",
        "advantage=gruop": "'group'",
        "loss=banana": "There are cispo, dapo",
        "loss.type=gspo": "loss=gspo",
        "train=100": "train.max_steps",
        "loss=gspo loss.delta=0.1": "loss|no effect",
    }
    cases = [Case("keys", f"{GRPO} {typed}", (said,), Kind.KEY) for typed, said in meant.items()]
    others = [
        ("torchrl-llm train grpo-async num_generations=8", "env.repeats"),
        ("torchrl-llm train distillation teacher.model=big", "teacher has by_domain, name"),
        ("torchrl-llm train expert-iteration select.topk=4", "select.topk_size"),
        ("torchrl-llm train imitate learning_rate=1e-3", "lr"),
        ("torchrl-llm evaluate task=gsm8k", "tasks"),
        ("torchrl-llm evaluate eval.num_prompt=8", "eval.num_prompts"),
    ]
    return cases + [Case("keys", command, (said,), Kind.KEY) for command, said in others]


def _cases(group: str, *rows: tuple, kind: Kind = Kind.REFUSED) -> list[Case]:
    return [Case(group, command, tuple(said), kind) for command, *said in rows]


def _python(*lines: str) -> str:
    return f"python -c {shlex.quote(chr(10).join(lines))}"


IMPORT = "from torchrl_llm import GRPO"
TRAIN = 'train={"max_steps": 1, "prompts_per_batch": 2}, eval={"num_prompts": 2}'

CASES = [
    *_keys(),
    *_cases(
        "commands",
        ("torchrl-llm trian grpo", "'train'"),
        ("torchrl-llm train grop", "'grpo'"),
        ("torchrl-llm train ppo", "There are grpo", "loss=ppo"),
        ("torchrl-llm list loses", "losses"),
        (f"{GRPO} foo", "foo", "key=value|KEY=VALUE"),
        (f"{GRPO} train.max_steps=", "train.max_steps", "whole number|int"),
        (f"{GRPO} --max_steps 10", "max_steps"),
        (f"{GRPO} --train.max_steps=10", "train.max_steps"),
        (f"{GRPO} env.tools=[calculator", "env.tools"),
        (f"{GRPO} train.max_steps = 5", "train.max_steps"),
        (f"{GRPO} --config-name grop", "grop"),
    ),
    *_cases(
        "values",
        (f"{GRPO} train.max_steps=-5", "train.max_steps", "-5"),
        (f"{GRPO} train.max_steps=ten", "train.max_steps", "ten"),
        (f"{GRPO} optimizer.lr=abc", "optimizer.lr", "abc"),
        (f"{GRPO} optimizer.lr=nan", "optimizer.lr", "nan"),
        (f"{GRPO} optimizer.name=Adamw", "optimizer.name", "AdamW"),
        (f"{GRPO} env.repeats=1", "env.repeats"),
        (f"{GRPO} train.prompts_per_batch=0", "train.prompts_per_batch"),
        (f"{GRPO} inference_model.temperature=nan", "inference_model.temperature"),
        (f"{GRPO} inference_model.max_tokens=100000", "max_tokens", "context"),
        (f"{GRPO} train.device=cuda:7", "train.device|CUDA"),
        (f"{GRPO} train_model.dtype=fp16", "train_model.dtype", "bfloat16"),
        (f"{GRPO} logging.backend=[tensorbord]", "tensorboard"),
        (f"{GRPO} logging.backend=csv,wandb", "logging.backend"),
        (f"{GRPO} loss.clip_epsilon=-1", "clip_epsilon"),
        (f"{GRPO} inference_model.max_model_len=100", "inference_model.backend"),
        (f"{GRPO} train_model.lora.r=4", "train_model.lora.enabled"),
        (f"{GRPO} ref_model.name=nowhere train.kl_to_ref_coeff=0.1", "ref_model.name"),
        (f"{GRPO} optimizer.warmup_steps=1000", "warmup_steps"),
    ),
    *_cases(
        "models",
        (f"{GRPO} model.name=./nowhere", "model.name", "nowhere"),
        (f"{GRPO} model.name=empty_folder", "model.name", "config.json|tokenizer"),
        (f"{GRPO} model.name=Qwen/Qwen2.5-0.5B-Instruct", "model.name", "offline|HF_HUB_OFFLINE"),
        (f"{GRPO} model.name=no_weights {SHORT}", "model.name|no_weights", "safetensors|weights"),
        (f"{GRPO} model.name=no_tokenizer {SHORT}", "tokenizer"),
        (f"{GRPO} model.name=encoder {SHORT}", "encoder|vit|ViT"),
        (f"{GRPO} model.name=broken_config {SHORT}", "broken_config", "config.json"),
        (f"{GRPO} model.name=a_file {SHORT}", "a_file"),
        (f"{GRPO} model.chat_template_name=banana {SHORT}", "chat_template_name", "qwen"),
    ),
    *_cases(
        "data",
        (f"{DATA} data=nothing.csv", "nothing.csv", "No such file"),
        (f"{DATA} data=empty.jsonl", "empty.jsonl"),
        (f"{DATA} data=only_head.csv", "only_head.csv"),
        (f"{DATA} data=broken.jsonl", "broken.jsonl", "(line |:)2"),
        (f"{DATA} data=odd.csv", "riddle", "data.prompt"),
        (f"{DATA} data=qa.csv data.answer=solution", "question", "answer", "data.answer"),
        (f"{DATA} data=qa.csv data.prompt=text", "question", "data.prompt"),
        (f"{DATA} data=texts", "texts"),
        (f"{DATA} data=notes.txt", "notes.txt", "CSV|csv"),
        (f"{DATA} data=mixed.jsonl", "mixed.jsonl, line 21", "question"),
        (f"{GRPO} data=bare.csv", "answer", "reward"),
        (f"{DATA} data=bare.csv", "prompt", "data.answer"),
        (f"{GRPO} data=bare.csv reward=r_fine.py:exactly", "data.answer"),
        (f"{DATA} data=long.csv {SHORT}", "context|max_prompt_length", "on_overlong"),
        (f"{GRPO} data=qa.csv env=gsm8k", "data", "env"),
        (f"{DATA} data=some/dataset", "some/dataset"),
        (f"{DATA} data=qa.csv data.eval_source=gone.csv", "gone.csv"),
        (f"{DATA} data=qa.csv train.prompts_per_batch=4 eval.num_prompts=5000", "held|eval"),
        (f"{GRPO} data.prompt=question", "data.source"),
        (f"{GRPO} env=gsm8k env.data_files=gone.jsonl", "gone.jsonl"),
        ("torchrl-llm train sft data=nothing.jsonl", "nothing.jsonl|data"),
        ("torchrl-llm train expert-iteration reward=exact data=nothing.csv", "nothing.csv"),
        ("torchrl-llm train distillation reward=exact data=nothing.csv", "teacher.name"),
    ),
    *_cases(
        "reward",
        (f"{OWN} reward=gone.py:exactly", "gone.py"),
        (f"{OWN} reward=r_fine.py:exact", "exactly"),
        (f"{OWN} reward=r_fine.py", "r_fine.py", ":exactly|FUNCTION|NAME|:name"),
        (f"{OWN} reward=exakt", "exact"),
        (f"{OWN} reward=r_args.py:wrong", "wrong", "alpha"),
        (f"{OWN} reward=r_noargs.py:wrong", "wrong"),
        (f"{OWN} reward=r_trl.py:reward", "completions", "response"),
        (f"{OWN} reward=r_number.py:exactly", "exactly"),
        (f"{OWN} reward=length", "longest", "reward.components.length"),
        (f"{OWN} reward.components.length.longst=3", "longest"),
        (f"{OWN} reward=r_none.py:nothing", "None"),
        (f"{OWN} reward=r_text.py:text", "good"),
        (f"{OWN} reward=r_nan.py:nan", "nan"),
    ),
    *_cases(
        "reward",
        (f"{OWN} reward=r_typo.py:exactly", "strp", "r_typo.py"),
        kind=Kind.THEIRS,
    ),
    *_cases(
        "reward",
        (f"{OWN} reward=r_syntax.py:exactly", "r_syntax.py", "line 1", "expected ':'"),
        (f"{OWN} reward=r_raises.py:exactly", "r_raises.py, line 1"),
        (f"{OWN} reward=r_import.py:exactly", "r_import.py", "numpyy"),
    ),
    *_cases(
        "tools",
        (f"{GRPO} env.tools=[calculater]", "calculator"),
        (f"{GRPO} env.tools=[gone.py:double]", "gone.py"),
        (f"{GRPO} env.tools=[t_number.py:double]", "double"),
        (f"{GRPO} env.tools=[t_untyped.py:double]", "double", "docstring|type|annotat"),
        (f"{GRPO} env.tools=[t_untyped.py:tripple]", "double"),
        (f"{GRPO} env.tools=[t_syntax.py:double]", "t_syntax.py", "line 1"),
        (f"{GRPO} env.tools=calculator", "env.tools"),
        (f"{GRPO} env.dataset=gone.module:Task", "gone"),
    ),
    *_cases(
        "folders",
        (
            f"{GRPO} {SHORT} hydra.run.dir=run && {GRPO} {SHORT} seed=7 hydra.run.dir=run "
            "checkpoint.resume=auto",
            "seed",
        ),
        (f"{GRPO} {SHORT} hydra.run.dir=run && {GRPO} {SHORT} hydra.run.dir=run", "resume"),
        (f"{GRPO} hydra.run.dir=a_file", "a_file"),
        (f"{GRPO} {SHORT} checkpoint.resume=yes", "checkpoint.resume", "auto"),
        (f"{GRPO} {SHORT} checkpoint.push_to_hub=name", "push_to_hub", "OWNER|/"),
        ("torchrl-llm evaluate model.name=no_run data=qa.csv reward=exact", "no_run"),
        ("torchrl-llm evaluate model.name=nowhere/run data=qa.csv reward=exact", "nowhere/run"),
        ("torchrl-llm evaluate tasks=[gsmk8]", "gsm8k"),
        ("torchrl-llm evaluate tasks=gsm8k data_files.gsm8k=gone.jsonl", "gone.jsonl|tasks"),
        ("torchrl-llm evaluate tasks=[gsm8k]", "gsm8k", "data_files|offline|hub"),
        ("torchrl-llm chat nowhere/run", "nowhere/run"),
        ("torchrl-llm chat no_run", "no_run"),
        ("echo hello | torchrl-llm chat --tool calculater", "calculator"),
        ("torchrl-llm chat --temperature hot", "temperature"),
        ("torchrl-llm plot nowhere", "nowhere"),
        ("torchrl-llm plot no_run", "no_run"),
        ("torchrl-llm plot a_file", "a_file"),
        ("torchrl-llm plot headless", "headless"),
        ("torchrl-llm plot only_names", "only_names"),
        (
            f"{GRPO} {SHORT} hydra.run.dir=run && torchrl-llm plot run --metric reward",
            "train/reward",
        ),
        (f"{GRPO} {SHORT} hydra.run.dir=run && torchrl-llm plot run --by lr", "optimizer.lr"),
        ("torchrl-llm push nowhere me/model", "nowhere"),
        ("torchrl-llm push no_run me/model", "no_run"),
        ("torchrl-llm push no_weights just_a_name", "just_a_name"),
        ("torchrl-llm train distillation loss.estimator=k3", "full_vocabulary"),
        ("torchrl-llm train distillation teacher.name=nowhere", "teacher.name"),
        ("torchrl-llm train distillation env.tools=[calculator]", "env.tools"),
        ("torchrl-llm train expert-iteration loss.beta=0.1", "loss.beta"),
        (
            "torchrl-llm train expert-iteration select.topk_size=20 env.repeats=4",
            "select.topk_size",
        ),
    ),
    *_cases(
        "Python",
        (_python(IMPORT, "GRPO(learning_rate=1e-5)"), "optimizer.lr"),
        (_python(IMPORT, 'GRPO(data="qa.csv", reward=3)'), "reward"),
        (_python(IMPORT, 'GRPO(data="qa.csv", promt="question")'), "prompt"),
        (
            _python(IMPORT, f'GRPO(data="qa.csv", prompt="text", reward="exact", {TRAIN}).train()'),
            "question",
            "data.prompt",
        ),
        (_python(IMPORT, 'GRPO(loss="gsop")'), "gspo"),
        (_python(IMPORT, 'GRPO(train={"max_step": 5})'), "train.max_steps"),
        (_python(IMPORT, 'GRPO(train={"max_steps": "many"})'), "train.max_steps"),
        (_python(IMPORT, 'GRPO(data=[], reward="exact").train()'), "data|rows"),
        (_python(IMPORT, 'GRPO(data=3, reward="exact")'), "data"),
        (_python(IMPORT, 'GRPO(data=[1, 2, 3], reward="exact").train()'), "data|row"),
        (_python(IMPORT, 'GRPO("nowhere").train()'), "nowhere"),
        (
            _python(
                IMPORT, f'GRPO(data="qa.csv", reward=lambda completions: 1.0, {TRAIN}).train()'
            ),
            "completions|lambda",
        ),
        kind=Kind.PYTHON,
    ),
    Case(
        "notices",
        f"{GRPO} model.name=no_template {SHORT}",
        ("has no chat template", "chat_template_name"),
        Kind.GOES_ON,
    ),
    Case(
        "notices",
        f"{GRPO} env=math env.data_files=math.jsonl {SHORT}",
        ("task for a larger model", "model.name"),
        Kind.GOES_ON,
    ),
]
