"""Reads a model's parameters from the newest whole checkpoint. Its run may be saving and removing others meanwhile."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from trainer.checkpoints.folder import (
    DIGESTS,
    Damaged,
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
    digest: str
    """SHA-256 of its list of digests, and so of the whole checkpoint."""
    base: str | None = None
    """SHA-256 of the frozen base that its adapters belong to; None: it has all parameters."""


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
    damaged: list[Damaged] = []
    try:
        steps = list_checkpoints(folder).steps if folder.is_dir() else ()
    except OSError as error:
        raise TrainingFailed(f"{folder} can't be read: {error.strerror}") from error
    for each in reversed(steps):
        if step not in (None, each):
            continue
        path = folder.absolute() / str(each)
        reason = find_damage(path)
        if not path.exists():  # the run has removed it, and so there is a newer one
            return find_newest(folder, step)
        if reason is None:
            metadata = read_metadata(path)
            tokenizer, delimiters = _read_tokenizer(path, metadata.data)
            digest = hashlib.sha256((path / DIGESTS).read_bytes()).hexdigest()
            held = metadata.config_history, metadata.data
            return FoundCheckpoint(path, each, tokenizer, delimiters, *held, tuple(damaged), digest, metadata.base)
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


def restore_params(checkpoint: FoundCheckpoint, abstract_params: Any) -> Any:
    """Reads only the model's parameters.

    Args:
      checkpoint: from `find_newest`.
      abstract_params: their tree of `jax.ShapeDtypeStruct`s with shardings.

    Raises:
      TrainingFailed: they are of another form, or can't be read.
    """
    return _restore(checkpoint, {"params": abstract_params})["params"]


def restore_state(checkpoint: FoundCheckpoint, abstract_state: Any) -> Any:
    """Reads the whole training state. See `restore_params`.

    Args:
      checkpoint: from `find_newest`.
      abstract_state: a `TrainState` of `jax.ShapeDtypeStruct`s with shardings.
    """
    return type(abstract_state)(**_restore(checkpoint, abstract_state._asdict()))


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
            raise _cannot_read(checkpoint, error) from error


def stream_params(checkpoint: FoundCheckpoint, abstract_params: Any, use: Callable[[Any], None]) -> None:
    """Has a function read the model's parameters piece by piece.

    Args:
      checkpoint: from `find_newest`.
      abstract_params: their tree of `jax.ShapeDtypeStruct`s.
      use: called with the tree of `StoredArray`s.

    Raises:
      TrainingFailed: the parameters are of another form, or can't be read.
    """

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
        raise _cannot_read(checkpoint, error) from error


def _cannot_read(checkpoint: FoundCheckpoint, error: Exception) -> TrainingFailed:
    if checkpoint.path.exists():
        return cannot_restore(checkpoint.path, error)
    return TrainingFailed(
        f"checkpoint {checkpoint.path} was removed while it was being read; run the same command again to read a "
        "newer one, and raise checkpoint.num_kept if that goes the same way"
    )
