"""Reads trees of text: a prompt and its completions, each of which may go on in several ways.

A line of JSON is one tree:

    {"prompt": "2 + 2 =", "completions": [{"text": " 4", "weight": 1.5}, {"text": " 5", "weight": -0.5}]}

A completion may have `completions` of its own, to any depth. A weight multiplies the loss of each token of its text: 1
by default, 0 for a prompt. Other fields are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainer.data.readers import LinePlace, check_weight, json_name, names_of, object_of_line, read_lines, utf8_of_field
from trainer.errors import DataError


class TextNode(NamedTuple):
    """A prompt, or a completion."""

    parent: int
    """Number of the node that it continues, in depth-first order; -1: it is the prompt."""
    text: bytes
    """UTF-8."""
    weight: float


class TextTree(NamedTuple):
    """A tree of text."""

    nodes: list[TextNode]
    """In depth-first order, the prompt first."""
    line: LinePlace

    @property
    def num_bytes(self) -> int:
        """Bytes of all texts."""
        return sum(len(node.text) for node in self.nodes)


def read_trees(path: Path) -> Iterator[TextTree]:
    """The trees of one file of JSON-lines, compressed or not.

    Raises:
        DataError: a line holds no tree; names the line, and the completion in it.
    """
    return read_lines(path, _tree_of_line)


def _tree_of_line(line: bytes, where: LinePlace) -> TextTree | None:
    record = object_of_line(line, where)
    if record is None:
        return None
    if "prompt" not in record:
        raise DataError(
            f"{where}: no field 'prompt' before the completions; it has {names_of(list(record))}. Give the text that "
            'they continue, "" for none, or drop the tree'
        )
    nodes: list[TextNode] = []
    # One after another, not by recursion, whose depth Python bounds.
    waiting: list[tuple[Any, int, str]] = [(record, -1, "")]
    while waiting:
        node, parent, name = waiting.pop()
        place = f"{where}: {name}" if name else str(where)
        if not isinstance(node, dict):
            raise DataError(f'{place} is {json_name(node)}, expected an object {{"text": …}}')
        field = "text" if name else "prompt"
        if field not in node:
            raise DataError(f"{place}: no field {field!r}; it has {names_of(list(node))}")
        completions = node.get("completions", [])
        if not isinstance(completions, list):
            raise DataError(f"{place}: field 'completions' is {json_name(completions)}, expected an array")
        nodes.append(
            TextNode(
                parent,
                utf8_of_field(node[field], field, place),
                check_weight(node.get("weight", float(bool(name))), place),
            )
        )
        prefix = f"{name}.completions" if name else "completions"
        waiting += [
            (each, len(nodes) - 1, f"{prefix}[{index}]") for index, each in reversed(list(enumerate(completions)))
        ]
        if not name and not completions:
            raise DataError(f"{place}: no completions of its prompt; give one at least, or drop the tree")
    return TextTree(nodes, where)
