"""``torchrl-llm list``: what it prints can be chosen in the way that it says."""

import pytest

from torchrl_llm._registry import KINDS, names
from torchrl_llm.cli import commands, main
from torchrl_llm.cli.list import HOW
from torchrl_llm.cli.train import RECIPES
from torchrl_llm.recipes import load_config
from torchrl_llm.recipes.launch import PAGES, check_arguments


def listed(capsys, *kind):
    """Kind to the names below it."""
    assert main(["list", *kind]) == 0
    found, current = {}, None
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("  "):
            name, _, about = line.strip().partition(" ")
            assert about.strip(), line
            found[current].append(name)
        else:
            current, _, how = line.partition(": ")
            assert how == HOW[current]
            found[current] = []
    return found


def test_every_kind_of_the_registry_and_every_recipe_is_listed(capsys):
    found = listed(capsys)
    registered = {{"advantages": "estimators"}.get(kind, kind): names(kind) for kind in KINDS}
    assert {kind: sorted(names) for kind, names in found.items()} == (
        registered | {"recipes": sorted(RECIPES)}
    )


def test_a_kind_has_the_name_that_people_and_the_name_that_programs_use(capsys):
    assert listed(capsys, "estimators") == listed(capsys, "advantages")


@pytest.mark.parametrize(
    ("kind", "group"), [("losses", "loss"), ("estimators", "advantage"), ("tasks", "env")]
)
def test_a_listed_name_is_an_option_of_its_group(capsys, kind, group):
    assert HOW[kind].startswith(f"{group}=NAME")
    for name in listed(capsys, kind)[kind]:
        arguments = [f"{group}={name}"]
        assert check_arguments(arguments, PAGES / "grpo" / "config", "grpo") == arguments


def test_a_listed_reward_is_a_reward(capsys):
    chosen = [f"reward={name}" for name in listed(capsys, "rewards")["rewards"]]
    checked = check_arguments(chosen, PAGES / "grpo" / "config", "grpo")
    assert checked == [each.replace("reward=", "reward.function=") for each in chosen]
    assert load_config({"reward": {"function": "exact"}}).reward.function == "exact"


def test_an_unknown_kind_or_command_is_answered_with_those_that_there_are(capsys):
    with pytest.raises(SystemExit):
        main(["list", "bananas"])
    assert "'losses', 'estimators'" in capsys.readouterr().err
    assert main(["lits"]) == 2
    assert f"did you mean 'list'? There are {', '.join(commands())}" in capsys.readouterr().err
