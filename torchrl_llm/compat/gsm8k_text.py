"""GSM8K in the plain-text environment: ``make_gsm8k_env``.

For existing scripts; :class:`~torchrl_llm.envs.GSM8KEnv` is the environment with conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensordict import NonTensorData, TensorDictBase, is_non_tensor
from tensordict.utils import NestedKey
from torchrl.data import Composite
from torchrl.envs import Transform, TransformedEnv

from torchrl_llm.compat.llm_env import LLMEnv
from torchrl_llm.data.column import Column
from torchrl_llm.data.row_files import MappedRows, RowLoader, load_rows
from torchrl_llm.envs.datasets.hub_tasks import GSM8KEnv
from torchrl_llm.envs.transforms.episode_limits import StepCounter
from torchrl_llm.errors import ConfigError
from torchrl_llm.rewards.number_rewards import GSM8KRewardParser

BASE_PROMPT = (
    "A user asks a question, and an assistant answers it. The assistant thinks first, between "
    "<think> and </think>, and then gives the final number between <answer> and </answer>.\n"
    "User: %s\nAssistant: <think>"
)
"""Prompt template; ``%s`` is replaced by the question."""


class GSM8KPrepareQuestion(Transform):
    r"""Puts a question into a prompt that asks for reasoning and an answer block, at reset.

    The prompt ends inside the reasoning: ``... Assistant: <think>``. Insert it before the transform
    that draws the questions, because a reset applies transforms from last to first.

    Args:
        in_keys: keys of questions; ``["text"]`` if not given.
        out_keys: keys of prompts; ``in_keys`` if not given.

    Raises:
        ConfigError: the keys do not match.

    Example:
        >>> env = LLMEnv.from_dataloader([{"text": "What is 1 + 1?"}])
        >>> env = env.insert_transform(0, GSM8KPrepareQuestion())
        >>> env.reset()["text"][0].split("User: ")[1]
        'What is 1 + 1?\nAssistant: <think>'
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
    ) -> None:
        in_keys = ["text"] if in_keys is None else list(in_keys)
        out_keys = list(in_keys) if out_keys is None else list(out_keys)
        if len(in_keys) != len(out_keys):
            raise ConfigError(f"in_keys {in_keys} and out_keys {out_keys} differ in number")
        super().__init__(in_keys=in_keys, out_keys=out_keys)

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        if tensordict is None:
            return None
        for source, target in zip(self.in_keys, self.out_keys, strict=True):
            tensordict.set(target, _prepared(tensordict.get(source)))
        return tensordict

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict  # a continued text is already prepared

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the prompts."""
        for source, target in zip(self.in_keys, self.out_keys, strict=True):
            if source != target:
                observation_spec[target] = observation_spec[source].clone()
        return observation_spec


def _prepared(questions: Any) -> Any:
    if isinstance(questions, NonTensorData):
        return NonTensorData(BASE_PROMPT % (questions.data,))
    rows = questions.tolist() if is_non_tensor(questions) else list(questions)
    # Rows that do not start in this reset have no question.
    return Column.of(None if row is None else BASE_PROMPT % (row,) for row in rows)


class _ResponseColumn:
    """Reads responses from a separate column, like a mode of an environment."""

    name = "text"

    def __init__(self, key: NestedKey) -> None:
        self.key = key

    def responses(self, td: TensorDictBase) -> list[str]:
        return td.get(self.key).tolist()


class _ResponseReward(GSM8KRewardParser):
    """The reward for environments without conversations."""

    def _mode(self) -> Any:
        return _ResponseColumn("text_response")


def make_gsm8k_env(
    dataset: Any = "openai/gsm8k",
    num_envs: int = 1,
    repeats: int | None = None,
    batch_size_dl: int = 1,
    seed: int | None = None,
    group_repeats: bool = False,
    tokenizer: Any = None,
    *,
    data_files: str | Path | list[str | Path] | None = None,
) -> TransformedEnv:
    r"""GSM8K with prompts and responses as plain text, one step per episode.

    The policy reads ``"text"`` and writes ``"text_response"``; the reward is the same as in
    :class:`~torchrl_llm.envs.GSM8KEnv`.

    Args:
        dataset: rows with ``question`` and ``answer``, or the id of a dataset on the Hub.
        num_envs: ``B``.
        repeats: number of rows per question.
        batch_size_dl: number of questions that the loader reads at a time.
        seed: seed of the order.
        group_repeats: multiply the batch by ``repeats``.
        tokenizer: its end-of-sequence token is removed from responses before scoring.
        data_files: JSON-lines files instead of ``dataset``.

    Raises:
        ConfigError: an argument is invalid.
        DataError: the data is missing or malformed, or lacks a column.

    Example:
        >>> rows = [{"question": "What is 3 + 4?", "answer": "Add.\n#### 7"}]
        >>> env = make_gsm8k_env(rows, num_envs=1)
        >>> td = env.reset().set("text_response", Column.of(["3+4</think><answer>7</answer>"]))
        >>> env.step(td)["next", "reward"].item()
        1.0
    """
    if data_files is not None:
        files = data_files if isinstance(data_files, (list, tuple)) else [data_files]
        dataset = [Path(file) for file in files]
    rows = load_rows(dataset, columns=GSM8KEnv.COLUMNS, name=GSM8KEnv.NAME, split="train")
    loader = RowLoader(
        MappedRows(rows, _text_row), seed=seed, batch_size=batch_size_dl, collate_fn=_columns
    )
    env = LLMEnv.from_dataloader(
        loader, batch_size=num_envs, repeats=repeats, group_repeats=group_repeats
    )
    env = env.insert_transform(0, GSM8KPrepareQuestion())
    env = env.append_transform(StepCounter(max_steps=1))
    return env.append_transform(_ResponseReward(tokenizer, input_mode="text"))


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _text_row(row: Any) -> dict[str, Any]:
    made = dict(GSM8KEnv.make_row(row))
    return {"text": made["query"], **made}
