"""Files of a run in language space: policies of each iteration, episodes, evaluations, metrics.

The layout is the same as in LangMARL, for example ``runs/<run>/checkpoints/iter_3/agent_1.txt``, so
each library can read the other's files.

Next: :mod:`torchrl_llm.langmarl.phases` reads and writes them.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from torchrl_llm._checked import Ge, checked
from torchrl_llm.errors import ConfigError, DamagedCheckpointError, DataError
from torchrl_llm.langmarl.environment import Trajectory
from torchrl_llm.langmarl.local_store import (
    SCHEMA_VERSION,
    BaseStore,
    MissingCheckpointError,
    check_name,
    check_number,
    digest_of,
    parsed,
    read_file,
    read_json,
    replace_file,
    run_folder,
    sealed,
    to_json_text,
)
from torchrl_llm.langmarl.local_store import LocalStore as LocalStore
from torchrl_llm.langmarl.local_store import aggregated_path as aggregated_path
from torchrl_llm.langmarl.local_store import evaluation_path as evaluation_path
from torchrl_llm.langmarl.local_store import gradients_path as gradients_path
from torchrl_llm.langmarl.local_store import redacted as redacted

# Fields of a metrics line besides the statistics; the reference writes "type".
_NO_STATISTICS = {"iteration", "metadata", "type"}
# Fields of each line.
_STATISTICS = {"iteration", "avg_reward"}


def _open_run(store: BaseStore, run_id: str) -> str:
    """Folder of a run; raises for a run of a newer version."""
    folder = run_folder(run_id)
    if store.exists(f"{folder}/run_meta.json"):
        read_json(store, f"{folder}/run_meta.json")
    return folder


def _iterations(store: BaseStore, folder: str) -> list[int]:
    """Numbers of the complete checkpoints."""
    named = [re.fullmatch(r"iter_([0-9]+)", name) for name in store.list(f"{folder}/checkpoints")]
    whole = [n for n in named if n and store.exists(f"{folder}/checkpoints/{n[0]}/meta.json")]
    return sorted(int(n[1]) for n in whole)


# -- policies -------------------------------------------------------------------------------------


class PolicyCheckpoint:
    """The policies of a run, with a checkpoint for each iteration.

    Iteration ``i`` plays with checkpoint ``i``, which iteration ``i - 1`` wrote. A checkpoint is
    complete if it has a ``meta.json``, which is written last.

    Args:
        store: store of the run.
        run_id: name of the run.
        num_agents: number of policies.
        agent_names: names of the agents; ``agent_1`` and so on if not given; then a checkpoint may
            also have other names.
        default_policies: policies to use before the first checkpoint.

    Raises:
        ConfigError: number and names do not fit together, or a name is not valid for a file.
        CheckpointError: the run is from a newer version of this package.

    Example:
        >>> import tempfile
        >>> policies = PolicyCheckpoint(LocalStore(tempfile.mkdtemp()), "one", 1)
        >>> policies.save_policies(1, {"agent_1": "Be kind."})
        >>> policies.save_policies(2, {"agent_1": "Be brief."})
        >>> print(policies.diff_policies(1, 2)["agent_1"])
        --- iter_1/agent_1.txt
        +++ iter_2/agent_1.txt
        @@ -1 +1 @@
        -Be kind.
        +Be brief.
    """

    @checked
    def __init__(
        self,
        store: BaseStore,
        run_id: str,
        num_agents: Annotated[int, Ge(1)],
        *,
        agent_names: Sequence[str] | None = None,
        default_policies: Mapping[str, str] | None = None,
    ) -> None:
        self.store, self.run_id, self._folder = store, run_id, _open_run(store, run_id)
        self._strict = agent_names is not None
        self.agent_names = list(agent_names or (f"agent_{k + 1}" for k in range(num_agents)))
        for name in self.agent_names:
            check_name(name, "an agent")
        if len(self.agent_names) != num_agents:
            raise ConfigError(f"num_agents={num_agents}, and the names are {self.agent_names}")
        text = f"You are {{}}, one of {num_agents} agents who solve a task together."
        defaults = default_policies or {name: text.format(name) for name in self.agent_names}
        if missing := sorted(set(self.agent_names) - set(defaults)):
            raise ConfigError(f"default_policies lacks {missing}")
        self._defaults = {name: defaults[name] for name in self.agent_names}

    def iterations(self) -> list[int]:
        """Numbers of the complete checkpoints, the newest last."""
        return _iterations(self.store, self._folder)

    def get_policies(self, iteration: int | None = None) -> dict[str, str]:
        """The policies of an iteration.

        Args:
            iteration: its number; the newest if not given. Number 0 means the defaults, unless
                saved.

        Returns:
            A text for each agent; the defaults if there is no checkpoint.

        Raises:
            FileNotFoundError: the checkpoint does not exist.
            DamagedCheckpointError: the policy of an agent is missing or differs from the saved
                text.
        """
        saved = self.iterations()
        number = iteration if iteration is not None else max(saved, default=0)
        if number == 0 and 0 not in saved:
            return dict(self._defaults)
        meta, folder = self._meta(number), self._of(number)
        names = self.agent_names
        if not self._strict:
            files = [name for name in self.store.list(folder) if name.endswith(".txt")]
            names = [name.removesuffix(".txt") for name in files]
        missing = [name for name in names if not self.store.exists(f"{folder}/{name}.txt")]
        if missing or len(names) < (meta.get("num_agents") or 0):
            raise DamagedCheckpointError(
                f"{self.store.path(folder)} has no policy of {', '.join(missing) or 'some agent'}; "
                "put the file back, or remove the folder to make it again"
            )
        texts = {name: self.store.read_text(f"{folder}/{name}.txt") for name in names}
        if changed := _changed(meta, texts):
            raise DamagedCheckpointError(
                f"{self.store.path(folder)}/{changed[0]}.txt is not the text that was saved: it is "
                "damaged, or was edited. Put the text back; or continue with this one, by "
                "edited_policies=take; or remove the folder to make it again"
            )
        return texts

    def take_edits(self) -> list[str]:
        """Accept manual edits of texts in the newest checkpoint.

        Returns:
            Names of the agents whose texts were edited.
        """
        number = max(self.iterations(), default=0)
        meta, folder = self._meta(number) if number else {}, self._of(number)
        there = [n for n in meta.get("digests", {}) if self.store.exists(f"{folder}/{n}.txt")]
        texts = {name: self.store.read_text(f"{folder}/{name}.txt") for name in there}
        if changed := _changed(meta, texts):
            meta["digests"].update({name: digest_of(texts[name]) for name in changed})
            self.store.write_text(f"{folder}/meta.json", to_json_text(sealed(meta)))
        return changed

    def save_policies(
        self,
        iteration: int,
        policies: Mapping[str, str],
        stats: Mapping[str, Any] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Save the policies of an iteration.

        Args:
            iteration: the iteration that will play with them.
            policies: a text for each agent.
            stats: statistics of the iteration that made them.
            metadata: further data.

        Raises:
            ConfigError: a policy is not a text, or the names are not the names of the agents.
            CheckpointError: the files cannot be written.
        """
        if self._strict and set(policies) != set(self.agent_names):
            raise ConfigError(f"the agents are {self.agent_names}, got policies of {[*policies]}")
        for name, text in policies.items():
            if not isinstance(text, str):
                raise ConfigError(f"a policy is a text, got {text!r} for {name!r}")
            self.store.write_text(f"{self._of(iteration)}/{check_name(name, 'an agent')}.txt", text)
        meta = {
            "schema_version": SCHEMA_VERSION,
            "iteration": iteration,
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "num_agents": len(policies),
            "digests": {name: digest_of(text) for name, text in policies.items()},
            "training_stats": stats,
            "metadata": metadata,
        }
        self.store.write_text(f"{self._of(iteration)}/meta.json", to_json_text(sealed(meta)))

    def diff_policies(self, iter_a: int, iter_b: int) -> dict[str, str]:
        """Compare the policies of two iterations.

        Args:
            iter_a: number of the old one; 0 for the defaults.
            iter_b: number of the new one.

        Returns:
            A unified diff for each agent, empty if nothing changed.

        Raises:
            FileNotFoundError: the checkpoint does not exist.
        """
        old, new = self.get_policies(iter_a), self.get_policies(iter_b)
        folders = f"iter_{iter_a}", f"iter_{iter_b}"
        return {
            name: _diff(old.get(name), new.get(name), *(f"{each}/{name}.txt" for each in folders))
            for name in {**old, **new}
        }

    def stats(self, iteration: int) -> dict[str, Any]:
        """Statistics saved with a checkpoint; raises FileNotFoundError if it is missing."""
        return self._meta(iteration).get("training_stats") or {}

    def metadata(self, iteration: int) -> dict[str, Any]:
        """Further data saved with a checkpoint; raises FileNotFoundError if it is missing."""
        return self._meta(iteration).get("metadata") or {}

    def _of(self, iteration: int) -> str:
        return f"{self._folder}/checkpoints/iter_{check_number(iteration, 'an iteration')}"

    def _meta(self, iteration: int) -> dict[str, Any]:
        if not self.store.exists(f"{self._of(iteration)}/meta.json"):
            there = ", ".join(map(str, self.iterations())) or "none"
            raise MissingCheckpointError(
                f"the run {self.run_id!r} has no complete checkpoint {iteration}, only {there}"
            )
        return read_json(self.store, f"{self._of(iteration)}/meta.json")


