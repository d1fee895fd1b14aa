"""Checkpoints: the training state and the place in the data, saved together or not at all.

    checkpoints/
      300/                 a whole checkpoint, named for the steps behind it
        state/             the training state, written by Orbax
        run.json           step, the data iterator's state, and the config with its changes up to this step
        SHA256SUMS         digests of all the files above; `sha256sum -c SHA256SUMS` checks them by hand
      400.tmp/             one being written, or cut short by a kill
      200.damaged/         one that fails its digests, set aside when its step was saved again or its removal was due
      note.txt             anything else isn't the run's: it is named once and left alone; a name that a save needs is
                           freed by a renaming to NAME.foreign

A checkpoint is written into `N.tmp` and renamed to `N` once everything in it is on the disk, so that a kill leaves
either all of it or none under that name. Reading verifies the digests first: Orbax notices a missing or a cut file, but
restores flipped bits in array data without a word (its data files carry no checksum), and training would go on from
garbage.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from trainer.checkpoint_folder import (
    DIGESTS,
    Hold,
    Metadata,
    cannot_restore,
    claim_for_removal,
    digests,
    find_damage,
    list_checkpoints,
    printable,
    read_metadata,
)
from trainer.errors import TrainingFailed
from trainer.out_of_memory import reason_of
from trainer.workdir import set_aside, sync, write_atomically

# Checkpoints that may vanish one after another while they are looked at, on a file system without locks.
_MAX_VANISHED = 20


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

    path: Path
    step: int
    state: Any
    """The training state, on the devices."""
    data_state: Any
    """The data iterator's state, as JSON values."""
    config_history: Any
    """What `save` was given, as JSON values; None: saved before checkpoints held it."""
    damaged: tuple[Damaged, ...]
    """Newer checkpoints that were passed over."""


class NotRemovedError(TrainingFailed):
    """A checkpoint is saved, but an older one can't be removed."""


class Checkpoints:
    """The checkpoints of one run, saved in the background.

    Args:
      folder: the run's `checkpoints/`; what earlier kills left half-written in it is removed.
      num_kept: newest checkpoints kept. One that `restore_newest` found damaged isn't counted. Each is verified before
        it is removed, and set aside instead if it is damaged. One that is being read is removed after a later save.
      on_note: told, in one line, of what isn't the run's own and of what can't be removed.
    """

    def __init__(self, folder: Path, num_kept: int, on_note: Callable[[str], None] = lambda line: None):
        self._folder = folder.absolute()
        self._num_kept = num_kept
        self._orbax = ocp.StandardCheckpointer()
        self._saving: threading.Thread | None = None
        self._failure: TrainingFailed | None = None
        listing = list_checkpoints(self._folder)
        if foreign := listing.describe_foreign():
            on_note(foreign)
        for unfinished in listing.unfinished:
            try:
                shutil.rmtree(unfinished)
            except OSError as error:
                on_note(f"{unfinished} can't be removed: {error.strerror}; it is left there and takes up space")
        self._steps = list(listing.steps)

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
                metadata = read_metadata(path)
                state = self._restore(path, abstract_state)
                self._steps = [known for known in self._steps if known <= step]
                return Restored(path, step, state, metadata.data, metadata.config_history, tuple(damaged))
            damaged.append(Damaged(path, reason))
        if damaged:
            raise _all_damaged(damaged, "put a good copy back, or start afresh with another --workdir")
        return None

    def save(self, step: int, state: Any, data_state: Any, config_history: Any = None) -> None:
        """Starts saving, and returns once the state may be overwritten; an earlier save is waited for first.

        Args:
          step: the steps behind the state; must be more than any saved or restored before.
          state: tree of arrays.
          data_state: JSON values from which the data goes on with the batch after this step.
          config_history: JSON values that tell the config and its changes up to this step.

        Raises:
          TrainingFailed: this or the earlier save failed (a full disk, for example). Nothing is left of it, the
            checkpoints before it are kept, and this step, too, may be saved again.
        """
        self.wait()
        assert not self._steps or step > self._steps[-1], f"step {step} after {self._steps}"
        unfinished = self._folder / f"{step}.tmp"
        try:
            if os.path.lexists(unfinished):
                set_aside(unfinished, "foreign")
            unfinished.mkdir()
            metadata = Metadata(step, data_state, config_history)
            write_atomically(unfinished / "run.json", json.dumps(metadata.to_json()) + "\n")
            self._orbax.save(unfinished / "state", state)
        except Exception as error:
            self._abandon(unfinished)
            raise self._failed_save(step, error) from error
        self._saving = threading.Thread(target=self._finish, args=(step, unfinished), name=f"checkpoint-{step}")
        self._saving.start()

    def wait(self) -> None:
        """Returns when no save is in progress any more.

        Raises:
          TrainingFailed: the save failed; a `NotRemovedError` if only the removal of an older checkpoint did.
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
            if reason_of(error) is not None:
                raise
            raise cannot_restore(path, error) from error

    def _path(self, step: int) -> Path:
        return self._folder / str(step)

    def _finish(self, step: int, unfinished: Path) -> None:
        try:
            self._orbax.wait_until_finished()
            listed = "".join(f"{digest}  {name}\n" for name, digest in digests(unfinished).items())
            write_atomically(unfinished / DIGESTS, listed)
            for path in (unfinished, *unfinished.rglob("*")):
                sync(path)
            path = self._path(step)
            if os.path.lexists(path):
                set_aside(path, "damaged" if path.is_dir() and not path.is_symlink() else "foreign")
            unfinished.replace(path)
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
            self._failure = NotRemovedError(
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

    def _remove_oldest(self) -> None:
        for step in self._steps[: -self._num_kept]:
            if self._remove(self._path(step)):
                self._steps.remove(step)

    def _remove(self, oldest: Path) -> bool:
        """Removes a checkpoint; returns False if it is being read, so that a later save has to."""
        if oldest.is_symlink() or not oldest.is_dir():
            return True  # somebody has moved it, and a link's target isn't the run's to remove
        with claim_for_removal(oldest) as is_free:
            if is_free and find_damage(oldest) is not None:
                set_aside(oldest, "damaged")
            elif is_free:
                # Renamed first: a kill amid the removal must not leave half a checkpoint under a whole one's name.
                removed = oldest.with_name(f"{oldest.name}.tmp")
                if os.path.lexists(removed):
                    set_aside(removed, "foreign")
                shutil.rmtree(oldest.replace(removed))
            return is_free


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint to read the model from."""

    path: Path
    step: int
    tokenizer: str | None
    """Identity of the tokenizer that made the tokens; None: it was saved before checkpoints said so."""
    damaged: tuple[Damaged, ...]
    """Newer checkpoints that were passed over."""
    hold: Hold
    """Keeps its run from removing it, until `restore_params` has read it."""


