import pytest

from torchrl_llm._settings import dotted
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.trainers.run_folder import model_folder, read_config, read_metrics, run_of


@pytest.fixture
def run(tmp_path):
    for step in (9, 10):
        folder = tmp_path / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        for name in ("config.json", "metrics.csv"):
            (folder / name).write_text("{}")
    (tmp_path / "checkpoints" / ".partial_step_000011").mkdir()
    (tmp_path / "metrics.csv").write_text("train/step,train/reward\n1,0.5\n")
    return tmp_path


def test_a_run_stands_for_its_newest_whole_checkpoint_and_a_checkpoint_for_its_run(run):
    newest = run / "checkpoints" / "step_000010"
    assert model_folder(run) == model_folder(run / "checkpoints") == model_folder(newest) == newest
    assert run_of(newest) == run_of(run) == run
    (run / "metrics.csv").unlink()
    assert run_of(newest) is None


def test_a_folder_without_a_model_is_refused_with_what_it_has(tmp_path):
    (tmp_path / "logs").mkdir()
    with pytest.raises(ConfigError, match=r"no finished model .*; it has logs/"):
        model_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no folder .*gone"):
        model_folder(tmp_path / "gone")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert model_folder(tmp_path) == tmp_path / "model"


def test_the_configuration_is_the_runs_own_or_what_hydra_noted(tmp_path):
    assert read_config(tmp_path) == {}
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("seed: 1\nloss: {type: gspo}\n")
    assert dotted(read_config(tmp_path)) == {"seed": 1, "loss.type": "gspo"}
    (tmp_path / "config.yaml").write_text("seed: 2\n")
    assert read_config(tmp_path) == {"seed": 2}
    for text in ("- a\n", "a: [\n"):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(DataError, match=r"config\.yaml"):
            read_config(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "seed: 2001-99-99\n",
        "seed: !!int foo\n",
        "seed: " + "9" * 5000,
        "a: " + "[" * 5000,
        "a: " + "[" * 50 + "]" * 50,
        "env: &e\n  a: *e\n",
        "a: &a [1, 2]\n"
        + "".join(
            f"{k}: &{k} [{', '.join([f'*{j}'] * 9)}]\n"
            for j, k in zip("abcdefgh", "bcdefghi", strict=True)
        ),
    ],
    ids=["date", "word", "digits", "open", "deep", "endless", "aliases"],
)
def test_a_configuration_that_is_no_plain_yaml_is_refused_with_its_name(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(DataError, match=r"config\.yaml cannot be read: "):
        read_config(tmp_path)


def test_an_alias_and_a_key_that_is_a_number_are_read(tmp_path):
    (tmp_path / "config.yaml").write_text("a: &a {1: 2}\nb: *a\n")
    assert dotted(read_config(tmp_path)) == {"a.1": 2, "b.1": 2}


def test_a_table_with_something_else_than_numbers_is_refused_with_its_name(run):
    assert read_metrics(run) == {"train/reward": ([1], [0.5])}
    (run / "metrics.csv").write_text("train/step,train/reward\n1,good\n")
    with pytest.raises(DataError, match=r"metrics\.csv cannot be read: .*good"):
        read_metrics(run)
