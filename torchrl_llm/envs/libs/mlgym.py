"""MLGym: machine-learning research tasks in a container, solved with shell commands.

The package is github.com/facebookresearch/MLGym (arXiv:2502.14499); the project of the same name on
PyPI is a different one. Its environments are driven through the methods for its own agents:
``reset_container``, ``communicate``, ``add_commands`` and ``step``.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torchrl_llm._imports import require
from torchrl_llm.envs.actions import ActionError, ActionParser
from torchrl_llm.envs.libs.sessions import Observed, Session, SessionEnv
from torchrl_llm.errors import ConfigError, MissingExtraError, WorkerError

_FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_SCORE = r"{} Score: \{{'[^']*': ([-+.\deE]+)"
_WORKING_FOLDER = threading.RLock()
_DEVICES = ("cpu_0",)


class CommandAction(ActionParser):
    r"""The last fenced block of an answer: a shell command.

    Example:
        >>> answer = "Let me look.\n```\nls -l\n```"
        >>> CommandAction().parse({"role": "assistant", "content": answer})
        'ls -l'
    """

    form = "bare"
    help_format = "Answer with {written}."

    def __init__(self) -> None:
        super().__init__("command", "a thought and then one command in a ``` block")

    def parse(self, message: Mapping[str, Any]) -> str:
        """See :meth:`ActionParser.parse`."""
        blocks = _FENCED.findall(str(message.get("content") or "").rpartition("</think>")[2])
        if not blocks or not blocks[-1].strip():
            raise ActionError("There is no ``` block with a command in your answer.")
        return blocks[-1].strip()


class MLGymSession(Session):
    """One environment of MLGym, and the conversation that its agent's configuration defines.

    The first messages are the system template and the task template; each further one is the output
    of a command in the template for a next step. The reward of an evaluation is its score minus the
    baseline's score.

    Args:
        make: function from the name of a task (``None`` for the only one) to an environment and its
            agent's configuration.
    """

    def __init__(self, make: Callable[[str | None], tuple[Any, Any]]) -> None:
        self.make = make
        self.env: Any = None
        self.config: Any = None
        self._task: str | None = None

    def reset(self, options: Mapping[str, Any]) -> Observed:
        """See :meth:`Session.reset`; ``options["task"]`` names the task."""
        with _package_folder():
            task = options.get("task")
            if self.env is None or task != self._task:
                self.close()
                self.env, self.config = self.make(task)
                self._task = task
            env = self.env
            env.reset_container()
            env.communicate(f"cd {Path(env.task_workspace).parent}")
            self._set_up()
            shown = env.reset()
            observation = shown[0] if isinstance(shown, tuple) else shown
        system = self.config.system_template.format(**self._variables())
        templates = [self.config.task_template, self.config.strategy_template]
        first = self._message([t for t in templates if t is not None], observation)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": first}]
        return Observed(messages)

    def step(self, action: str) -> Observed:
        """See :meth:`Session.step`."""
        with _package_folder():
            observation, reward, done, *_ = self.env.step(action)
        text = observation or ""
        template = self.config.next_step_template
        if not text.strip():
            template = self.config.next_step_no_output_template
        improved = _improvement(text)
        reward = float(reward) + (0.0 if improved is None else improved)
        success = bool(done) and improved is not None and improved > 0
        return Observed(self._message([template], text), reward, bool(done), success=success)

    def close(self) -> None:
        """See :meth:`Session.close`."""
        env, self.env = self.env, None
        if env is not None:
            with _package_folder():
                env.close()

    def _set_up(self) -> None:
        """Set up variables, the state command, and the commands of the tools."""
        env, config = self.env, self.config
        variables = [f"{name}={value}" for name, value in config.env_variables.items()]
        output = env.communicate("\n".join([config.state_command.code, *variables]))
        if env.returncode:
            raise WorkerError(f"the container's set-up exited with {env.returncode}: {output}")
        env.add_commands([_command(Path(file)) for file in config.command_files])

    def _variables(self) -> dict[str, Any]:
        handler = self.config.tools_handler
        task = asdict(self.env.task.args)
        return {"command_docs": handler.command_docs, **handler.env_variables, **task}

    def _message(self, templates: Sequence[str], observation: str | None) -> str:
        env = self.env
        state = env.communicate(self.config.state_command.name)
        try:
            told = dict(json.loads(state))
        except (ValueError, TypeError) as error:
            raise WorkerError(f"the state command gave no JSON object: {state!r:.200}") from error
        told.update(current_step=env.current_step, remaining_steps=env.max_steps - env.current_step)
        variables = {**self._variables(), **told, "observation": observation or ""}
        return "\n".join(template.format(**variables) for template in templates)


class MLGymWrapper(SessionEnv):
    """Conversations with one environment of MLGym, batch size 1.

    An answer is a thought and a command in a fenced block. Messages follow its agent's
    configuration as in MLGym's own agents; rewards are the rewards of ``MLGymSession``.

    Args:
        env: the environment (``gymnasium.make("mlgym/...").unwrapped``).
        config: configuration of its agent; ``env.config`` if not given.
        reward_wrong_format: reward of an answer without a command; 0 if not given.
        tokenizer: see :class:`~torchrl_llm.envs.ChatEnv`.
        kwargs: arguments of :class:`~torchrl_llm.envs.libs.sessions.SessionEnv` and
            :class:`~torchrl_llm.envs.DatasetChatEnv`.

    Raises:
        ConfigError: there is no configuration, or more than one row.
    """

    MAX_STEPS = None

    def __init__(
        self,
        env: Any = None,
        *,
        config: Any = None,
        make: Callable[[str | None], tuple[Any, Any]] | None = None,
        reward_wrong_format: float | None = None,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("num_envs", 1) != 1:
            raise ConfigError(
                f"an environment of MLGym is one row, got num_envs={kwargs['num_envs']}"
            )
        if make is None:
            config = getattr(env, "config", None) if config is None else config
            if env is None or config is None:
                raise ConfigError("MLGymWrapper needs env and its agent's config")
            make = partial(_given, env, config)
        penalty = 0.0 if reward_wrong_format is None else reward_wrong_format
        kwargs.setdefault("dataset", [{}])
        super().__init__(
            partial(MLGymSession, make),
            actions=CommandAction(),
            invalid_reward=penalty,
            system_prompt="",
            tokenizer=tokenizer,
            **kwargs,
        )


def make_mlgym(
    *,
    task: str | None = None,
    tasks: Sequence[str] | None = None,
    tokenizer: Any = None,
    device: Any = "cpu",
    reward_wrong_format: float | None = None,
    **kwargs: Any,
) -> MLGymWrapper:
    """An environment of MLGym for one task, or for several that resets draw from.

    Args:
        task: name of a task, ``"prisonersDilemma"``.
        tasks: names of tasks; give exactly one of ``task`` and ``tasks``.
        tokenizer: a Hugging Face tokenizer, or the name of one.
        device: device of the tensors.
        reward_wrong_format: reward of an answer without a command; 0 if not given.
        kwargs: further arguments of :class:`MLGymWrapper`.

    Raises:
        ConfigError: for both or neither of ``task`` and ``tasks``.
        MissingExtraError: MLGym is not installed, or a different package of this name is.
    """
    if (task is None) == (not tasks):
        raise ConfigError(f"pass exactly one of task and tasks, got {task!r} and {tasks!r}")
    names = [task] if task is not None else list(tasks or ())
    if isinstance(tokenizer, str):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    _mlgym("environment.registration")
    return MLGymWrapper(
        make=_make,
        dataset=[{"task": name} for name in names],
        tokenizer=tokenizer,
        device=device,
        reward_wrong_format=reward_wrong_format,
        **kwargs,
    )


def _given(env: Any, config: Any, task: str | None) -> tuple[Any, Any]:
    return env, config


def _make(task: str | None) -> tuple[Any, Any]:
    gymnasium = require("gymnasium", extra="mlgym", feature="make_mlgym")
    arguments = _mlgym("environment.env").EnvironmentArguments(
        task_config_path=f"tasks/{task}.yaml",
        max_steps=10,
        seed=42,
        container_type="podman",
        verbose=False,
        aliases_file="docker/aliases.sh",
    )
    agent = _mlgym("agent.base").AgentArguments(
        model=_mlgym("backend.base").ModelArguments(""),
        agent_config_path=_mlgym().CONFIG_DIR / "agents" / "default.yaml",
    )
    _mlgym("environment.registration").register_task(arguments)
    made = gymnasium.make(f"mlgym/{arguments.task.id}", devices=list(_DEVICES))
    return made.unwrapped, agent.config


def _mlgym(part: str = "") -> Any:
    name = ".".join(filter(None, ["mlgym", part]))
    try:
        return require(name, extra="mlgym", feature="make_mlgym")
    except ImportError as error:
        raise MissingExtraError(
            "make_mlgym needs MLGym, and this Python has no module "
            f"{name!r}: pip install git+https://github.com/facebookresearch/MLGym (the package "
            "'mlgym' on PyPI is a different project)"
        ) from error


@contextmanager
def _package_folder() -> Iterator[None]:
    """MLGym looks up its files relative to the folder of its package."""
    try:
        places = list(_mlgym().__path__)
    except (MissingExtraError, AttributeError):
        places = []  # a given environment may bring its own
    with _WORKING_FOLDER:
        before = os.getcwd()
        try:
            if places:
                os.chdir(Path(places[0]).parent)
            yield
        finally:
            os.chdir(before)


def _command(path: Path) -> dict[str, str]:
    """Return how a file of commands gets into the container: sourced, as a script, or unchanged."""
    contents = path.read_text()
    if contents.lstrip().startswith("#!"):
        return {"contents": contents, "name": path.stem, "type": "script"}
    if path.name.startswith("_"):
        return {"contents": contents, "name": path.name, "type": "utility"}
    if path.suffix == ".sh":
        return {"contents": contents, "name": path.name, "type": "source_file"}
    raise ConfigError(
        f"{path} is no shell file, does not begin with #!, and its name with no underscore; so it "
        "is unclear how to use it"
    )


def _improvement(text: str) -> float | None:
    """Score of an evaluation minus the baseline's score; ``None`` if nothing was evaluated."""
    found = [re.findall(_SCORE.format(kind), text) for kind in ("Evaluation", "Baseline")]
    try:
        numbers = [float(matches[-1]) if matches else None for matches in found]
    except ValueError:
        return None
    evaluation, baseline = numbers
    return None if evaluation is None else evaluation - (baseline or 0.0)
