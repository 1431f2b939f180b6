"""Recipes as Python objects, which run the same page as the command.

:class:`GRPO`, :class:`SFT` and :class:`DPO` turn their arguments into the configuration of a
recipe, import its page from ``sota-implementations`` and yield its steps. There is no second loop:
the page's training loop runs here.
"""

from __future__ import annotations

import inspect
import re
import shlex
from abc import ABC
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from torchrl_llm._run_log import say
from torchrl_llm._settings import dotted
from torchrl_llm.errors import ConfigError
from torchrl_llm.evaluation import Conversation
from torchrl_llm.recipes import given, launch
from torchrl_llm.recipes.chat_settings import make_conversation
from torchrl_llm.recipes.command_keys import SHORT, KeyTable, check_overrides, quoted
from torchrl_llm.recipes.introduction import PROGRESS, introduction
from torchrl_llm.trainers.checkpoint import save_pretrained
from torchrl_llm.trainers.curves import draw_curves
from torchrl_llm.trainers.hub import check_repository, push_to_hub
from torchrl_llm.trainers.run import TrainingRun
from torchrl_llm.trainers.run_folder import (
    CHECKPOINTS,
    checkpoint_path,
    checkpoint_steps,
    read_config,
)
from torchrl_llm.trainers.run_results import EvalResult


class Command(dict[str, Any]):
    """The settings of a run that differ from the defaults; printed, the equivalent command.

    Args:
        name: name of the recipe.
        settings: dotted key to value, in the order in which they were given.

    Example:
        >>> Command("grpo", {"loss": "gspo", "train.max_steps": 5, "env.tools": ["calculator"]})
        torchrl-llm train grpo loss=gspo train.max_steps=5 'env.tools=[calculator]'
    """

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.name = name

    @property
    def overrides(self) -> list[str]:
        """The settings as arguments of the command."""
        short = {whole: group for group, whole in SHORT.items()}
        implied = "data.source" in self and "env.dataset" not in self
        return [
            f"{short.get(key, key)}={_typed(value)}"
            for key, value in self.items()
            if not (implied and (key, value) == ("env", "rows"))
        ]

    def __repr__(self) -> str:
        """Return the command, with a note on values that exist only in this program."""
        lines = [f"torchrl-llm train {self.name} {shlex.join(self.overrides)}"]
        for value in dotted(self).values():
            for path in value if isinstance(value, list) else [value]:
                if isinstance(path, str) and given.only_here(path):
                    name = path.rpartition(":")[2]
                    lines.append(
                        f"# {path} is in this program only: the command needs {name} in a file"
                    )
        return "\n".join(lines)


# Quote a text so that Hydra reads it as text.
_WORD = re.compile(r"(?!(?:null|true|false|nan|inf)$)(?:\.*/)?[a-z_][\w./:@%+*?-]*", re.A | re.I)


