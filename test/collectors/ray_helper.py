"""Environments and policies that are built in the actors of Ray: importable there by name."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
from pathlib import Path

from collectors import ray_forks
from collectors.collecting import QUESTIONS, Ending, Failing, make_env, make_policy
from fork_server import fork_server
from models_helper import make_tiny_model as _make_tiny_model
from models_helper import make_tokenizer as _make_tokenizer

from torchrl_llm.envs import ChatEnv
from torchrl_llm.modules import TransformersWrapper

tokenizer = functools.cache(_make_tokenizer)


@functools.cache
def forked_workers():
    """The program that Ray is to start for Python: workers are forks of this process's server."""
    path = os.path.join(tempfile.mkdtemp(prefix="forks-"), "server")
    fork_server().Process(target=ray_forks.serve, args=(path,), daemon=True).start()
    return f"{sys.executable} -I -S {ray_forks.__file__} {path}"


def start_ray(ray, **options):
    """Ray whose actors find this folder's modules; waits longer than Ray does on a busy machine."""
    test = Path(__file__).parents[1]
    paths = [str(test.parent), str(test), *filter(None, [os.environ.get("PYTHONPATH")])]
    env_vars = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    options |= {"include_dashboard": False, "log_to_driver": False}
    options["runtime_env"] = {"env_vars": env_vars, "py_executable": forked_workers()}
    for attempts_left in (3, 2, 1, 0):
        try:
            return ray.init(**options)
        except Exception as error:
            # Ray gives its node 30 seconds, and cannot be told to give it more.
            ray.shutdown()
            if not attempts_left or "timed out during startup" not in str(error):
                raise


def fake_policy():
    return make_policy(tokenizer())


def model_policy():
    return TransformersWrapper(
        _make_tiny_model(), tokenizer=tokenizer(), generate_kwargs={"max_new_tokens": 4}
    )


def failing_policy(after):
    return Failing(fake_policy(), after)


class Slow:
    """Answers a number of calls at once, and then takes its time for each."""

    def __init__(self, policy, after, seconds):
        self.policy, self.after, self.seconds = policy, after, seconds

    def __call__(self, td):
        self.after -= 1
        if self.after < 0:
            time.sleep(self.seconds)
        return self.policy(td)


def slow_policy(after=0, seconds=0.1):
    return Slow(fake_policy(), after, seconds)


def shared_env(primer, num_envs=2):
    """Conversations of one turn whose prompts come from a primer that others ask, too."""
    return ChatEnv(batch_size=(num_envs,)).append_transform(primer).append_transform(Ending(1))


__all__ = ["QUESTIONS", "make_env"]
