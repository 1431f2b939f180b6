"""Prompt templates: files with fields in braces.

A field is ``{name}``, of letters and ``_``; all other braces are text. Fields are filled in one
pass, so braces in the values are also text. Built-in templates are in the folder ``prompts``; a
file of the same name in a user's folder replaces one.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchrl_llm.errors import ConfigError

PROMPTS = Path(__file__).with_name("prompts")
"""The folder of the built-in templates."""
Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
_FIELD = re.compile(r"\{([A-Za-z_]+)\}")


@dataclass(frozen=True)
class Template:
    """A prompt with fields.

    Args:
        text: the prompt.
        source: its origin, for messages.

    Example:
        >>> Template('Answer {"a": {value}} to {who}.').fill(value="{who}", who="me")
        'Answer {"a": {who}} to me.'
    """

    text: str
    source: str = "a template"

    @classmethod
    def load(
        cls, name: str, prompts_dir: Folders = None, variables: Collection[str] | None = frozenset()
    ) -> Template:
        """Read a template.

        Args:
            name: name of the file, without ``.txt``.
            prompts_dir: one or several folders that are searched before the built-in one.
            variables: fields that will be filled; ``None`` does not check them.

        Raises:
            ConfigError: the folder or file does not exist, or a field is not filled.
        """
        single = isinstance(prompts_dir, str | os.PathLike)
        folders = [Path(folder) for folder in ([prompts_dir] if single else prompts_dir or ())]
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(f"prompts_dir={str(folder)!r} is no folder")
        paths = [folder / f"{name}.txt" for folder in (*folders, PROMPTS)]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise ConfigError(f"no template {name!r}: there is no {' or '.join(map(str, paths))}")
        template = cls(path.read_text(encoding="utf-8").strip(), str(path))
        if variables is not None:
            template.check(variables)
        return template

    @property
    def fields(self) -> list[str]:
        """Its fields, each once."""
        return list(dict.fromkeys(_FIELD.findall(self.text)))

    def check(self, variables: Collection[str]) -> None:
        """Raise ``ConfigError`` for a field that is not among the variables."""
        for name in self.fields:
            if name not in variables:
                near = difflib.get_close_matches(name, variables, 1)
                hint = f"; did you mean {{{near[0]}}}?" if near else ""
                known = ", ".join(sorted(variables)) or "none"
                raise ConfigError(
                    f"{self.source} has the field {{{name}}}, which nobody fills; there are: "
                    f"{known}{hint}"
                )

    def fill(self, **values: object) -> str:
        """The prompt with its fields filled.

        Args:
            values: values of the fields; extra values are allowed.

        Raises:
            ConfigError: a field has no value.
        """
        self.check(values.keys())
        return _FIELD.sub(lambda match: str(values[match[1]]), self.text)
