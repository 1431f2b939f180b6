"""``torchrl-llm doctor``: each planted fault is found, and nothing is found where all is well."""

import csv
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig
from waiting import in_threads

from torchrl_llm.assets import embedded_model_path
from torchrl_llm.cli import main
from torchrl_llm.cli.doctor import PAGES
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes import memory
from torchrl_llm.recipes.doctor import examine as examining
from torchrl_llm.recipes.doctor import machine, reward
from torchrl_llm.recipes.doctor.calibrate import Trial, largest
from torchrl_llm.recipes.doctor.compose import compose, recipe_of
from torchrl_llm.recipes.doctor.examine import CHECKS, examine
from torchrl_llm.recipes.doctor.finding import by_level, error, ok
from torchrl_llm.recipes.doctor.subject import Subject
from torchrl_llm.recipes.memory import show_bytes as show

CONFIG = Path(__file__).parents[2] / "sota-implementations" / "grpo" / "config"
REWARDS = """
import threading

def always_zero(response, answer):
    return 0.0

def always_equal(response, answer):
    return 0.5

def raises(response, answer):
    return {"7": 1.0}[response]

def hangs(response, answer):
    threading.Event().wait(10)
    return 1.0

def not_a_number(response, answer):
    return float("nan")

def likes_garbage(response, answer):
    return float("zzz" in response)

def first_digit(response, answer):
    return float(response[:1] == answer[:1])

def fails_sometimes(response, answer):
    return float(int(response) == int(answer)) if response.strip() else 0.0
"""
LAST_ONLY = (
    "{% for m in messages[-2:] %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
FOREIGN = NO_END.replace("m.role + ':", "'<|start_header_id|>' + m.role + ':").replace(
    "'\n'", "'<|im_end|>\n'"
)


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A folder with data, rewards and variants of the embedded model."""
    root = tmp_path_factory.mktemp("house")
    (root / "marks_of_mine.py").write_text(REWARDS)
    rows = [{"question": f"What is {n}+{n + 7}?", "answer": str(2 * n + 7)} for n in range(10, 60)]
    write(root / "sums.jsonl", rows)
    write(root / "twice.jsonl", rows + rows[:25])
    write(root / "unanswered.jsonl", [row | {"answer": ""} for row in rows])
    write(
        root / "gaps.jsonl", [row | {"answer": "" if n == 3 else "7"} for n, row in enumerate(rows)]
    )
    write(root / "letters.jsonl", [{"question": f"Spell {n}.", "answer": "abc"} for n in range(50)])
    return root


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def variant(root, name, *, config=None, **changes):
    """The embedded model with another tokenizer or configuration."""
    folder = root / name
    shutil.copytree(embedded_model_path(), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for key, value in changes.items():
        if callable(value):
            value(tokenizer)
        else:
            setattr(tokenizer, key, value)
    tokenizer.save_pretrained(folder)
    if config is not None:
        config.save_pretrained(folder)
        (folder / "model.safetensors").unlink()
    return folder


def lower_case(tokenizer):
    from tokenizers import normalizers

    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()


MODELS = {
    "pad_is_eos": {"pad_token": "<|im_end|>"},
    "drops_turns": {"chat_template": LAST_ONLY},
    "never_ends": {"chat_template": NO_END},
    "foreign_marks": {"chat_template": FOREIGN},
    "beyond": {"added": lambda tokenizer: tokenizer.add_tokens(["<new>", "<newer>"])},
    "lower": {"normalized": lower_case},
    "huge": {
        "config": LlamaConfig(
            vocab_size=330, hidden_size=65536, intermediate_size=2**20, num_hidden_layers=2
        )
    },
    "large": {"config": LlamaConfig(vocab_size=330, hidden_size=1024, num_hidden_layers=8)},
}


def look(*overrides, recipe="grpo", only=None, folder=Path("outputs"), calibrates=False, file=None):
    """What the doctor says of a configuration."""
    config, page = compose(recipe, PAGES[recipe], overrides, file)
    return examine(Subject(config, page, folder=folder, calibrates=calibrates), only=only)


def given(arguments, house, **paths):
    """Arguments as typed, with the folder and its own rows and rewards written out."""
    own = {"own": f"data={house}/sums.jsonl", "mine": house / "marks_of_mine.py", "house": house}
    return arguments.format(**own, **paths).split()


def told(found):
    return [each for each in found if each.level != "ok"]


with Path(__file__).with_name("doctor_faults.csv").open(newline="") as file:
    FAULTS = {row["fault"]: row for row in csv.DictReader(file)}
"""Name of a planted fault to its arguments, and to the finding that is expected of it."""

# Those of the tables that are looked at in the whole grid alone.
LATER = {
    *(name for name, row in FAULTS.items() if row["grid"] == "full"),
    *(
        "grpo-async",
        "pipeline-rl",
        "expert-iteration",
        "distillation",
        "imitate",
        "embedded",
        "reward",
    ),
    *("loss", "estimator", "small groups", "adapters", "packed", "critic", "single answers"),
    *("reference", "dropped prompts", "no evaluation", "tools"),
}


def some_of(table):
    """The names of a table, those of LATER marked."""
    for name in table:
        yield pytest.param(name, marks=[pytest.mark.full] if name in LATER else [])


@pytest.mark.parametrize("name", some_of(FAULTS))
def test_a_planted_fault_is_found_with_the_key_to_change(name, house, monkeypatch):
    fault = FAULTS[name]
    monkeypatch.setattr(reward, "LONGEST_S", 0.2)
    monkeypatch.setattr(machine, "free_memory", lambda device: 8 * 2**30)
    assert fault["check"] in {each.run.__name__ for each in CHECKS}
    paths = {model: house / model for model in MODELS}
    for model in MODELS:
        if f"{{{model}}}" in fault["arguments"] and not paths[model].exists():
            variant(house, model, **MODELS[model])
    found = look(*given(fault["arguments"], house, **paths), only=[fault["check"]])
    assert [(each.level, each.key) for each in told(found)] == [(fault["level"], fault["key"])]
    assert fault["word"] in told(found)[0].text


@pytest.mark.full
def test_fsdp2_that_does_not_fit_needs_processes_and_no_smaller_model(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    words = ("train.device=cpu", "train.micro_token_budget=null", "train.parallel=fsdp2")
    config, page = compose("grpo", PAGES["grpo"], words)
    tokens = Subject(config, page).prompt_tokens
    peak = {
        n: max(memory.peak_bytes(parts, where) for where in ("sample", "train"))
        for n in (1, 2, 4, 8)
        for parts in [memory.memory_parts(config, prompt_tokens=tokens, processes=n)]
    }

    def found(free):
        monkeypatch.setattr(machine, "free_memory", lambda device: free)
        (finding,) = look(*words, only=["needed_memory"])
        return finding[:2], finding.text

    assert found(peak[1])[0] == ("ok", "train_model")
    kind, text = found(peak[4])
    assert kind == ("warning", "train.parallel")
    assert "as 1 process, on each device" in text
    assert f"4 processes, each with a GPU or machine of its own, need {show(peak[4])}" in text
    assert found(1000)[0] == ("error", "model.name")  # with no number of processes
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert found(peak[2])[0] == ("ok", "train_model")
    assert found(peak[8])[0] == ("error", "train.parallel")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # both have their memory of this machine
    assert found(peak[2])[0] == ("error", "train.parallel")


def test_of_other_recipes_fsdp2_divides_what_is_trained(house, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(machine, "free_memory", lambda device: 2**40)
    weights = 4 * 337_792
    keys = ("train.device=cpu", "train.parallel=fsdp2", "optimizer.name=SGD")
    # a fourth of weights and gradients, and the whole where all that samples is gathered
    for recipe, size, *words in (
        ("sft", weights // 2, f"data={house}/sums.jsonl"),
        ("expert-iteration", weights // 2),
        ("expert-iteration", weights // 2 + weights, "train.gathers=model"),
    ):
        (finding,) = look(*keys, *words, recipe=recipe, only=["needed_memory"])
        assert f"at least {show(size)} as 4 processes" in finding.text


# -- where all is well ----------------------------------------------------------------------------

GSM8K = [{"question": f"What is {n} + 4?", "answer": f"Add.\n#### {n + 4}"} for n in range(40)]
SHIPPED = {
    "grpo": [],
    "grpo-async": [],
    "pipeline-rl": [],
    "expert-iteration": [],
    "distillation": [],
    "sft": ["data={house}/sums.jsonl"],
    "dpo": [],
    "reward": [],
    "imitate": [],
    "embedded": [],
    "evaluate": ["tasks=[gsm8k,arithmetic]", "data_files.gsm8k={house}/gsm8k.jsonl"],
}
CLEAN = {
    "loss": ["loss=gspo"],
    "estimator": ["advantage=leave_one_out"],
    "tools": ["env=calculator"],
    "small groups": ["env.repeats=4"],
    "adapters": ["train_model.lora.enabled=true"],
    "own rows": ["data={house}/sums.jsonl", "reward=exact"],
    "packed": ["train.packing=packed", "train.micro_token_budget=2000"],
    "critic": ["loss=ppo", "advantage=gae"],
    "single answers": ["advantage=spo"],
    "reference": ["train.kl_to_ref_coeff=0.01"],
    "dropped prompts": ["env.on_overlong=drop", "filter.zero_variance=drop"],
    "no evaluation": ["eval.num_prompts=0"],
    "reward in parts": ["reward.components.length.longest=20"],
}
# What a machine that runs these tests may lack, and the recipes need.
MAY_LACK = {("error", "ray.num_collectors"), ("error", "redis.url")}


@pytest.mark.parametrize("recipe", some_of(SHIPPED))
def test_nothing_is_found_in_what_is_shipped(recipe, house):
    write(house / "gsm8k.jsonl", GSM8K)
    found = look(*(each.format(house=house) for each in SHIPPED[recipe]), recipe=recipe)
    assert not {(each.level, each.key) for each in told(found)} - MAY_LACK, found
    assert len(found) > (0 if recipe == "embedded" else 5)


@pytest.mark.parametrize("name", some_of(CLEAN))
def test_nothing_is_found_in_a_clean_variant(name, house):
    assert not told(look(*(each.format(house=house) for each in CLEAN[name])))


PAIRS = [{"prompt": f"What is {n}+4?", "chosen": f"{n + 4}", "rejected": f"{n}"} for n in range(20)]
FAULTY = [
    {**PAIRS[0], "rejected": "4"},
    {**PAIRS[1], "chosen": ""},
    {**PAIRS[2], "chosen": ""},
    {**PAIRS[3], "prompt": "1+" * 40},
    {**PAIRS[4], "chosen": "5+" * 40},
]


@pytest.mark.parametrize("recipe", ["dpo", "reward"])
def test_pairs_are_read_and_counted(recipe, tmp_path):
    words = (f"data={write_in(tmp_path, FAULTY + PAIRS[5:])}", "eval.num_prompts=2")
    words = (*words, "train.max_seq_len=40")

    def said(*more):
        found = look(*words, *more, recipe=recipe, only=["pairs", "demonstrations"])
        return [(each.level, each.key, each.text) for each in found]

    errors = said()
    assert [each[:2] for each in errors[:2]] == [("error", "data.source")] * 2
    assert "2 of 18 rows cannot be read" in errors[0][2]
    assert "line 2: the column 'chosen' is empty" in errors[0][2]
    assert "2 of 18 rows" in errors[1][2]
    assert "line 4 has" in errors[1][2]
    equal = ("warning", "data.source", "1 of 18 rows have two equal answers, and teach nothing")
    assert equal in errors
    assert any("13 of 18 rows can be learned from" in text for *_, text in errors)
    assert any("2 of 2 rows held out can be learned from" in text for *_, text in errors)
    left = "2 of 18 rows are left out, and 0 cut at their end: they are longer than 40 tokens"
    assert ("warning", "train.max_seq_len", left) in said("train.on_overlong=drop")
    cut = "1 of 18 rows are left out, and 1 cut at their end: they are longer than 40 tokens"
    assert ("warning", "train.max_seq_len", cut) in said("train.on_overlong=truncate")


def test_pairs_of_which_none_is_usable_are_an_error(tmp_path):
    rows = [{**each, "rejected": each["chosen"]} for each in PAIRS]
    words = [f"data={write_in(tmp_path, rows)}", "eval.num_prompts=2"]
    found = look(*words, recipe="dpo", only=["pairs"])
    last = ("error", "data.source", "none of 18 rows can be learned from")
    assert last in [(each.level, each.key, each.text) for each in found]


@pytest.mark.parametrize("recipe", ["dpo", "reward"])
def test_a_step_of_pairs_is_tried(recipe, tmp_path):
    words = (f"data={write_in(tmp_path, PAIRS)}", "train.device=cpu", "train.batch_size=4")
    (found,) = look(*words, recipe=recipe, only=["calibration"], calibrates=True)
    assert (found.level, found.key) == ("ok", "train.micro_token_budget")


def write_in(folder, rows):
    write(folder / "pairs.jsonl", rows)
    return folder / "pairs.jsonl"


# -- what a configuration can be given by ---------------------------------------------------------


def yaml_of(path, text):
    path.write_text(text)
    return path


def test_a_file_is_told_from_its_keys_and_composed_with_what_is_typed(tmp_path):
    assert recipe_of(CONFIG / "grpo-async.yaml", PAGES) == "grpo-async"
    part = yaml_of(tmp_path / "part.yaml", "loss: gspo\nenv: {dataset: calculator}\nseed: 3\n")
    assert recipe_of(part, PAGES) == "grpo"
    config, _ = compose("grpo", PAGES["grpo"], ["seed=5", "train.max_steps=7"], part)
    assert (config.loss.type, config.env.dataset) == ("gspo", "calculator")
    assert config.inference_model.max_tokens == 40  # of the task's file
    assert (config.seed, config.train.max_steps) == (5, 7)
    typed, _ = compose("grpo", PAGES["grpo"], ["loss=cispo"], part)
    assert (typed.loss.type, typed.seed) == ("cispo", 3)
    keys = yaml_of(tmp_path / "keys.yaml", "advantage: {normalize: none}\nenv: {repeats: 4}\n")
    config, _ = compose("grpo", PAGES["grpo"], ["advantage=group"], CONFIG / "grpo.yaml")
    given, _ = compose("grpo", PAGES["grpo"], [], keys)
    assert given.advantage == replace(config.advantage, normalize="none")
    select = yaml_of(tmp_path / "ei.yaml", "select: {topk_size: 2}\nseed: 1\n")
    assert recipe_of(select, PAGES) == "expert-iteration"


@pytest.mark.full
def test_the_configuration_of_a_run_is_that_of_the_run(tmp_path):
    import yaml

    from torchrl_llm.trainers.run_folder import nested

    for recipe in ("grpo", "grpo-async", "expert-iteration"):
        config, _ = compose(recipe, PAGES[recipe], ["seed=4"])
        text = yaml.safe_dump(nested(config.flat()))
        yaml_of(tmp_path / "config.yaml", text)
        assert recipe_of(tmp_path, PAGES) == recipe
        assert compose(recipe, PAGES[recipe], [], tmp_path)[0] == config


def test_a_folder_of_ones_own_settings_is_composed_as_hydra_does_it(tmp_path):
    shutil.copytree(CONFIG, tmp_path / "config")
    mine = tmp_path / "config" / "mine.yaml"
    text = (CONFIG / "grpo.yaml").read_text().replace("loss: grpo", "loss: dapo")
    yaml_of(mine, text)
    assert recipe_of(mine, PAGES) == "grpo"
    assert compose("grpo", PAGES["grpo"], [], mine)[0].loss.type == "dapo"


@pytest.mark.parametrize(
    ("text", "word"),
    [("loss: gsop\n", "did you mean 'gspo'"), ("train: {max_stps: 3}\nseed: 1\n", "max_stps")],
)
def test_a_wrong_key_or_option_of_a_file_is_told(tmp_path, text, word):
    part = yaml_of(tmp_path / "part.yaml", text)
    with pytest.raises(ConfigError, match=word):
        compose(recipe_of(part, PAGES), PAGES["grpo"], [], part)


def test_what_a_task_of_the_users_raises_is_found_once(tmp_path):
    task = yaml_of(tmp_path / "mine.py", BAD_TASK)
    found = told(look(f"env.dataset={task}:Bad"))
    assert [(each.level, each.key) for each in found] == [("error", "env.dataset")]
    assert "in make_row" in found[0].text
    assert found[0].text.endswith("KeyError: 'nope'")


BAD_TASK = """
from torchrl_llm.envs import TaskEnv

class Bad(TaskEnv):
    @classmethod
    def generate(cls, split):
        return [{"query": "a", "answer": "b"}] * 3

    @staticmethod
    def make_row(row):
        return {"query": row["nope"]}
"""


@pytest.mark.parametrize("adapters", ["false", "true"])
def test_checkpoints_of_all_recipes_are_counted_alike(house, adapters):
    sizes = set()
    for recipe, data in (("grpo", ()), ("sft", (f"data={house}/sums.jsonl",))):
        (found,) = look(f"train_model.lora.enabled={adapters}", *data, recipe=recipe, only=["disk"])
        sizes.add(found.text.partition(" of ")[2].partition(" are ")[0])
    assert len(sizes) == 1


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch, capsys):
    """Runs the command, with a few checks only, which others of these tests run."""
    monkeypatch.setattr(examining, "CHECKS", CHECKS[:3] + CHECKS[-3:-1])

    def ask(*arguments):
        try:
            status = main(["doctor", *map(str, arguments)])
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()

    return ask


def test_the_command_shows_what_it_found_and_ends_with_one_for_errors(asked):
    status, out, err = asked("grpo")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1].startswith("nothing was found (grpo, ")
    status, out, _ = asked(
        "grpo", "checkpoint.keep_last=null", "checkpoint.interval=1", "train.max_steps=1000000000"
    )
    assert status == 1
    assert out.startswith("error    checkpoint.keep_last\n    1000000001 checkpoints of 3.87 MiB")
    assert out.splitlines()[-1].startswith("1 error (grpo, ")


def test_a_key_that_is_refused_is_a_finding(asked):
    for argument, word in {
        "train.max_stps=3": "did you mean 'train.max_steps'?",
        "weight_sync.type=delta": "weight_sync has no effect",
        "ray.num_collectors=3": "a key of recipe grpo-async",
    }.items():
        status, out, _ = asked("grpo", argument, "--json")
        assert status == 1
        (found,) = json.loads(out)["findings"]
        assert (found["level"], found["check"]) == ("error", "configuration")
        assert word in found["text"]


def test_what_code_of_the_users_prints_is_no_result(asked, house):
    (house / "loud.py").write_text("print('loud')\ndef score(response, answer): return 1.0\n")
    status, out, err = asked(
        "grpo", f"data={house}/sums.jsonl", f"reward={house}/loud.py:score", "--json"
    )
    assert (status, err) == (0, "loud\n")
    assert json.loads(out)["recipe"] == "grpo"


def test_wrong_use_ends_with_two(asked, tmp_path):
    broken = yaml_of(tmp_path / "broken.yaml", "train: [1\n")
    words = yaml_of(tmp_path / "words.yaml", "just words\n")
    strange = yaml_of(tmp_path / "strange.yaml", "banana: 1\n")
    for arguments, word in {
        (): "required: RECIPE|FILE",
        ("gropo",): "a recipe is one of grpo, grpo-async",
        (broken,): "cannot be read",
        (words,): "no mapping of keys",
        (strange,): "has no key of any recipe",
        (tmp_path,): "there is no file",
        ("grpo", "--bananas"): "unrecognized arguments",
    }.items():
        status, out, err = asked(*arguments)
        assert (status, out) == (2, ""), arguments
        assert word in err


def test_a_text_is_found_once_and_the_worst_first():
    found = [ok("a", "x"), error("b", "y"), error("c", "y"), error("b", "z")]
    assert by_level(found) == [error("b", "y"), error("b", "z"), ok("a", "x")]


# -- the largest budget ---------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 63, 64, 65, 127, 128, 700, 1000, 4095, 4096, 10_000])
def test_the_largest_budget_fits_and_an_eighth_more_does_not(limit):
    tried = []

    def fits(budget):
        tried.append(budget)
        return budget <= limit

    found = largest(fits, 64, 4096)
    assert found == 0 if limit < 64 else found <= limit
    if 64 <= limit < 4096:
        assert limit < found + max(found // 8, 1)
    assert len(tried) <= 12
    assert max(tried) <= 4096


def test_ranks_go_on_with_what_fits_on_all_of_them():
    """Two ranks in threads; one has a quarter of the memory of the other."""
    barrier, said = threading.Barrier(2), {}

    def rank(number, limit):
        def agree(fine):
            said[number] = fine
            barrier.wait(30)
            both = all(said.values())
            barrier.wait(30)
            return both

        return largest(lambda budget: budget <= limit, 64, 4096, agree=agree)

    assert in_threads(partial(rank, 0, 4000), partial(rank, 1, 1000)) == [960, 960]


@pytest.mark.full
def test_calibration_trains_and_finds_what_fits(monkeypatch):
    (found,) = look("train.prompts_per_batch=8", only=["calibration"], calibrates=True)
    assert (found.level, found.text) == (
        "ok",
        "1472 tokens in one forward fit on cpu, all of a step",
    )
    monkeypatch.setattr(Trial, "_train", lambda trial, budget: oom(budget))
    (found,) = look("train.prompts_per_batch=8", only=["calibration"], calibrates=True)
    assert (found.level, found.key) == ("error", "train.micro_token_budget")
    assert "of 1472 tokens in one forward 576 fit on cpu" in found.text


def oom(budget):
    if budget > 600:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


# -- as a user has it -----------------------------------------------------------------------------


def run(*command, seconds=120):
    """What a command said, and the seconds of a processor that it took."""
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    after = os.times()
    spent = after.children_user + after.children_system
    return done, spent - before.children_user - before.children_system


@pytest.mark.full
def test_the_command_takes_at_most_20_s_also_where_a_reward_hangs(house):
    command = (sys.executable, "-m", "torchrl_llm", "doctor", "grpo")
    done, seconds = run(*command)
    assert (done.returncode, done.stderr) == (0, "")
    assert seconds < 20, "of one core"
    done, seconds = run(*command, *given("{own} reward={mine}:hangs", house))
    assert (done.returncode, done.stderr) == (1, "")
    assert "a reward took more than 5 s and was not waited for" in done.stdout
    assert seconds + reward.LONGEST_S < 20


RANK = """
import os, torch
from torchrl_llm.cli import main
from torchrl_llm.recipes.doctor import examine, machine
from torchrl_llm.recipes.doctor.calibrate import Trial

def train(trial, budget, whole=Trial._train):
    if os.environ["RANK"] == "1" and budget > 600:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    whole(trial, budget)

Trial._train = train
examine.CHECKS = examine.CHECKS[-1:]
raise SystemExit(main(["doctor", "grpo", "train.prompts_per_batch=8", "--calibrate", "--json"]))
"""


@pytest.mark.full
def test_two_processes_calibrate_in_step_where_one_has_less_memory(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    done, _ = run(*torchrun, "--nproc-per-node=2", str(tmp_path / "rank.py"))
    (line,) = done.stdout.splitlines()
    (found,) = json.loads(line)["findings"]
    assert "of 1472 tokens in one forward 576 fit on cpu" in found["text"]
