"""`evaluations.jsonl`: a line for each number, of any step; and the tables that compare the newest step's with another.

`length` is that of the context, or the upper end of a bin of positions or of document lengths, in tokens. Accuracies
are means over questions, losses over tokens, in nats. A loss that isn't finite is null.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.files.atomic import write_atomically
from trainer.terminal.columns import align

RETRIEVAL = "retrieval"
FILE_NAME = "evaluations.jsonl"
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "str | None": (str, type(None)),
    "float | None": (float, int, type(None)),
}
_NAMES = {
    "loss_of_last_tokens": "loss of the last tokens, given so many",
    "loss_by_document_length": "loss of documents by length",
    "short_context_loss": "loss of documents cut to the shortest length",
}


@dataclass(frozen=True)
class Line:
    """A measured number."""

    kind: str
    length: int
    task: str | None = None
    depth: float | None = None
    accuracy: float | None = None
    num_examples: int = 0
    loss: float | None = None
    num_tokens: int = 0
    step: int = 0
    seed: int = 0
    digest: str = ""
    """Of a run's own evaluation, which forces answers, what it follows from; empty: the command's, which decodes."""

    def __post_init__(self):
        for name in ("loss", "accuracy"):
            if (value := getattr(self, name)) is not None and not math.isfinite(value):
                object.__setattr__(self, name, None)

    @property
    def key(self) -> tuple[str, str | None, int, float | None]:
        """What was measured, whatever the step."""
        return self.kind, self.task, self.length, self.depth


def read_lines(path: Path) -> list[Line]:
    """The lines of a file. Those that are none are left out; there need be no file."""
    if not path.is_file():
        return []
    parsed = (_parse(text) for text in path.read_bytes().splitlines())
    return [line for line in parsed if line is not None]


def append_lines(path: Path, lines: Iterable[Line]) -> None:
    """Adds lines to a file, which a kill leaves as it was or with all of them.

    Raises:
      OSError: the file can't be written.
    """
    before = path.read_bytes() if path.is_file() else b""
    if before and not before.endswith(b"\n"):
        before += b"\n"
    added = "".join(json.dumps(dataclasses.asdict(line)) + "\n" for line in lines)
    write_atomically(path, before + added.encode())


def newest_of(lines: Iterable[Line]) -> dict[tuple, Line]:
    """The last line of each number."""
    return {line.key: line for line in lines}


def step_before(lines: Sequence[Line], step: int) -> int | None:
    """The step that a step's results are compared with: the earliest of the others; None if there is no other."""
    return min({line.step for line in lines} - {step}, default=None)


def to_values(lines: Iterable[Line]) -> dict[str, float]:
    """Lines as curves: `retrieval/<task>/<length>`, a mean over depths, and `<kind>/<length>` for losses."""
    values: dict[str, float] = {}
    by_task: dict[str, list[Line]] = {}
    for line in lines:
        if line.kind == RETRIEVAL:
            by_task.setdefault(f"{RETRIEVAL}/{line.task}/{line.length}", []).append(line)
        elif line.loss is not None:
            values[f"{line.kind}/{line.length}"] = line.loss
    for name, of_task in by_task.items():
        num_examples = sum(line.num_examples for line in of_task)
        values[name] = sum((line.accuracy or 0.0) * line.num_examples for line in of_task) / num_examples
    return values


def describe(lines: Sequence[Line], step: int) -> str:
    """Tables of a step's results, beside those of the earliest other step.

    Args:
      lines: of any steps; of equal ones the last counts.
      step: the one that has just been evaluated.
    """
    first = step_before(lines, step)
    after = newest_of(line for line in lines if line.step == step)
    before = {} if first is None else newest_of(line for line in lines if line.step == first)
    compared = "" if first is None else f", step {first} → step {step}"
    tables = []
    of_tasks = [line for line in after.values() if line.kind == RETRIEVAL]
    if of_tasks:
        tasks = list(dict.fromkeys(str(line.task) for line in of_tasks))

        def accuracy(found: dict[tuple, Line], task: str, length: int) -> str | None:
            return _percent([each for each in found.values() if each.key[:3] == (RETRIEVAL, task, length)])

        tables.append(_table(f"accuracy{compared}", tasks, of_tasks, before, after, accuracy))
    of_losses = [line for line in after.values() if line.kind in _NAMES and line.loss is not None]
    if of_losses:
        kinds = [kind for kind in _NAMES if any(line.kind == kind for line in of_losses)]

        def loss(found: dict[tuple, Line], kind: str, length: int) -> str | None:
            line = found.get((kind, None, length, None))
            return None if line is None or line.loss is None else f"{line.loss:.3f}"

        tables.append(_table(f"nats per token{compared}", kinds, of_losses, before, after, loss))
    return "\n\n".join(tables)


def _table(
    title: str,
    rows: Sequence[str],
    lines: Sequence[Line],
    before: dict[tuple, Line],
    after: dict[tuple, Line],
    value: Callable[[dict[tuple, Line], str, int], str | None],
) -> str:
    """A row for each task or kind, a column for each length."""
    lengths = sorted({line.length for line in lines})

    def cell(row: str, length: int) -> str:
        old, new = value(before, row, length), value(after, row, length)
        return new or "" if old is None or new is None else f"{old} → {new}"

    cells = [[title, *(f"{format_length(length)}" for length in lengths)]]
    cells += [[_NAMES.get(row, row), *(cell(row, length) for length in lengths)] for row in rows]
    return "\n".join(align(cells))


def _percent(lines: Sequence[Line]) -> str | None:
    known = [line for line in lines if line.accuracy is not None]
    num_examples = sum(line.num_examples for line in known)
    if not num_examples:
        return None
    return f"{sum(line.accuracy * line.num_examples for line in known if line.accuracy is not None) / num_examples:.0%}"


def format_length(length: int) -> str:
    """A number of tokens, in units of 1,024 where it is a whole number of them.

    >>> format_length(131_072), format_length(1000)
    ('128k', '1,000')
    """
    return f"{length // 1024:,}k" if length and length % 1024 == 0 else f"{length:,}"


def _parse(text: bytes) -> Line | None:
    try:
        line = Line(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None
    values = ((getattr(line, field.name), _TYPES[str(field.type)]) for field in dataclasses.fields(Line))
    return line if all(isinstance(value, types) and type(value) is not bool for value, types in values) else None
