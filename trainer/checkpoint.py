"""Checkpoints: the training state and the place in the data, saved together or not at all.

    checkpoints/
      300/                 a whole checkpoint, named for the steps behind it
        state/             the training state, written by Orbax
        run.json           step and the data iterator's state
        SHA256SUMS         digests of all the files above; `sha256sum -c SHA256SUMS` checks them by hand
      400.tmp/             one being written, or cut short by a kill
      200.damaged/         one that fails its digests, set aside when its step was saved again or its removal was due

A checkpoint is written into `N.tmp` and renamed to `N` once everything in it is on the disk, so that a kill leaves
either all of it or none under that name. Reading verifies the digests first: Orbax notices a missing or a cut file, but
restores flipped bits in array data without a word (its data files carry no checksum), and training would go on from
garbage.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from trainer.errors import TrainingFailed
from trainer.workdir import sync, write_atomically

_DIGESTS = "SHA256SUMS"


@dataclass(frozen=True)
class Damaged:
    """A checkpoint that cannot be used."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"checkpoint {self.path} is damaged ({self.reason})"


@dataclass(frozen=True)
class Restored:
    """What a checkpoint held."""

    step: int
    state: Any
    """The training state, on the devices."""
    data_state: Any
    """The data iterator's state, as JSON values."""
    damaged: tuple[Damaged, ...]
    """Newer checkpoints that were passed over."""


class Checkpoints:
    """The checkpoints of one run, saved in the background.

    Args:
      folder: the run's `checkpoints/`; what earlier kills left half-written in it is removed.
      num_kept: newest checkpoints kept. One that `restore_newest` found damaged isn't counted. Each is verified before
        it is removed, and set aside instead if it is damaged.
    """

    def __init__(self, folder: Path, num_kept: int):
        self._folder = folder.absolute()
        self._num_kept = num_kept
        self._orbax = ocp.StandardCheckpointer()
        self._saving: threading.Thread | None = None
        self._failure: TrainingFailed | None = None
        for unfinished in self._folder.glob("*.tmp"):
            shutil.rmtree(unfinished)
        self._steps = _steps_in(self._folder)

    @property
    def newest_step(self) -> int:
        """The step of `newest`; 0 if there is none."""
        return self._steps[-1] if self._steps else 0

    @property
    def newest(self) -> Path | None:
        """The newest whole checkpoint that isn't known to be damaged."""
        return self._path(self._steps[-1]) if self._steps else None

    def restore_newest(self, abstract_state: Any) -> Restored | None:
        """Reads the newest checkpoint that is whole, or returns None if there has never been one.

        Args:
          abstract_state: the state's tree of `jax.ShapeDtypeStruct`s with shardings; the mesh may differ from the one
            saved on.

        Raises:
          TrainingFailed: there are checkpoints, but all are damaged, or the newest whole one is of another form.
            Nothing is removed.
        """
        damaged: list[Damaged] = []
        for step in reversed(self._steps):
            path = self._path(step)
            reason = find_damage(path)
            if reason is None:
                run = json.loads((path / "run.json").read_text(encoding="utf-8"))
                state = self._restore(path, abstract_state)
                self._steps = [known for known in self._steps if known <= step]
                return Restored(step, state, run["data"], tuple(damaged))
            damaged.append(Damaged(path, reason))
        if damaged:
            raise _all_damaged(damaged, "put a good copy back, or start afresh with another --workdir")
        return None

    def save(self, step: int, state: Any, data_state: Any) -> None:
        """Starts saving, and returns once the state may be overwritten; an earlier save is waited for first.

        Args:
          step: the steps behind the state; must be more than any saved or restored before.
          state: tree of arrays.
          data_state: JSON values from which the data goes on with the batch after this step.

        Raises:
          TrainingFailed: this or the earlier save failed (a full disk, for example). Nothing is left of it, the
            checkpoints before it are kept, and this step, too, may be saved again.
        """
        self.wait()
        assert not self._steps or step > self._steps[-1], f"step {step} after {self._steps}"
        unfinished = self._folder / f"{step}.tmp"
        try:
            unfinished.mkdir()
            write_atomically(unfinished / "run.json", json.dumps({"step": step, "data": data_state}) + "\n")
            self._orbax.save(unfinished / "state", state)
        except Exception as error:
            self._abandon(unfinished)
            raise self._failed_save(step, error) from error
        self._saving = threading.Thread(target=self._finish, args=(step, unfinished), name=f"checkpoint-{step}")
        self._saving.start()

    def wait(self) -> None:
        """Returns when no save is in progress any more.

        Raises:
          TrainingFailed: the save failed.
        """
        if self._saving is not None:
            self._saving.join()
            self._saving = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Waits for the save in progress and lets Orbax's threads go.

        Raises:
          TrainingFailed: the save failed.
        """
        try:
            self.wait()
        finally:
            self._orbax.close()

    def _restore(self, path: Path, abstract_state: Any) -> Any:
        try:
            return self._orbax.restore(path / "state", abstract_state)
        except Exception as error:
            # Its digests are right, so it isn't damaged, and to pass over it would quietly lose the newest steps.
            raise _cannot_restore(path, error) from error

    def _path(self, step: int) -> Path:
        return self._folder / str(step)

    def _finish(self, step: int, unfinished: Path) -> None:
        try:
            self._orbax.wait_until_finished()
            digests = "".join(f"{digest}  {name}\n" for name, digest in _digests(unfinished).items())
            write_atomically(unfinished / _DIGESTS, digests)
            for path in (unfinished, *unfinished.rglob("*")):
                sync(path)
            if self._path(step).exists():
                self._set_aside(self._path(step))
            unfinished.replace(self._path(step))
            sync(self._folder)
            self._steps.append(step)
        except Exception as error:  # raised by wait(), in the thread that can tell of it
            self._abandon(unfinished)
            self._failure = self._failed_save(step, error)
            self._failure.__cause__ = error
            return
        try:
            self._remove_oldest()
        except OSError as error:
            self._failure = TrainingFailed(
                f"checkpoint {self._path(step)} is saved, but an older one can't be removed: {error}"
            )
            self._failure.__cause__ = error

    def _abandon(self, unfinished: Path) -> None:
        """Removes what a failed save has written, once nothing more is being written, and starts Orbax afresh."""
        for end in (self._orbax.wait_until_finished, self._orbax.close):
            with contextlib.suppress(Exception):  # the save's own error, perhaps
                end()
        self._orbax = ocp.StandardCheckpointer()
        shutil.rmtree(unfinished, ignore_errors=True)

    def _failed_save(self, step: int, error: Exception) -> TrainingFailed:
        # Orbax reports a full disk as other errors than OSError, too.
        return TrainingFailed(
            f"saving checkpoint {self._path(step)} failed: {type(error).__name__}: {error}; "
            f"the newest good checkpoint is {self.newest or 'not there yet'}; "
            "see that the disk has room and can be written to"
        )

    def _set_aside(self, damaged: Path) -> None:
        names = (f"{damaged.name}.damaged{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
        damaged.replace(next(self._folder / name for name in names if not (self._folder / name).exists()))

    def _remove_oldest(self) -> None:
        while len(self._steps) > self._num_kept:
            oldest = self._path(self._steps[0])
            if find_damage(oldest) is not None:
                self._set_aside(oldest)
                self._steps.pop(0)
                continue
            # Renamed first: a kill amid the removal must not leave half a checkpoint under a whole one's name.
            removed = oldest.replace(oldest.with_name(f"{oldest.name}.tmp"))
            self._steps.pop(0)
            shutil.rmtree(removed)


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint to read the model from."""

    path: Path
    step: int
    tokenizer: str | None
    """Identity of the tokenizer that made the tokens; None: it was saved before checkpoints said so."""
    damaged: tuple[Damaged, ...]
    """Newer checkpoints that were passed over."""


