"""Sphinx extension: ``.. other-names::`` shows which key has which names in other libraries.

Each name is an entry of the index, so that a search for it finds the key.
"""

from __future__ import annotations

from docutils import nodes
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective

from torchrl_llm.recipes import other_names

# The groups of verl in which a name stands whose first part this is.
VERL = {
    "rollout": "actor_rollout_ref.",
    "optim": "actor_rollout_ref.actor.",
    "policy_loss": "actor_rollout_ref.actor.",
}


class OtherNames(SphinxDirective):
    """A term per key here, with the names that lead to it."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(other_names.__file__)
        keys: dict[str, list[str]] = {}
        for name, ours in other_names.OTHER_NAMES.items():
            keys.setdefault(ours, []).append(name)
        shown = nodes.definition_list()
        for ours, names in sorted(keys.items()):
            shown += nodes.definition_list_item(
                "", nodes.term("", "", *self.key(ours)), nodes.definition("", self.listed(names))
            )
        return [shown]

    def key(self, ours: str) -> list[nodes.Node]:
        """Our key as code; a sentence, which says what stands in its place, as text."""
        is_key = " " not in ours.replace(" and ", "").partition("=")[0]
        return [nodes.literal("", ours) if is_key else nodes.Text(ours)]

    def listed(self, names: list[str]) -> nodes.paragraph:
        text = nodes.paragraph()
        for name in names:
            place = f"other-name-{name.replace('.', '-')}"
            spelled = {name, VERL.get(name.partition(".")[0], "") + name}
            # A search shows main entries first.
            entries = [("single", each, place, "main", None) for each in sorted(spelled)]
            text += addnodes.index(entries=entries)
            text += nodes.literal("", name, ids=[place])
            text += nodes.Text(" ")
        return text


def setup(app):
    app.add_directive("other-names", OtherNames)
    return {"parallel_read_safe": True}
