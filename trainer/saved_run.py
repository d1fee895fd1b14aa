"""A run as it lies on the disk, for whoever wants its model: its config and its newest whole checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from layers import GPTConfig
from layers.lora import adapted_shapes, merge_matrix
from layers.pretrained.table import parameter_shapes
from trainer.checkpoints.base import base_digest, read_base, require_same_base
from trainer.checkpoints.folder import cannot_restore, list_checkpoints
from trainer.checkpoints.parameters import FoundCheckpoint, find_newest, restore_params
from trainer.config import TrainConfig
from trainer.config.file import load_saved_config
from trainer.config.resume_changes import ConfigHistory
from trainer.data import Tokenizer, load_tokenizer
from trainer.data.documents import NONE
from trainer.errors import UserMistake
from trainer.files.paths import refuse_unusual
from trainer.observers.record import read_record
from trainer.step.frozen import split_frozen
from trainer.workdir import Workdir


@dataclass(frozen=True)
class SavedRun:
    """Nothing is on a device yet. The run may be under way."""

    config: TrainConfig
    """Of the steps up to the checkpoint."""
    checkpoint: FoundCheckpoint

    def restore_params(self, abstract_params: Any) -> Any:
        """Reads the model's parameters. Adapters are merged into their base, which is read, too.

        Args:
          abstract_params: the model's tree of `jax.ShapeDtypeStruct`s with shardings, without adapters.

        Raises:
          UserMistake: the base isn't there any more, or is another one.
          TrainingFailed: they are of another form, or can't be read.
        """
        if self.config.lora.rank is None:
            return restore_params(self.checkpoint, abstract_params)
        require_same_base(self.config, base_digest(self.config), self.checkpoint.path, self.checkpoint.base)
        trained = flatten_dict(self.restore_trained(abstract_params))
        wanted = flatten_dict(abstract_params)
        base = read_base(self.config, jax.tree.map(lambda leaf: leaf.sharding, abstract_params))
        params = {}
        for path, leaf in flatten_dict(base).items():
            adapter = [trained[key] for name in ("a", "b") if (key := (*path[:-1], "lora", name)) in trained]
            params[path] = _merge(trained.get(path, leaf), adapter, self.config.lora.scale, like=wanted[path])
        return unflatten_dict(params)

    def restore_trained(self, abstract_params: Any) -> Any:
        """Reads the parameters that trained, adapters among them, from the checkpoint alone.

        Args:
          abstract_params: as for `restore_params`. Adapters lie whole on its devices.
        """
        model, lora = self.config.model, self.config.lora
        wanted = flatten_dict(abstract_params)
        some = next(iter(wanted.values())).sharding
        whole = NamedSharding(some.mesh, PartitionSpec()) if isinstance(some, NamedSharding) else some
        abstract = {
            path: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=wanted[path].sharding if path in wanted else whole
            )
            for path, leaf in flatten_dict(split_frozen(lora, adapted_shapes(model, lora))[0]).items()
        }
        return restore_params(self.checkpoint, unflatten_dict(abstract))


def _merge(array: jax.Array, adapter: Sequence[jax.Array], scale: float, *, like: jax.ShapeDtypeStruct) -> jax.Array:
    """A parameter with its A and B, if it has them, in the dtype and sharding of another."""

    def merge(array: jax.Array, *adapter: jax.Array) -> jax.Array:
        if adapter:
            a, b = adapter
            array = merge_matrix(array, a, b, scale)
        return array.astype(like.dtype)

    return jax.jit(merge, out_shardings=like.sharding)(array, *adapter)


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
