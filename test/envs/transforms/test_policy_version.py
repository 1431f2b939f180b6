"""PolicyVersion: every row knows which weights acted."""

from __future__ import annotations

import pytest
from tensordict import TensorDict
from torchrl.envs.utils import check_env_specs

from torchrl_llm.envs import ChatEnv
from torchrl_llm.envs.transforms import PolicyVersion
from torchrl_llm.errors import ConfigError


@pytest.mark.parametrize("version_type", [int, "int"])
def test_integer_versions_count_up(version_type, queries, answer):
    version = PolicyVersion(version_type)
    env = ChatEnv(batch_size=(2,)).append_transform(version)
    td = env.reset(queries("a", "b"))
    version.increment_version()
    td = env.step(answer(td, "1", "2"))
    assert td["policy_version"].tolist() == [0, 0]
    assert td["next", "policy_version"].tolist() == [1, 1]
    check_env_specs(env, tensordict=env.reset(queries("a", "b")))


@pytest.mark.parametrize("version_type", [str, "uuid"])
def test_uuid_versions_are_new_names(version_type, queries):
    version = PolicyVersion(version_type)
    env = ChatEnv(batch_size=(2,)).append_transform(version)
    first = list(env.reset(queries("a", "b"))["policy_version"])
    version.increment_version()
    second = list(env.reset(queries("a", "b"))["policy_version"])
    assert first[0] == first[1] != second[0] == second[1]
    check_env_specs(env, tensordict=env.reset(queries("a", "b")))


def test_a_version_resumes():
    version, resumed = PolicyVersion(int), PolicyVersion(int)
    version.increment_version()
    resumed.load_state_dict(version.state_dict())
    td = resumed(TensorDict(batch_size=[2]))
    assert td["policy_version"].tolist() == [1, 1]


def test_another_type_is_refused():
    with pytest.raises(ConfigError, match="version_type"):
        PolicyVersion("float")
