"""A workdir, opened to sample from: its config, tokenizer and newest checkpoint, all of one run or refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from layers import GPTConfig
from trainer.checkpoints.parameters import FoundCheckpoint
from trainer.config import TrainConfig
from trainer.data import Tokenizer
from trainer.data.tokenizers import PretokenizedIds
from trainer.errors import UserMistake
from trainer.saved_run import SavedRun, abstract_params, load_trained_tokenizer, open_saved_run


@dataclass(frozen=True)
class TrainedRun:
    """The parts of a run that continue texts; nothing is on a device yet."""

    config: TrainConfig
    """As the run had it."""
    model: GPTConfig
    """The run's, with its attention backends replaced if that was asked for."""
    tokenizer: Tokenizer
    saved: SavedRun

    @property
    def checkpoint(self) -> FoundCheckpoint:
        """The checkpoint that is sampled from."""
        return self.saved.checkpoint

    def restore_params(self, device: jax.Device) -> Any:
        """Reads the model's parameters onto one device.

        Raises:
          TrainingFailed: the checkpoint can't be read.
        """
        abstract = abstract_params(self.model, jax.sharding.SingleDeviceSharding(device))
        return self.saved.restore_params(abstract)


def open_run(path: Path, *, step: int | None, tokenizer: str | None, implementations: Mapping[str, Any]) -> TrainedRun:
    """Opens a workdir, without writing to it.

    Args:
      path: the workdir; its run may be under way.
      step: of the checkpoint; None: the newest.
      tokenizer: `byte`, or the path of a `tokenizer.json`; None: the one that the config names.
      implementations: attention backends that replace the model's own, by the field of `GPTConfig`.

    Raises:
      UserMistake: there is no run or no checkpoint, the tokenizer isn't training's, or the model can't be sampled from.
      TrainingFailed: every checkpoint is damaged.
    """
    saved = open_saved_run(path, setting="--workdir", step=step)
    config, checkpoint = saved.config, saved.checkpoint
    model = dataclasses.replace(config.model, **implementations)
    try:
        model.check_looks_back_only()
    except ValueError as error:
        raise UserMistake(str(error)) from error
    loaded = load_trained_tokenizer(saved, tokenizer, setting="--tokenizer")
    if loaded is None:
        raise UserMistake(
            "the run was trained on .bin files, which don't say which tokenizer made them; "
            "give its tokenizer.json with --tokenizer"
        )
    check_tokenizer(loaded, checkpoint, model)
    return TrainedRun(config, model, loaded, saved)


def check_tokenizer(tokenizer: Tokenizer, checkpoint: FoundCheckpoint, model: GPTConfig) -> None:
    """Refuses a tokenizer that isn't training's. Of `.bin` files nobody knows which that was.

    Args:
      tokenizer: the given one.
      checkpoint: of the run.
      model: the run's.

    Raises:
      UserMistake: it is another one, or has more ids than the model.
    """
    trained, given = checkpoint.tokenizer, tokenizer.identity
    if trained not in (given, PretokenizedIds.identity):
        raise UserMistake(
            f"the {tokenizer.name} tokenizer is not the one that the run was trained with: "
            f"expected {trained!r}, got {given!r} (library, its version, and the file's SHA-256); "
            "give the tokenizer.json of training with --tokenizer, and install the same version of the library"
        )
    if tokenizer.vocab_size > model.vocab_size:
        raise UserMistake(
            f"the {tokenizer.name} tokenizer has {tokenizer.vocab_size:,} ids, more than the model's "
            f"{model.vocab_size:,}, so it is not the one of training; give that with --tokenizer"
        )