def _changed(meta: Mapping[str, Any], texts: Mapping[str, str]) -> list[str]:
    """Agents whose text differs from the saved one; texts without a digest count as equal."""
    saved = meta.get("digests") or {}
    return [name for name, text in texts.items() if saved.get(name) not in (None, digest_of(text))]


def _diff(old: str | None, new: str | None, old_name: str, new_name: str) -> str:
    lines = [[] if text is None else text.split("\n") for text in (old, new)]
    return "\n".join(difflib.unified_diff(*lines, old_name, new_name, lineterm=""))


def write_policy_file(
    path: str | os.PathLike[str], iteration: int, policies: Mapping[str, str]
) -> None:
    """Write policies to a separate file.

    Args:
        path: path of the file; its folder is created.
        iteration: the iteration that plays with them.
        policies: a text for each agent.

    Raises:
        CheckpointError: the file cannot be written.
    """
    agents = {name: {"policy": text} for name, text in policies.items()}
    value = {
        "version": "1.0",
        "description": f"Policies of {', '.join(policies)}",
        "current_iteration": iteration,
        "policies": {f"iteration_{iteration}": {"agent_policies": agents}},
    }
    replace_file(Path(path), to_json_text(value))


def read_policy_file(path: str | os.PathLike[str], iteration: int | None = None) -> dict[str, str]:
    """Read policies from a separate file.

    Args:
        path: path of a file that :func:`write_policy_file` or LangMARL wrote.
        iteration: iteration of the policies; ``current_iteration`` if not given.

    Returns:
        A text for each agent.

    Raises:
        FileNotFoundError: the file or its iteration is missing.
        DamagedCheckpointError: the file is not a file of policies.
    """
    value = parsed(read_file(Path(path)), str(path))
    try:
        number = value["current_iteration"] if iteration is None else iteration
        if f"iteration_{number}" not in value["policies"]:
            raise MissingCheckpointError(f"{path} has {list(value['policies'])}, not {number}")
        found = value["policies"][f"iteration_{number}"]
        found = found.get("agent_policies", found)  # some files of LangMARL do not have this level
        return {name: each["policy"] for name, each in found.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"{path} is no file of policies, policies.iteration_0.agent_policies.NAME.policy is "
            f"expected: {type(error).__name__}: {error}"
        ) from None


