"""Reads a model's parameters from the newest whole checkpoint. Its run may be saving and removing others meanwhile."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from trainer.checkpoints.folder import (
    DIGESTS,
    Damaged,
    Hold,
    all_damaged,
    cannot_restore,
    find_damage,
    list_checkpoints,
    printable,
    read_metadata,
)
from trainer.checkpoints.stored_array import StoredArray, UnreadableArray
from trainer.compile.out_of_memory import reason_of
from trainer.errors import TrainingFailed

_T = TypeVar("_T")

# How many checkpoints may vanish while they are looked at, on a file system without locks.
_MAX_VANISHED = 20


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint to read the model from."""

    path: Path
    step: int
    tokenizer: str
    """Identity of the tokenizer that made the tokens."""
    delimiters: tuple[int | None, int | None] | None
    """Tokens that began and ended documents; None: checkpoints before 2026-11-29 don't say."""
    config_history: Any
    """The run's config up to its step, as JSON values."""
    data_state: Any
    """The state of its data, as JSON values."""
    damaged: tuple[Damaged, ...]
    """Newer checkpoints that were passed over."""
    is_chosen: bool
    """True: its step was asked for, so that no other will do."""
    digest: str
    """SHA-256 of its list of digests, and so of the whole checkpoint."""
    hold: Hold
    """Keeps its run from removing it, until `restore_params` has read it."""


class _VanishedError(Exception):
    """A checkpoint was removed while it was being read, so there is a newer one."""


def find_newest(folder: Path, step: int | None = None) -> FoundCheckpoint | None:
    """Looks for the newest whole checkpoint. It changes nothing, since the run may be under way.

    Args:
      folder: a run's `checkpoints/`.
      step: look for this one's alone.

    Returns:
      None if there is no checkpoint.

    Raises:
      TrainingFailed: there are checkpoints, but all are damaged, or the folder can't be read.
    """
    for _ in range(_MAX_VANISHED):
        try:
            return _find_newest(folder.absolute(), step)
        except _VanishedError:
            continue
        except OSError as error:
            raise TrainingFailed(f"{folder} can't be read: {error.strerror}") from error
    raise _too_fast(folder)


def _find_newest(folder: Path, chosen: int | None) -> FoundCheckpoint | None:
    damaged: list[Damaged] = []
    for step in reversed(list_checkpoints(folder).steps if folder.is_dir() else ()):
        if chosen not in (None, step):
            continue
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
            metadata = read_metadata(path)
            tokenizer, delimiters = _read_tokenizer(path, metadata.data)
            digest = hashlib.sha256((path / DIGESTS).read_bytes()).hexdigest()
            return FoundCheckpoint(
                path,
                step,
                tokenizer,
                delimiters,
                metadata.config_history,
                metadata.data,
                tuple(damaged),
                chosen == step,
                digest,
                hold,
            )
        damaged.append(Damaged(path, reason))
    if damaged:
        raise all_damaged(damaged, "put a good copy back")
    return None


def _read_tokenizer(path: Path, data: Any) -> tuple[str, tuple[int | None, int | None] | None]:
    """The identity of the tokenizer, and the delimiters, that a checkpoint's data state tells."""
    data = data if isinstance(data, dict) else {}
    tokenizer, delimiters = data.get("tokenizer"), data.get("delimiters")
    if not isinstance(tokenizer, str):
        raise cannot_restore(path, f"its run.json names a tokenizer by {printable(str(tokenizer)[:40])}")
    match delimiters:
        case None:
            return tokenizer, None
        case [int() | None as begin, int() | None as end]:
            return tokenizer, (begin, end)
    raise cannot_restore(path, f"its run.json names the tokens around documents by {printable(str(delimiters)[:40])}")


