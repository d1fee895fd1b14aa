"""The folder `checkpoints/`: which entries are checkpoints, whether they are whole, and their metadata.

Nothing here reads the training state, so nothing here imports JAX or Orbax.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import TrainingFailed

DIGESTS = "SHA256SUMS"

# A step as Python writes it. `str.isdigit` would also accept "²", "１２" and "007", which no save writes.
_STEP = "[1-9][0-9]{0,17}"
_OF_A_PROCESS = re.compile(r"state/ocdbt\.process_([0-9]+)/")  # Orbax's


@dataclass(frozen=True)
class Damaged:
    """A checkpoint that cannot be used."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"checkpoint {self.path} is damaged ({self.reason})"


class Listing(NamedTuple):
    """The entries of a `checkpoints/` that are a run's, by their names and types. All others are left alone."""

    steps: tuple[int, ...]
    """Steps that have a checkpoint, ascending. `find_damage` says whether it is whole. A symbolic link to a folder with
    digests counts: somebody moved the checkpoint to another disk."""
    unfinished: tuple[Path, ...]
    """Folders that a save was writing when its process ended."""


def list_checkpoints(folder: Path) -> Listing:
    """Tells the entries of a `checkpoints/` apart, without touching any.

    Raises:
      OSError: the folder can't be read.
    """
    steps, unfinished = [], []
    for path in sorted(folder.iterdir()):
        # os.path's functions return False where pathlib's raise, for example for a link into a forbidden folder.
        is_own_folder = os.path.isdir(path) and not os.path.islink(path)
        if re.fullmatch(_STEP, path.name) and (is_own_folder or os.path.isfile(path / DIGESTS)):
            steps.append(int(path.name))
        elif re.fullmatch(rf"{_STEP}\.tmp", path.name) and is_own_folder:
            unfinished.append(path)
    return Listing(tuple(sorted(steps)), tuple(unfinished))


def owner(name: str) -> int:
    """The process that wrote a file of a checkpoint, by the file's name in it. Process 0 writes what all share.

    >>> owner("state/ocdbt.process_3/d/0123"), owner("state/_METADATA")
    (3, 0)
    """
    of_a_process = _OF_A_PROCESS.match(name)
    return int(of_a_process[1]) if of_a_process else 0


def find_damage(path: Path, is_mine: Callable[[str], bool] = lambda name: True) -> str | None:
    """The damage of a checkpoint, by its digests; None if every file is as it was written.

    Args:
      path: the checkpoint.
      is_mine: whether to look at a file, by its name.
    """
    if not os.path.isfile(path / DIGESTS):  # to read a pipe would take for ever
        return f"{DIGESTS} is missing, or not a file"
    try:
        lines = (path / DIGESTS).read_text(encoding="utf-8").split("\n")
        expected = {name: digest for digest, name in (line.split("  ", 1) for line in lines if line)}
        found = digests(path, is_mine)
    except FileNotFoundError as error:
        return f"{printable(str(error.filename))} is missing"
    except (OSError, ValueError) as error:
        return f"{DIGESTS} can't be read: {error}"
    if not expected:
        return f"{DIGESTS} is empty"
    for name, digest in expected.items():
        if is_mine(name) and name not in found:
            return f"{printable(name)} is missing"
        if is_mine(name) and found[name] != digest:
            return f"{printable(name)} is not what was written"
    unlisted = sorted(found.keys() - expected.keys())
    return f"{DIGESTS} doesn't list {printable(unlisted[0])}" if unlisted else None


def digests(path: Path, is_mine: Callable[[str], bool] = lambda name: True) -> dict[str, str]:
    """SHA-256 of each file of a checkpoint that `is_mine`, except the list of digests itself, by name."""
    found = {}
    for file in sorted(path.rglob("*")):
        name = str(file.relative_to(path))
        if is_mine(name) and file.is_file() and file.name != DIGESTS:
            with file.open("rb") as content:
                found[name] = hashlib.file_digest(content, "sha256").hexdigest()
    return found


@dataclass(frozen=True)
class Metadata:
    """A checkpoint's `run.json`."""

    step: int
    data: Any
    """The data iterator's state, as JSON values."""
    config_history: Any
    """The config that led here and its changes, as JSON values."""
    base: str | None = None
    """SHA-256 of the frozen base that the adapters belong to; None: the state has all parameters."""


def read_metadata(path: Path) -> Metadata:
    """Reads a whole checkpoint's `run.json`.

    Raises:
      TrainingFailed: it isn't what a run writes, though its digest is right.
    """
    try:
        run = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise cannot_restore(path, f"its run.json can't be read: {error}") from error
    if not isinstance(run, dict) or not {"step", "data", "config_history"} <= run.keys():
        raise cannot_restore(path, "its run.json is no object with step, data and config_history")
    if isinstance(run["step"], bool) or run["step"] != int(path.name):
        raise cannot_restore(path, f"its run.json is of step {str(run['step'])[:40]}; was the folder renamed?")
    return Metadata(int(path.name), run["data"], run["config_history"], run.get("base"))


def cannot_restore(path: Path, reason: object) -> TrainingFailed:
    """The error for a checkpoint whose digests are right. Passing over it would silently lose the newest steps."""
    return TrainingFailed(
        f"checkpoint {path} is whole, but this version can't restore it: {reason}\n"
        "use the version that saved it, or move that folder elsewhere to use the checkpoint before it"
    )


def all_damaged(damaged: Sequence[Damaged], remedy: str) -> TrainingFailed:
    """The error that no checkpoint is left to go on from, with the reason for each."""
    return TrainingFailed("\n  ".join(["every checkpoint of this run is damaged:", *map(str, damaged)]) + f"\n{remedy}")


def printable(name: str) -> str:
    """A file's name in a form that any terminal can print: quoted if it isn't UTF-8 or has control characters."""
    return name if name.isprintable() else ascii(name)
