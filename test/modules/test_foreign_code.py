"""Model folders of somebody else: Python in them is never run, whatever is typed meanwhile."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys

import pytest

from torchrl_llm import modules
from torchrl_llm.assets import embedded_model_path
from torchrl_llm.cli import main
from torchrl_llm.compat.text_tokenizer import Tokenizer
from torchrl_llm.envs.libs.mlgym import make_mlgym
from torchrl_llm.errors import ConfigError, TorchRLLLMError

CLASSES = ("AutoConfig", "AutoModelForCausalLM", "AutoModel", "AutoProcessor")


def hostile(folder, marker, *, model_type):
    """The model that ships, with Python beside it that leaves a marker when it is imported."""
    shutil.copytree(embedded_model_path(), folder)
    code = f"open({str(marker)!r}, 'w').write('ran')\nclass X:\n    pass\n"
    for path in ("evil.py", "custom_generate/generate.py"):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": dict.fromkeys(CLASSES, "evil.X")}
    config |= {"model_type": model_type, "custom_generate": "custom_generate"}
    (folder / "config.json").write_text(json.dumps(config))
    about = json.loads((folder / "tokenizer_config.json").read_text())
    about |= {"auto_map": {"AutoTokenizer": ["evil.X", "evil.X"]}, "tokenizer_class": "XTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


LOADERS = {
    "model": modules.load_model,
    "empty model": modules.empty_model,
    "tokenizer": modules.load_tokenizer,
    "context": modules.context_length,
    "ends": lambda name: modules.model_loading.end_token_ids(name, None),
    "text transform": lambda name: Tokenizer(["text"], ["tokens"], tokenizer=name),
    "environment": lambda name: make_mlgym(task="prisonersDilemma", tokenizer=name),
    "chat": lambda name: main(["chat", name]),
}


@pytest.mark.parametrize("model_type", ["own_model", "llama"])
@pytest.mark.parametrize("loader", LOADERS)
def test_no_loader_runs_the_python_of_a_folder_even_if_yes_is_typed(
    loader, model_type, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 8))
    marker = tmp_path / "ran"
    folder = hostile(tmp_path / "model", marker, model_type=model_type)
    # Refused, where nothing else can be made of the folder.
    with contextlib.suppress(TorchRLLLMError, ValueError, SystemExit):
        LOADERS[loader](str(folder))
    assert not marker.exists()
    assert loader == "chat" or sys.stdin.readline() == "y\n"  # nobody asked


def test_the_error_says_that_code_of_the_folder_is_not_run(tmp_path):
    folder = hostile(tmp_path / "model", tmp_path / "ran", model_type="own_model")
    with pytest.raises(
        ConfigError, match=r"Python code of its folder \(auto_map\).* not run"
    ) as it:
        modules.load_model(folder)
    assert "trust_remote_code" not in str(it.value)  # which no setting of ours is


def test_a_family_that_transformers_has_is_loaded_without_the_code_beside_it(tmp_path):
    folder = hostile(tmp_path / "model", tmp_path / "ran", model_type="llama")
    assert type(modules.load_model(folder)).__module__.startswith("transformers.models.llama")
