"""Chat templates of our own, each written to show one thing that templates do to history.

``ZOO`` maps a name to a :class:`Specimen`: the text is a file of ``zoo_templates/``, what it needs
and can express is in ``zoo.yaml``. None is taken from a published model. Their tokenizers are in
``tokenizers_of_the_zoo``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import yaml

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Specimen:
    """A template, the special tokens it needs, and what it can express.

    ``forks`` gives the cause for which history is rewritten: by the name of the sampled turn
    (:func:`scenarios.turns`), ``"*"`` for any, ``"closer"`` for an answer that was closed as the
    last turn is, ``"system"`` for an answer in a conversation with a system message.
    ``loses_text`` marks templates that drop the text beside a call, ``loses_thoughts`` those that
    drop what a ``<think>`` block in a content holds.
    """

    template: str
    special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")
    eos: str = "<|im_end|>"
    bos: str | None = None
    added: tuple[str, ...] = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    forks: dict = field(default_factory=dict)
    loses_text: bool = False
    loses_thoughts: bool = False
    system: bool = True
    tools: bool = True
    reasoning: str | None = None
    alternates: bool = False
    closers: tuple[str, ...] = ("<|im_end|>",)


def _specimen(name, about):
    template = (_HERE / "zoo_templates" / f"{name}.jinja").read_text(encoding="utf-8").rstrip()
    about = {key: tuple(v) if isinstance(v, list) else v for key, v in about.items()}
    return Specimen(template, **about)


ZOO: dict[str, Specimen] = {
    name: _specimen(name, about)
    for name, about in yaml.safe_load((_HERE / "zoo.yaml").read_text(encoding="utf-8")).items()
}