# -- episodes -------------------------------------------------------------------------------------


class TrajectoryStore:
    """The episodes of a run.

    Args:
        store: store of the run.
        run_id: name of the run.

    Raises:
        ConfigError: the name is not valid for a folder.
        CheckpointError: the run is from a newer version of this package.

    Example:
        >>> import tempfile
        >>> episodes = TrajectoryStore(LocalStore(tempfile.mkdtemp()), "one")
        >>> episodes.save(0, 7, Trajectory({"question": "2+2?"}, [], 1.0))
        >>> episodes.load(0)
        [Trajectory(task={'question': '2+2?'}, steps=[], reward=1.0, metadata={'episode_id': 7})]
    """

    def __init__(self, store: BaseStore, run_id: str) -> None:
        self.store, self.run_id, self._folder = store, run_id, _open_run(store, run_id)

    def _of(self, iteration: int) -> str:
        return f"{self._folder}/trajectories/iter_{check_number(iteration, 'an iteration')}"

    def _file(self, iteration: int, episode_id: int) -> str:
        number = check_number(episode_id, "an episode")
        return f"{self._of(iteration)}/episode_{number:03d}.json"

    def _numbered(self, iteration: int) -> list[tuple[int, str]]:
        names = self.store.list(self._of(iteration))
        named = [(re.fullmatch(r"episode_([0-9]+)\.json", name), name) for name in names]
        return sorted((int(found[1]), name) for found, name in named if found)

    def save(self, iteration: int, episode_id: int, trajectory: Trajectory) -> None:
        """Save an episode under a number, which replaces the number in its metadata.

        Args:
            iteration: the iteration that played it.
            episode_id: its number.
            trajectory: the episode.

        Raises:
            ConfigError: a number is invalid or below 0.
            CheckpointError: the file cannot be written.
        """
        path = self._file(iteration, episode_id)
        data = trajectory.to_dict()
        data["metadata"] = {**data["metadata"], "episode_id": episode_id}
        self.store.write_text(path, to_json_text(sealed({**data, "episode_id": episode_id})))

    @checked
    def load(self, iteration: int, limit: Annotated[int, Ge(0)] | None = None) -> list[Trajectory]:
        """Load episodes, in the order of their numbers.

        Args:
            iteration: the iteration that played them.
            limit: most episodes; no other files are read. ``None`` for all.

        Returns:
            The episodes; rewards that were not finite are NaN.

        Raises:
            ConfigError: the limit is negative.
            DamagedCheckpointError: a file is damaged; the message names it.
        """
        first = range(0 if limit is None else limit)
        if limit is not None and all(self.has(iteration, number) for number in first):
            # The folder may contain thousands of files, so it is not listed.
            chosen = [(number, f"episode_{number:03d}.json") for number in first]
        else:
            chosen = self._numbered(iteration)[:limit]
        return [self._load(f"{self._of(iteration)}/{name}", number) for number, name in chosen]

    def _load(self, path: str, number: int) -> Trajectory:
        value = read_json(self.store, path)
        try:
            found = Trajectory.from_dict(value)
        except (DataError, TypeError, ValueError, AttributeError) as error:
            raise DamagedCheckpointError(
                f"{self.store.path(path)} is no episode: {error}; remove it to play it again"
            ) from None
        found.metadata.setdefault("episode_id", number)
        return found

    def count(self, iteration: int) -> int:
        """Number of episodes of an iteration."""
        return len(self._numbered(iteration))

    def has(self, iteration: int, episode_id: int) -> bool:
        """Whether an episode with a number exists."""
        return self.store.exists(self._file(iteration, episode_id))


