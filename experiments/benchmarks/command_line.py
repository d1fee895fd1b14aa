"""The command lines of benchmarks, read by tyro, and their output: JSON lines and tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro
from rich.console import Console
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

from trainer.cli.flags import read_path

_Arguments = TypeVar("_Arguments")


def read_arguments(
    arguments: type[_Arguments], words: Sequence[str] | None = None, *, description: str | None = None
) -> _Arguments:
    """Reads a command line. Paths must be local ones, as the trainer's.

    Args:
      arguments: a dataclass with a field for each flag.
      words: the command line's; None: this process's own.
      description: of the command, for its help; None: the dataclass's docstring.

    Raises:
      SystemExit: with status 2 for a mistake, described on standard error; with 0 after `--help`.
    """
    registry = ConstructorRegistry()
    registry.primitive_rule(lambda info: _PATH if info.type is Path else None)
    with registry:
        return tyro.cli(arguments, args=words, description=description)


def require_known(names: Iterable[str], known: Collection[str], what: str) -> None:
    """Refuses names that aren't known.

    Raises:
      ValueError: with the unknown names, and the known ones.
    """
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"unknown {what} {', '.join(unknown)}; expected some of {', '.join(known)}")


def append_rows(path: Path | None, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends rows to a file of JSON lines, whose folder is made if it is missing; None: nothing is written."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def table_console() -> Console:
    """A console for tables, which is wide where the output is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def _read_path(words: list[str]) -> Path:
    try:
        return read_path(words[0])
    except argparse.ArgumentTypeError as refused:
        raise ValueError(str(refused)) from None


_PATH: PrimitiveConstructorSpec[Path] = PrimitiveConstructorSpec(
    nargs=1,
    metavar="PATH",
    instance_from_str=_read_path,
    is_instance=lambda value: isinstance(value, Path),
    str_from_instance=lambda path: [str(path)],
)