class _VanishedError(Exception):
    """A checkpoint was removed while it was looked at, so there is a newer one."""


def find_newest(folder: Path) -> FoundCheckpoint | None:
    """Looks for the newest whole checkpoint, without touching any: their run may be under way.

    Args:
      folder: a run's `checkpoints/`.

    Returns:
      None if there is no checkpoint.

    Raises:
      TrainingFailed: there are checkpoints, but all are damaged, or the folder can't be read.
    """
    for _ in range(_MAX_VANISHED):
        try:
            return _find_newest(folder.absolute())
        except _VanishedError:
            continue
        except OSError as error:
            raise TrainingFailed(f"{folder} can't be read: {error.strerror}") from error
    raise _too_fast(folder)


def _find_newest(folder: Path) -> FoundCheckpoint | None:
    damaged: list[Damaged] = []
    for step in reversed(list_checkpoints(folder).steps if folder.is_dir() else ()):
        path = folder / str(step)
        try:
            hold = Hold(path)
        except FileNotFoundError:
            raise _VanishedError from None
        except OSError as error:
            damaged.append(Damaged(path, f"it can't be opened: {error.strerror}"))
            continue
        reason = find_damage(path)
        if not hold.is_there():
            raise _VanishedError
        if reason is None:
            data = read_metadata(path).data
            tokenizer = data.get("tokenizer") if isinstance(data, dict) else None
            if not isinstance(tokenizer, str | None):
                raise cannot_restore(path, f"its run.json names a tokenizer by {printable(str(tokenizer)[:40])}")
            return FoundCheckpoint(path, step, tokenizer, tuple(damaged), hold)
        damaged.append(Damaged(path, reason))
    if damaged:
        raise _all_damaged(damaged, "put a good copy back")
    return None


def restore_params(checkpoint: FoundCheckpoint, abstract_params: Any) -> tuple[FoundCheckpoint, Any]:
    """Reads the model's parameters alone, and lets go of the checkpoint.

    Args:
      checkpoint: from `find_newest`.
      abstract_params: their tree of `jax.ShapeDtypeStruct`s with shardings.

    Returns:
      The checkpoint that they are from, which is a newer one if the run has removed the one given, and the parameters.

    Raises:
      TrainingFailed: they are of another form, or can't be read.
    """
    for _ in range(_MAX_VANISHED):
        try:
            return checkpoint, _restore_params(checkpoint, abstract_params)
        except _VanishedError:
            newer = find_newest(checkpoint.path.parent)
            if newer is None:
                raise TrainingFailed(
                    f"checkpoint {checkpoint.path} was removed while it was being read, and there is no other"
                ) from None
            checkpoint = newer
    raise _too_fast(checkpoint.path.parent)


def _restore_params(checkpoint: FoundCheckpoint, abstract_params: Any) -> Any:
    wanted = {"params": abstract_params}
    arguments = ocp.args.PyTreeRestore(
        wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
    )
    with ocp.PyTreeCheckpointer() as orbax:
        try:
            params = orbax.restore(checkpoint.path / "state", args=arguments)["params"]
            # Where the checkpoint has no such array, Orbax leaves the request in its place.
            if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params)):
                raise ValueError("it holds the parameters of another model")
            return params
        except Exception as error:
            if reason_of(error) is not None:
                raise
            if not checkpoint.hold.is_there():
                raise _VanishedError from error
            raise cannot_restore(checkpoint.path, error) from error
        finally:
            checkpoint.hold.release()


def _too_fast(folder: Path) -> TrainingFailed:
    return TrainingFailed(
        f"the run removes the checkpoints in {folder} faster than they can be read; raise its checkpoint.num_kept"
    )


def _all_damaged(damaged: list[Damaged], remedy: str) -> TrainingFailed:
    return TrainingFailed("\n  ".join(["every checkpoint of this run is damaged:", *map(str, damaged)]) + f"\n{remedy}")