def _typed(value: Any) -> str:
    """Return a value in Hydra's syntax for the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_typed(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_typed, value)) + "]"
    text = str(value)
    return quoted(text) if isinstance(value, str) and not _WORD.fullmatch(text) else text


class _Recipe(ABC):
    """A run of a recipe's page, one step at a time."""

    NAME: ClassVar[str]
    PAGE: ClassVar[str]
    FILE: ClassVar[str]

    _folders: ClassVar[set[Path]] = set()

    def __init__(
        self, own: dict[str, Any], keys: Mapping[str, Any], folder: str | Path | None
    ) -> None:
        settings = {key: value for key, value in own.items() if value is not None}
        chosen = _settings(keys)
        if twice := settings.keys() & chosen.keys():
            raise ConfigError(f"{', '.join(sorted(twice))} is given twice")
        settings |= chosen
        self.config = Command(self.NAME, settings)
        self._page = launch.load_page(self.PAGE)
        self._config = self._compose(settings)
        self.folder = self._new_folder() if folder is None else Path(folder).absolute()
        launch.check_folder(self.folder, "folder")
        self._steps: Generator[TrainingRun] | None = None
        self._run: TrainingRun | None = None
        self._conversation: Conversation | None = None

    def _new_folder(self) -> Path:
        """Name a folder by date and time; a number distinguishes runs of the same second."""
        now = datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
        folder = first = Path(f"outputs/{self.NAME}/{now}").absolute()
        number = 1
        while folder in self._folders or folder.exists():
            number += 1
            folder = first.with_name(f"{first.name}_{number}")
        self._folders.add(folder)
        return folder

    def _compose(self, settings: Mapping[str, Any]) -> Any:
        """Compose the recipe's files with these settings, and check the result."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        files = (launch.PAGES / self.PAGE).parent / "config"
        table = KeyTable.read(files, self.FILE)
        check_overrides([f"{key}={_typed(value)}" for key, value in settings.items()], table)
        own = {key for key in table.groups if table.is_own(key, settings.get(key))}
        settings = {f"{key}.type" if key in own else key: v for key, v in settings.items()}
        chosen = [f"{key}={value}" for key, value in settings.items() if key in table.groups]
        composed = launch.compose_files(files, self.FILE, chosen)
        for key, value in settings.items():
            if key not in table.groups:
                try:
                    OmegaConf.update(composed, key, value, force_add=True)
                except OmegaConfBaseException as error:  # a set, a tensor
                    raise ConfigError(f"{key}={value!r} is no setting: {error.msg}") from error
        return self._page.load_config(composed)

    @property
    def run(self) -> TrainingRun:
        """The training run; the first access loads model and data."""
        if self._run is None:
            settings = self._config.flat()
            if settings[PROGRESS]:
                say(introduction(self.NAME, settings, self.folder))
            self._steps = self._page.train(self._config, self.folder)
            self._run = next(self._steps)
            self._run.how_to_resume = (
                f"{type(self).__name__}(..., folder={str(self.folder)!r}, "
                'checkpoint={"resume": "auto"}).train()'
            )
        return self._run

    def steps(self) -> Iterator[dict[str, Any]]:
        """Train one step at a time, for your own loops and callbacks.

        After a break, another call continues the loop. The run saves at the steps of
        ``checkpoint.interval``, and shows its results after the last step.

        Yields:
            The metrics of the step, as written by :meth:`torchrl_llm.trainers.TrainingRun.record`.
        """
        run = self.run
        if inspect.getgeneratorstate(self._steps) == inspect.GEN_CLOSED:
            more = "with more steps " if run.is_over else ""
            run.say(
                f"this run is over, after step {run.step} of {run.max_steps}; another goes on "
                f"{more}from what is saved:\n  {run.how_to_resume}"
            )
        while next(self._steps, None) is not None:
            with run.stop.released():
                yield run.metrics

    def train(self) -> Any:
        """Train to the end, or until Ctrl-C; save the run and show its results.

        Returns:
            This run.

        Raises:
            RewardError: no step of the run had a valid reward.
        """
        with suppress(SystemExit):  # stopped by a signal, and saved: the program continues
            for _ in self.steps():
                pass
        return self

    def evaluate(self) -> EvalResult:
        """Evaluate the current model on the held-out rows.

        Raises:
            ConfigError: ``eval.num_prompts`` is 0.
        """
        return self.run.evaluate()

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the curves of the run so far.

        Args:
            path: file to which the picture is also written.

        Returns:
            A matplotlib figure, which a notebook shows.
        """
        figure = draw_curves(self.run.curves())
        if path is not None:
            figure.savefig(path)
        return figure

    def save(self, folder: str | Path) -> Path:
        """Write model and tokenizer into a folder that ``from_pretrained`` opens.

        Args:
            folder: created if it does not exist.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_pretrained(folder, self.run.model, self.run.tokenizer)
        return folder

    def chat(self, text: str, *, go_on: bool = False) -> str:
        """Chat with the current model. It answers greedily, and is prompted as in training.

        Args:
            text: message of the user.
            go_on: whether to continue the conversation; otherwise a new one begins.

        Returns:
            Its answer. Tool calls are executed and the model is called again until it answers.

        Raises:
            OverlongError: the conversation no longer fits into the model's context.
        """
        run = self.run
        if self._conversation is None:
            config = read_config(run.folder)
            self._conversation = make_conversation(run.model, run.tokenizer, config)
        if not go_on:
            self._conversation.reset()
        return self._conversation.say(text)

    def push_to_hub(self, name: str, *, private: bool = True) -> str:
        """Push the current model to a repository: weights, tokenizer and a card.

        Args:
            name: the repository, ``owner/name``; it is created if it does not exist.
            private: whether a created repository is private.

        Returns:
            The address of the repository.

        Raises:
            ConfigError: a name without owner.
            CheckpointError: the hub rejected the upload, or could not be reached.
        """
        check_repository(name)
        run = self.run
        if run.step not in checkpoint_steps(run.folder / CHECKPOINTS):
            run.save()
        saved = checkpoint_path(run.folder / CHECKPOINTS, run.step)
        return push_to_hub(saved, name, private=private, command=repr(self.config))


# Mappings with user-defined names stay one value.
_OPEN = ("env.options", "reward.components")


def _settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keyword arguments as dotted keys: a dict is a group, and its ``type`` may name a file."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = prefix + name
        if not isinstance(value, Mapping) or key in _OPEN:
            number = getattr(value, "ndim", None) == 0  # NumPy's and torch's
            found[key] = value.item() if number else value
            continue
        own = dict(value)
        if key in ("loss", "advantage", "agent") and "type" in own:
            found[key] = own.pop("type")
        found |= _settings(own, f"{key}.")
    return found


class GRPO(_Recipe):
    """GRPO and related algorithms on your own model and data.

    This class builds the configuration of ``sota-implementations/grpo/grpo-sync.py`` and runs that
    page. The constructor checks the settings. Model and data are loaded by the first method that
    needs them.

    Args:
        model: folder or hub name; the model that ships with the package if not given.
        data: rows to train on: a file (CSV, JSON, JSON lines, Parquet), a folder, the name of a
            dataset on the hub, a ``datasets.Dataset``, or a list of dicts. Without ``data`` and
            ``env`` the task is addition, which suits the package's own model.
        eval_data: held-out rows, in the same forms; the last rows of ``data`` if not given.
        prompt: column with the user's message.
        answer: column with the answer that the reward compares.
        messages: column with whole conversations, instead of ``prompt``.
        reward: a function of ``(response, answer)`` or ``(response, row)``; the name of a reward
            (``"exact"``; ``torchrl-llm list rewards``); or a mapping of names to these, each alone
            or followed by its weight.
        tools: functions with type hints and a docstring, :class:`~torchrl_llm.tools.Tool` classes
            or names of tools.
        env: a task by its name (``"gsm8k"``), or a class or function that makes an environment.
        loss: name of a loss, or a dict of its settings with ``type``.
        advantage: name of an advantage estimator, or a dict of its settings with ``type``.
        agent: name of an agent, a class of agents, or a dict of its settings with ``type``.
        folder: folder of the run; ``outputs/grpo/<date>/<time>`` if not given.
        keys: the recipe's other keys: one dict per group, ``train={"max_steps": 50}``, or dotted,
            ``**{"train.max_steps": 50}``; :doc:`/configuration` has them all.

    Attributes:
        config: the given settings; its text is the equivalent command.
        folder: folder of the run.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or settings that do not go together.

    Example:
        >>> rows = [{"question": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(10, 60)]
        >>> run = GRPO(data=rows, reward="exact", loss="gspo", train={"max_steps": 2})
        >>> run.config["loss"], run.config["train.max_steps"]
        ('gspo', 2)
    """

    NAME, PAGE, FILE = "grpo", "grpo/grpo-sync.py", "grpo"

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        data: Any = None,
        eval_data: Any = None,
        prompt: str | None = None,
        answer: str | None = None,
        messages: str | None = None,
        reward: Any = None,
        tools: Any = None,
        env: Any = None,
        loss: str | Mapping[str, Any] | None = None,
        advantage: str | Mapping[str, Any] | None = None,
        agent: str | type | Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
        **keys: Any,
    ) -> None:
        own = {
            **_model_and_data(model, data, eval_data),
            "data.prompt": prompt,
            "data.answer": answer,
            "data.messages": messages,
            **_env_settings(env, own=data is not None),
            **_reward_settings(reward),
            "env.tools": None if tools is None else _tool_paths(tools),
        }
        if inspect.isclass(agent):
            agent = given.path_of(agent)
        chosen = {"loss": loss, "advantage": advantage, "agent": agent}
        super().__init__(own, {k: v for k, v in chosen.items() if v is not None} | keys, folder)


class SFT(_Recipe):
    """Supervised fine-tuning: a model learns the assistant's turns of your own conversations.

    Builds the configuration of ``sota-implementations/sft/sft.py`` and runs that page. The
    constructor checks the settings. The first method that needs them loads model and data.

    Args:
        model: folder or hub name; the model that ships with the package if not given.
        data: conversations to learn from: a file (CSV, JSON, JSON lines, Parquet), a folder, the
            name of a dataset on the hub, a ``datasets.Dataset``, or a list of dicts.
        eval_data: held-out conversations, in the same forms; the last ones of ``data`` if not
            given.
        prompt: column with the user's message.
        completion: column with the assistant's answer.
        messages: column with whole conversations, instead of ``prompt`` and ``completion``.
        answer: column with the answer that ``reward`` compares; the completion if not given.
        reward: scores the model's answers to held-out prompts, for an accuracy next to the loss; as
            for :class:`GRPO`. It is not used for training.
        folder: folder of the run; ``outputs/sft/<date>/<time>`` if not given.
        keys: the recipe's other keys, as for :class:`GRPO`.

    Attributes:
        config: the given settings; its text is the equivalent command.
        folder: folder of the run.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or settings that do not go together.

    Example:
        >>> rows = [{"question": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(10, 60)]
        >>> run = SFT(data=rows, train={"max_epochs": 2})
        >>> run.config["train.max_epochs"]
        2
    """

    NAME, PAGE, FILE = "sft", "sft/sft.py", "sft"

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        data: Any = None,
        eval_data: Any = None,
        prompt: str | None = None,
        completion: str | None = None,
        messages: str | None = None,
        answer: str | None = None,
        reward: Any = None,
        folder: str | Path | None = None,
        **keys: Any,
    ) -> None:
        own = {
            **_model_and_data(model, data, eval_data),
            "data.prompt": prompt,
            "data.completion": completion,
            "data.messages": messages,
            "data.answer": answer,
            **_reward_settings(reward),
        }
        super().__init__(own, keys, folder)


class DPO(_Recipe):
    """Preference optimization: a model learns which of two answers is the better one.

    Builds the configuration of ``sota-implementations/preference/dpo.py`` and runs that page. The
    constructor checks the settings. The first method that needs them loads model and data.

    Args:
        model: folder or hub name; the model that ships with the package if not given.
        data: rows with a chosen and a rejected answer: a file (CSV, JSON, JSON lines, Parquet), a
            folder, the name of a dataset on the hub, a ``datasets.Dataset``, or a list of dicts;
            pairs of sums that ship with the package if not given.
        eval_data: held-out rows, in the same forms; the last rows of ``data`` if not given.
        prompt: column with the user's message.
        chosen: column with the better answer.
        rejected: column with the worse answer.
        completion: column with the single answer of a row, for ``loss="kto"``.
        label: column that tells whether this answer is good.
        loss: name of a loss (``"dpo"``, ``"cpo"``, ``"simpo"``, ``"orpo"``, ``"kto"``), or a dict
            of its settings with ``type``.
        folder: folder of the run; ``outputs/dpo/<date>/<time>`` if not given.
        keys: the recipe's other keys, as for :class:`GRPO`.

    Attributes:
        config: the given settings; its text is the equivalent command.
        folder: folder of the run.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or settings that do not go together.

    Example:
        >>> rows = [{"prompt": f"{n}+1?", "chosen": str(n + 1), "rejected": "?"} for n in range(20)]
        >>> run = DPO(data=rows, loss={"type": "simpo", "beta": 2.5})
        >>> run.config["loss"], run.config["loss.beta"]
        ('simpo', 2.5)
    """

    NAME, PAGE, FILE = "dpo", "preference/dpo.py", "dpo"

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        data: Any = None,
        eval_data: Any = None,
        prompt: str | None = None,
        chosen: str | None = None,
        rejected: str | None = None,
        completion: str | None = None,
        label: str | None = None,
        loss: str | Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
        **keys: Any,
    ) -> None:
        own = {
            **_model_and_data(model, data, eval_data),
            "data.prompt": prompt,
            "data.chosen": chosen,
            "data.rejected": rejected,
            "data.completion": completion,
            "data.label": label,
        }
        super().__init__(own, keys if loss is None else {"loss": loss, **keys}, folder)


def _tool_paths(tools: Any) -> list[str]:
    if not isinstance(tools, (list, tuple)):
        raise ConfigError(f"tools is a list, as in tools=[lookup]; got {tools!r}")
    return [given.path_of(tool) for tool in tools]


def _model_and_data(model: str | Path | None, data: Any, eval_data: Any) -> dict[str, Any]:
    if not isinstance(model, (str, Path, type(None))):
        raise ConfigError(
            f"model is a folder or a hub name, got {type(model).__name__}; save a model and its "
            "tokenizer with save_pretrained, and give the folder"
        )
    return {
        "model.name": None if model is None else str(model),
        "data.source": _source(data),
        "data.eval_source": _source(eval_data),
    }


def _source(data: Any) -> Any:
    """Return the source of data: the path itself, or a path to the object."""
    if data is None or isinstance(data, (str, Path)):
        return None if data is None else str(data)
    if isinstance(data, (list, tuple)) and data and isinstance(data[0], (str, Path)):
        return [str(path) for path in data]
    if callable(data):
        return given.path_of(data)
    if isinstance(data, Mapping) and "source" in data:  # else a dict of splits
        raise ConfigError(
            "data is rows, or names them; its keys are dotted: **{'data.split': 'validation'}"
        )
    if not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise ConfigError(
            "data is rows (a list of dicts, a datasets.Dataset) or names them (a file, a folder, a "
            f"dataset on the hub), got {data!r}"
        )
    return given.rows_path(data)


def _env_settings(env: Any, *, own: bool) -> dict[str, Any]:
    if isinstance(env, Mapping):
        raise ConfigError("env is a task; its keys are dotted: **{'env.repeats': 4}")
    if env is None:
        return {"env": "rows"} if own else {}
    if isinstance(env, str) and ":" not in env:
        return {"env": env}
    return {"env": "rows", "env.dataset": given.path_of(env)}


def _reward_settings(reward: Any) -> dict[str, Any]:
    if reward is None:
        return {}
    if isinstance(reward, (list, tuple)):
        raise ConfigError(
            "several rewards have names, each alone or with its weight behind it: "
            'reward={"right": right, "short": (short, 0.1)}'
        )
    if not isinstance(reward, Mapping):
        return {"reward.function": given.path_of(reward)}
    parts = {}
    for name, part in reward.items():
        part, *weight = part if isinstance(part, (tuple, list)) else (part,)
        if len(weight) > 1:
            raise ConfigError(
                f"reward {name!r} is a function and its weight, got {weight} behind it"
            )
        path = given.path_of(part)
        parts[name] = {"_target_" if ":" in path else "type": path}
        if weight:
            parts[name]["weight"] = weight[0]
    return {"reward.components": parts}
