"""A run as it lies on the disk, for whoever wants its model: its config and its newest whole checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from layers import GPTConfig
from layers.pretrained.table import parameter_shapes
from trainer.checkpoints.folder import cannot_restore, list_checkpoints
from trainer.checkpoints.parameters import FoundCheckpoint, find_newest
from trainer.config import TrainConfig
from trainer.config.file import load_saved_config
from trainer.config.resume_changes import ConfigHistory
from trainer.data import Tokenizer, load_tokenizer
from trainer.data.documents import NONE
from trainer.errors import UserMistake
from trainer.files.paths import refuse_unusual
from trainer.observers.record import read_record
from trainer.workdir import Workdir


@dataclass(frozen=True)
class SavedRun:
    """Nothing is on a device yet. The run may be under way."""

    config: TrainConfig
    """Of the steps up to the checkpoint."""
    checkpoint: FoundCheckpoint


def open_saved_run(path: Path, *, setting: str, step: int | None = None) -> SavedRun:
    """Opens a workdir, without writing to it.

    Args:
      path: the workdir.
      setting: the field or flag that named it, for messages.
      step: of the checkpoint; None: the newest that is whole.

    Raises:
      UserMistake: there is no run or no such checkpoint.
      TrainingFailed: every checkpoint is damaged, or the one of the step.
    """
    workdir = Workdir(path)
    try:
        refuse_unusual(path.absolute())
    except ValueError as refused:
        raise UserMistake(f"{setting}: {refused}") from None
    if not workdir.config.is_file():
        raise UserMistake(
            f"workdir {path} {'holds no config.json' if path.is_dir() else 'does not exist'}; "
            f"{setting} takes the folder that a run of `python -m trainer` wrote to"
        )
    config = load_saved_config(workdir.config)
    checkpoint = find_newest(workdir.checkpoints, step)
    if checkpoint is None:
        if step is not None and (steps := list_checkpoints(workdir.checkpoints).steps):
            raise UserMistake(
                f"--step {step}: workdir {path} holds no checkpoint of it; there are {', '.join(map(str, steps))}"
            )
        raise UserMistake(
            f"workdir {path} holds no checkpoint yet; let its run go on to step {config.checkpoint.every_num_steps}, "
            "where the first is saved, or lower checkpoint.every_num_steps"
        )
    # config.json may be of steps that are yet to be made.
    held = held_history(checkpoint.path, checkpoint.config_history).config
    return SavedRun(held.phase_at(checkpoint.step).config, checkpoint)


def held_history(checkpoint: Path, config_history: Any) -> ConfigHistory:
    """The config of a checkpoint's steps, and its changes up to there.

    Args:
      checkpoint: its folder.
      config_history: as it holds it.

    Raises:
      TrainingFailed: it is of an unknown form.
    """
    try:
        return ConfigHistory.from_json(config_history)
    except UserMistake as mistake:
        raise cannot_restore(checkpoint, f"its config: {mistake}") from mistake


def load_trained_tokenizer(saved: SavedRun, name: str | None, *, setting: str) -> Tokenizer | None:
    """The tokenizer of a run, with the delimiters that its documents had.

    Args:
      saved: the run.
      name: `byte`, or the path of a `tokenizer.json`; None: where the run found it.
      setting: the flag that gave the name, for messages.

    Returns:
      None if `.bin` files were trained on, which don't say which tokenizer made them, and no name is given.

    Raises:
      UserMistake: there is no such tokenizer, or it lacks those tokens.
    """
    data, delimiters = saved.config.data, saved.checkpoint.delimiters
    setting = "data.tokenizer" if name is None else setting
    name = name or data.known_tokenizer
    if name is None:
        return None
    if delimiters is None:
        # Documents began with the token that ended them, whatever the tokenizer says.
        end = load_tokenizer(name, data.end_of_document_token, NONE, setting=setting).delimiters.end
        delimiters = (end, end)
    begin_token, end_token = (NONE if token is None else token for token in delimiters)
    return load_tokenizer(name, end_token, begin_token, setting=setting)


def read_init_from(path: Path) -> Mapping[str, Any]:
    """The origin of a run's parameters, by its record; empty: they were random, or there is no record.

    Args:
      path: the workdir.

    Raises:
      UserMistake: the record is damaged.
    """
    record = Workdir(path).record
    try:
        init_from = read_record(record)["init_from"] or {}
        found = {name: init_from[name] for name in ("family", "context_length") if init_from.get(name) is not None}
        if not isinstance(found.get("family", ""), str):
            raise ValueError("its family is no name")
        if type(length := found.get("context_length", 1)) is not int or not 0 < length < 2**31:
            raise ValueError("its context_length is no number of tokens")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserMistake(
            f"{record}, which says what the run began with, can't be read: {error!r}; mend it, or move it away"
        ) from error
    return found


def abstract_params(model: GPTConfig, sharding: jax.sharding.Sharding) -> Any:
    """The tree of a model's parameters, as `jax.ShapeDtypeStruct`s of one sharding.

    Args:
      model: the network.
      sharding: of all of them.
    """
    shapes = parameter_shapes(model)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
