"""The embedded chat model: what ships, and that it is what the first command needs."""

from __future__ import annotations

import importlib.resources
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_llm.assets import embedded_model_path
from torchrl_llm.envs.datasets.number_tasks import addition_pairs, addition_problem
from torchrl_llm.modules import load_model, load_tokenizer


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(embedded_model_path())


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(embedded_model_path())


def test_the_model_ships_as_package_data_and_is_small():
    folder = importlib.resources.files("torchrl_llm") / "assets" / "embedded"
    sizes = {entry.name: len(entry.read_bytes()) for entry in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= sizes.keys()
    assert sum(sizes.values()) < 5_000_000


def test_a_wheel_has_every_file_that_lies_beside_the_code():
    package = Path(str(importlib.resources.files("torchrl_llm")))
    project = tomllib.loads((package.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["torchrl_llm"]
    packed = {file for pattern in patterns for file in package.glob(pattern)}
    beside = {
        file for file in package.rglob("*") if file.is_file() and "__pycache__" not in str(file)
    }
    assert not [file for file in beside - packed if file.suffix not in (".py", ".pyc")]


def test_the_loaders_give_it_when_nothing_else_is_named(model, tokenizer):
    assert type(load_model()) is type(model)
    assert load_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_the_context_is_long_enough_for_real_data(model):
    assert model.config.max_position_embeddings >= 2048


def test_every_id_of_the_tokenizer_is_in_the_model(model, tokenizer):
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id


def test_padding_is_not_the_end_of_a_turn(tokenizer):
    assert tokenizer.pad_token_id is not None
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_every_byte_has_a_token(tokenizer):
    # One character for each lead byte and each continuation byte of UTF-8 that exists.
    characters = [chr(code) for code in range(0x800)]
    characters += [chr(code) for code in range(0x800, 0xD800, 61)]
    characters += [chr(code) for code in range(0x10000, 0x110000, 4099)]
    for character in characters:
        ids = tokenizer(character, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == character, hex(ord(character))


@pytest.mark.parametrize(
    "text",
    [
        "e\u0301 is not \u00e9",
        " two  spaces ",
        "\r\n\n\t",
        "12+34=46",
        "\u65e5\u672c \U0001f916",
        "",
    ],
)
def test_no_text_is_changed_by_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_each_digit_is_a_token(tokenizer):
    ids = tokenizer("1203", add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["1", "2", "0", "3"]


def test_the_template_marks_the_answer_and_the_end_of_its_turn(tokenizer):
    chat = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "What is 37+85?"},
        {"role": "assistant", "content": "122"},
    ]
    encoded = tokenizer.apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [
        token
        for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        if mask
    ]
    assert tokenizer.decode(marked) == "122<|im_end|>"


def test_the_start_is_modest_so_that_there_is_something_to_learn(model, tokenizer):
    # The exact probability of the right answer to held-out problems, turn's end included.
    prompts, answers = [], []
    for pair in addition_pairs("test")[:256]:
        row = addition_problem(*pair)
        prompts.append(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": row["query"]}], add_generation_prompt=True
            )["input_ids"]
        )
        answers.append([*tokenizer(row["answer"]).input_ids, tokenizer.eos_token_id])
    full = [torch.tensor(p + a) for p, a in zip(prompts, answers, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(full, batch_first=True)
    with torch.no_grad():
        log_probs = model(ids).logits.log_softmax(-1)
    picked = log_probs[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    right = [
        picked[row, len(p) - 1 : len(p) + len(a) - 1].sum().exp()
        for row, (p, a) in enumerate(zip(prompts, answers, strict=True))
    ]
    assert 0.15 < torch.stack(right).mean().item() < 0.37