# -- metrics --------------------------------------------------------------------------------------


def append_metrics(store: BaseStore, run_id: str, row: Mapping[str, Any]) -> None:
    """Append a line to ``training_curve.jsonl``.

    Args:
        store: where it is.
        run_id: name of the run.
        row: statistics of an iteration, with the number of the iteration as ``iteration``.

    Raises:
        CheckpointError: the file cannot be written.
    """
    path = f"{run_folder(run_id)}/metrics/training_curve.jsonl"
    store.append_line(path, json.dumps(sealed(row), allow_nan=False))


def read_metrics(store: BaseStore, run_id: str, *, whole: bool = False) -> list[dict[str, Any]]:
    """Statistics of all iterations, in order.

    If an iteration has several lines, the newest one counts. An incomplete last line is ignored;
    for an iteration without a line, the statistics are read from the checkpoint that it wrote.

    Args:
        store: where they are.
        run_id: name of the run.
        whole: include ``iteration`` and ``metadata``.

    Raises:
        DamagedCheckpointError: a line is damaged.
    """
    folder = run_folder(run_id)
    path, rows = f"{folder}/metrics/training_curve.jsonl", {}
    lines = store.read_text(path).split("\n")[:-1] if store.exists(path) else []
    for number, line in enumerate(lines):
        place = f"{store.path(path)}, line {number + 1},"
        row = parsed(line, place)
        if missing := _STATISTICS - (row.keys() if isinstance(row, dict) else set()):
            raise DamagedCheckpointError(
                f"{place} is damaged: it lacks {', '.join(sorted(missing))}; remove it, and the "
                "same command makes it again"
            )
        rows[row["iteration"]] = row
    for after in _iterations(store, folder):
        if after - 1 not in rows:
            meta = read_json(store, f"{folder}/checkpoints/iter_{after}/meta.json")
            if stats := meta.get("training_stats"):
                facts = meta.get("metadata") or {}
                rows[after - 1] = {"iteration": after - 1, **stats, "metadata": facts}
    found = [rows[number] for number in sorted(rows)]
    if whole:
        return found
    return [{k: v for k, v in row.items() if k not in _NO_STATISTICS} for row in found]