def restore_params(checkpoint: FoundCheckpoint, abstract_params: Any) -> tuple[FoundCheckpoint, Any]:
    """Reads only the model's parameters, and releases the checkpoint.

    Args:
      checkpoint: from `find_newest`.
      abstract_params: their tree of `jax.ShapeDtypeStruct`s with shardings.

    Returns:
      The checkpoint that was read (a newer one if the run has removed the one given), and the parameters.

    Raises:
      TrainingFailed: they are of another form, or can't be read.
    """
    return _of_newest(checkpoint, lambda found: _restore(found, {"params": abstract_params})["params"])


def restore_state(checkpoint: FoundCheckpoint, abstract_state: Any) -> tuple[FoundCheckpoint, Any]:
    """Reads the whole training state, and releases the checkpoint. See `restore_params`.

    Args:
      checkpoint: from `find_newest`.
      abstract_state: a `TrainState` of `jax.ShapeDtypeStruct`s with shardings.
    """

    def restore(found: FoundCheckpoint) -> Any:
        return type(abstract_state)(**_restore(found, abstract_state._asdict()))

    return _of_newest(checkpoint, restore)


def stream_params(checkpoint: FoundCheckpoint, abstract_params: Any, use: Callable[[Any], None]) -> FoundCheckpoint:
    """Has a function read the model's parameters piece by piece, and releases the checkpoint.

    Args:
      checkpoint: from `find_newest`.
      abstract_params: their tree of `jax.ShapeDtypeStruct`s.
      use: called with the tree of `StoredArray`s. On a file system without locks the run may remove the checkpoint
        meanwhile; then it is called again, with those of a newer one.

    Returns:
      The checkpoint that was read.

    Raises:
      TrainingFailed: the parameters are of another form, or can't be read.
    """
    return _of_newest(checkpoint, lambda found: _stream_params(found, abstract_params, use))[0]


def _of_newest(checkpoint: FoundCheckpoint, read: Callable[[FoundCheckpoint], _T]) -> tuple[FoundCheckpoint, _T]:
    for _ in range(_MAX_VANISHED):
        try:
            return checkpoint, read(checkpoint)
        except _VanishedError:
            newer = find_newest(checkpoint.path.parent, checkpoint.step if checkpoint.is_chosen else None)
            if newer is None:
                raise TrainingFailed(
                    f"checkpoint {checkpoint.path} was removed while it was being read, and there is no other"
                ) from None
            checkpoint = newer
    raise _too_fast(checkpoint.path.parent)


def _restore(checkpoint: FoundCheckpoint, wanted: dict[str, Any]) -> dict[str, Any]:
    arguments = ocp.args.PyTreeRestore(
        wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
    )
    with ocp.PyTreeCheckpointer() as orbax:
        try:
            state = orbax.restore(checkpoint.path / "state", args=arguments)
            # Orbax returns the request itself in the place of an array that the checkpoint doesn't have.
            if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state)):
                raise ValueError("it holds the parameters of another model, or moments of another optimizer")
            return state
        except Exception as error:
            if reason_of(error) is not None:
                raise
            if not checkpoint.hold.is_there():
                raise _VanishedError from error
            raise cannot_restore(checkpoint.path, error) from error
        finally:
            checkpoint.hold.release()


def _stream_params(checkpoint: FoundCheckpoint, abstract_params: Any, use: Callable[[Any], None]) -> None:
    def open_array(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> StoredArray:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        array = StoredArray(checkpoint.path / "state", f"params.{name}")
        if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
            raise UnreadableArray(
                f"its {name} is {array.dtype} of shape {array.shape}; expected {leaf.dtype} of {leaf.shape}"
            )
        return array

    try:
        use(jax.tree.map_with_path(open_array, abstract_params))
    except UnreadableArray as error:
        if error.__cause__ is not None and reason_of(error.__cause__) is not None:
            raise error.__cause__ from None
        if not checkpoint.hold.is_there():
            raise _VanishedError from error
        raise cannot_restore(checkpoint.path, error) from error
    finally:
        checkpoint.hold.release()


def _too_fast(folder: Path) -> TrainingFailed:
    return TrainingFailed(
        f"the run removes the checkpoints in {folder} faster than they can be read; raise its checkpoint.num_kept"
    )