def find_newest(folder: Path) -> FoundCheckpoint | None:
    """Looks for the newest whole checkpoint, without touching any: their run may be under way.

    Args:
      folder: a run's `checkpoints/`.

    Returns:
      None if there is no checkpoint.

    Raises:
      TrainingFailed: there are checkpoints, but all are damaged.
    """
    damaged: list[Damaged] = []
    for step in reversed(_steps_in(folder) if folder.is_dir() else []):
        path = folder.absolute() / str(step)
        reason = find_damage(path)
        if reason is None:
            run = json.loads((path / "run.json").read_text(encoding="utf-8"))
            return FoundCheckpoint(path, step, run["data"].get("tokenizer"), tuple(damaged))
        damaged.append(Damaged(path, reason))
    if damaged:
        raise _all_damaged(damaged, "put a good copy back")
    return None


def restore_params(checkpoint: FoundCheckpoint, abstract_params: Any) -> Any:
    """Reads the model's parameters alone.

    Args:
      checkpoint: from `find_newest`.
      abstract_params: their tree of `jax.ShapeDtypeStruct`s with shardings.

    Raises:
      TrainingFailed: they are of another form, or can't be read.
    """
    wanted = {"params": abstract_params}
    arguments = ocp.args.PyTreeRestore(
        wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
    )
    with ocp.PyTreeCheckpointer() as orbax:
        try:
            return orbax.restore(checkpoint.path / "state", args=arguments)["params"]
        except Exception as error:
            raise _cannot_restore(checkpoint.path, error) from error


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, by its digests, or None if every file is as it was written."""
    try:
        lines = (path / _DIGESTS).read_text(encoding="utf-8").split("\n")
        expected = {name: digest for digest, name in (line.split("  ", 1) for line in lines if line)}
        found = _digests(path)
    except FileNotFoundError:
        return f"{_DIGESTS} is missing"
    except (OSError, ValueError) as error:
        return f"{_DIGESTS} can't be read: {error}"
    return _first_difference(expected, found)


def _steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def _all_damaged(damaged: list[Damaged], remedy: str) -> TrainingFailed:
    return TrainingFailed("\n  ".join(["every checkpoint of this run is damaged:", *map(str, damaged)]) + f"\n{remedy}")


def _cannot_restore(path: Path, error: Exception) -> TrainingFailed:
    return TrainingFailed(f"checkpoint {path} is whole, but this version can't restore it: {error}")


def _first_difference(expected: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    if not expected:
        return f"{_DIGESTS} is empty"
    for name, digest in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != digest:
            return f"{name} is not what was written"
    unlisted = sorted(found.keys() - expected.keys())
    return f"{_DIGESTS} doesn't list {unlisted[0]}" if unlisted else None


def _digests(path: Path) -> dict[str, str]:
    digests = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.name != _DIGESTS:
            with file.open("rb") as content:
                digests[str(file.relative_to(path))] = hashlib.file_digest(content, "sha256").hexdigest()
    return digests
