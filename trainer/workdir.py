"""The folder that a run writes to: claimed before any device starts, every file in it written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import TrainConfig
from trainer.config_file import config_to_json
from trainer.errors import UserMistake

# What may change between a run and its resumption, because no parameter, loss or validation loss depends on it.
FREE_TO_CHANGE = (
    "name",
    "description",
    "log_every_num_steps",
    "data.num_prefetch_batches",
    "data.token_cache_dir",
    "checkpoint.",
    "compilation.",
    "evaluation.every_num_steps",
    "samples.",
)
_ABSENT = "(absent)"


@dataclass(frozen=True)
class Workdir:
    """The paths of a run's files."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def record(self) -> Path:
        return self.path / "record.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def loss_picture(self) -> Path:
        return self.path / "loss.png"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"


def claim_workdir(path: Path, config: TrainConfig) -> Workdir:
    """Makes the folder this process's own, and writes the config into it.

    Args:
      path: the folder; made if missing.
      config: what is about to be trained.

    Raises:
      UserMistake: the folder can't be written, another run is using it, or it holds checkpoints of another config.
    """
    workdir = Workdir(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        _lock(path)
        _refuse_other_config(workdir, config)
        workdir.checkpoints.mkdir(exist_ok=True)
        write_atomically(workdir.config, json.dumps(config_to_json(config), indent=2) + "\n")
    except OSError as error:
        raise UserMistake(
            f"workdir {path} can't be written: {error.strerror}; choose another with --workdir"
        ) from error
    return workdir


def write_atomically(path: Path, content: str | bytes, *, unfinished: Path | None = None) -> None:
    """Writes a file so that a kill or a power cut at any moment leaves the old content or the new, never half of it.

    Args:
      path: the file.
      content: text is written as UTF-8.
      unfinished: where the content is collected first, in the same folder; by default beside the file, as `NAME.tmp`.

    Raises:
      OSError: it can't be written; the file is as it was.
    """
    unfinished = unfinished or path.with_name(f"{path.name}.tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # half a file would keep the room that others need
            unfinished.unlink()
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Puts a file's content, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(path: Path) -> None:
    """Holds the folder until this process ends, however it ends: the kernel drops the lock with the process."""
    descriptor = os.open(path / ".lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserMistake(
            f"workdir {path} is in use by another run; wait for it to end, or choose another with --workdir"
        ) from None
    except OSError as error:
        # Some network file systems have no locks; there the user keeps two runs apart.
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise


def _refuse_other_config(workdir: Workdir, config: TrainConfig) -> None:
    if not workdir.checkpoints.is_dir() or not any(workdir.checkpoints.iterdir()):
        return
    held: Any = None
    with contextlib.suppress(FileNotFoundError, ValueError):  # ValueError: not UTF-8, or not JSON
        held = json.loads(workdir.config.read_text(encoding="utf-8"))
    if not isinstance(held, dict):
        raise UserMistake(
            f"workdir {workdir.path} holds checkpoints, but no readable config.json to tell whose; "
            "choose another with --workdir"
        )
    before, now = _flatten(held), _flatten(config_to_json(config))
    differing = [
        f"{name}: {before.get(name, _ABSENT)} in {workdir.path}, {now.get(name, _ABSENT)} now"
        for name in dict.fromkeys([*now, *before])
        if before.get(name, _ABSENT) != now.get(name, _ABSENT) and not name.startswith(FREE_TO_CHANGE)
    ]
    if differing:
        raise UserMistake(
            "\n  ".join([f"workdir {workdir.path} holds checkpoints of another config:", *differing])
            + "\nchoose another with --workdir"
        )


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
