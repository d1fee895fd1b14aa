"""The folder that a run writes to. It is claimed before any device starts."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from trainer.checkpoints.folder import list_checkpoints
from trainer.config import TrainConfig
from trainer.config.file import config_to_json, load_saved_config, require_readable
from trainer.config.resume_changes import refuse_other_run
from trainer.errors import UserMistake
from trainer.files.atomic import write_atomically
from trainer.files.paths import refuse_unusual, refuse_url
from trainer.launch.peers import Peers, require_shared

_LOCK = ".lock"


@dataclass(frozen=True)
class Workdir:
    """The paths of a run's files. As a context manager, it gives the folder back at the end."""

    path: Path
    lock: int | None = None
    """Descriptor of the file whose lock keeps other runs away; None: this process only reads, or process 0 writes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.lock is not None:
            os.close(self.lock)

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
    def mixture_picture(self) -> Path:
        return self.path / "mixture.png"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def stacks(self, process: int | Literal["*"]) -> Path:
        """Where a process of the run leaves every thread's stack when it hangs; "*": where all of them do."""
        return self.path / f"stacks-{process}.txt"

    def write_config(self, config: TrainConfig) -> None:
        """Keeps the config that the run goes on with, in the process that has claimed the folder.

        Raises:
          OSError: it can't be written.
        """
        if self.lock is not None:
            write_atomically(self.config, json.dumps(config_to_json(config), indent=2) + "\n")

    def make_again(self, config: TrainConfig) -> bool:
        """Makes the folder again and claims it, if somebody has removed it under the run.

        Args:
          config: that the run goes on with.

        Returns:
          Whether it had to be made.

        Raises:
          UserMistake: another run has claimed it meanwhile.
          OSError: it can't be made.
        """
        if self.lock is None:
            return False
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path / _LOCK), os.fstat(self.lock)):
                return False
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        lock = _lock(self.path)
        os.dup2(lock, self.lock)  # the descriptor that is closed in the end
        os.close(lock)
        self.write_config(config)
        return True


def claim_workdir(path: str | os.PathLike[str], config: TrainConfig) -> Workdir:
    """Locks the folder, and writes the config into it unless it holds checkpoints.

    The lock lasts until the workdir is left as a context manager, or this process ends.

    Args:
      path: the folder; made if missing.
      config: what is about to be trained.

    Raises:
      UserMistake: the folder can't be written, another run is using it, it holds checkpoints that this config can't go
        on from, it is the folder that the run begins with, or the config can't be read back.
    """
    require_readable(config)
    try:
        refuse_url(path)
        path = Path(path).absolute()  # as Orbax has it, in every message
        refuse_unusual(path, to_save=True)
    except ValueError as refused:
        raise UserMistake(f"workdir: {refused}") from None
    workdir = Workdir(path)
    if config.init_from is not None and path.resolve() == Path(config.init_from).resolve():
        raise UserMistake(
            f"workdir {path} is the folder of init_from, whose config.json the run's would replace; "
            "choose another with --workdir"
        )
    try:
        with contextlib.ExitStack() as undone:
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
            undone.callback(os.close, lock)
            _refuse_other_types(workdir)
            workdir.checkpoints.mkdir(exist_ok=True)
            holds_checkpoints = bool(list_checkpoints(workdir.checkpoints).steps)
            if holds_checkpoints:
                refuse_other_run(_held_config(workdir), config, f"workdir {path}")
            workdir = Workdir(path, lock)
            if not holds_checkpoints:
                workdir.write_config(config)
            undone.pop_all()
    except OSError as error:
        raise UserMistake(
            f"workdir {path} can't be written: {error.strerror}; choose another with --workdir"
        ) from error
    return workdir


def claim_together(path: Path, config: TrainConfig, peers: Peers) -> Workdir:
    """Claims the workdir of a run's processes: process 0 locks it, and the others see that it is theirs, too.

    Args:
      path: the folder.
      config: of the run.
      peers: the processes.

    Raises:
      UserMistake: as `claim_workdir`, or the processes see different folders.
    """
    workdir = claim_workdir(path, config) if peers.is_first else Workdir(path)
    require_shared(peers, workdir.path)
    return workdir


def _lock(path: Path) -> int:
    """Locks the folder until the descriptor that this returns is closed, or this process ends in whatever way."""
    lock = path / _LOCK
    try:
        # A link in the folder must not choose which file is made.
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if not os.path.lexists(lock):
            raise
        raise UserMistake(f"{lock} can't be opened as the run's lock: {error.strerror}; remove it") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserMistake(
            f"workdir {path} is in use by another run; wait for it to end, or choose another with --workdir"
        ) from None
    except OSError as error:
        # Some network file systems have no locks. There the user has to keep two runs apart.
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            os.close(descriptor)
            raise
    return descriptor


def _held_config(workdir: Workdir) -> TrainConfig:
    try:
        return load_saved_config(workdir.config)
    except UserMistake as mistake:
        raise UserMistake(
            f"workdir {workdir.path} holds checkpoints, but no readable config.json to tell whose: {mistake}; "
            "put it back, or choose another with --workdir"
        ) from mistake


def _refuse_other_types(workdir: Workdir) -> None:
    folders = (workdir.checkpoints, workdir.tensorboard)
    for path in (*folders, workdir.config, workdir.record, workdir.metrics):
        is_folder = path in folders
        if os.path.lexists(path) and not (path.is_dir() if is_folder else path.is_file() and os.access(path, os.R_OK)):
            raise UserMistake(
                f"{path} is not {'a folder' if is_folder else 'a file that can be read'}; put the run's own back, move "
                "it elsewhere, or choose another --workdir"
            )
