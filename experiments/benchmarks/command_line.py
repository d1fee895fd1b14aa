"""The command lines of benchmarks, read by tyro."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import tyro
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
