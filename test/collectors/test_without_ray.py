"""Without Ray, or without a running one, everything that needs it says so at once."""

import importlib.util
from functools import partial

import pytest

from torchrl_llm.collectors import RayLLMCollector
from torchrl_llm.collectors.ray_actor import actor_options
from torchrl_llm.collectors.transport import RayChannel
from torchrl_llm.data.replay_buffers import RayReplayBuffer
from torchrl_llm.envs import DatasetChatEnv
from torchrl_llm.envs.transforms import RayDataLoadingPrimer
from torchrl_llm.errors import ConfigError, MissingExtraError, ResourceError
from torchrl_llm.objectives import RayMCAdvantage

ROWS = [{"query": "Hi"}]
BUILD = {
    "RayLLMCollector": partial(RayLLMCollector, None, policy=print),
    "RayChannel": RayChannel,
    "RayReplayBuffer": RayReplayBuffer,
    "RayDataLoadingPrimer": partial(RayDataLoadingPrimer, ROWS),
    "RayMCAdvantage": partial(RayMCAdvantage, 2),
}


@pytest.fixture
def installed():
    return importlib.util.find_spec("ray") is not None


@pytest.mark.parametrize("name", BUILD)
def test_what_needs_ray_says_what_is_missing(name, installed):
    error, match = (ResourceError, "ray.init") if installed else (MissingExtraError, "ray")
    with pytest.raises(error, match=match) as caught:
        BUILD[name]()
    assert name in str(caught.value)


def test_an_environment_asks_an_actor_only_if_told_to(installed):
    with pytest.raises(ConfigError, match="ray_backend"):
        DatasetChatEnv(dataset=ROWS, dataloader_actor_name="rows")
    with pytest.raises(ResourceError if installed else MissingExtraError):
        DatasetChatEnv(dataset=ROWS, ray_backend=True)


def test_options_of_an_actor_come_from_torchrl_s_configuration():
    options, placement = actor_options(
        {"num_cpus": 4, "num_gpus": 0.5, "memory": 2**30, "max_concurrency": 2}, num_cpus=1
    )
    assert (options.num_cpus, options.num_gpus) == (1, 0.5)
    assert placement == {"memory": 2**30}
    # Enough threads to be told of weights, and to be stopped, while it collects.
    assert options.max_concurrency == 4
    assert actor_options({"max_concurrency": 9})[0].max_concurrency == 9
    with pytest.raises(ConfigError, match="num_cpu'"):
        actor_options({"num_cpu": 4})
