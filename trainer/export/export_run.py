"""From an understood command line to a folder: the checkpoint is read and written out a tensor at a time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax

from layers.pretrained import write_huggingface
from layers.pretrained.peft import model_folder, write_peft
from layers.pretrained.save import GENERATION_NAME
from layers.pretrained.table import parameter_shapes
from trainer.checkpoints.parameters import FoundCheckpoint, stream_params
from trainer.compile.out_of_memory import OutOfMemory, describe_host, running
from trainer.data import Tokenizer
from trainer.errors import TrainingFailed, UserMistake
from trainer.export.export_command import ExportCommand
from trainer.export.family import choose_family
from trainer.export.tokenizer_folder import special_token_ids, tokenizer_folder
from trainer.saved_run import SavedRun, abstract_params, load_trained_tokenizer, open_saved_run, read_init_from
from trainer.terminal.console import Console
from trainer.terminal.units import format_bytes, format_count, format_seconds


def run(command: ExportCommand) -> None:
    """Writes the folder of a command.

    Raises:
      UserMistake: a checkpoint is missing, the output exists, the tokenizer isn't training's, or no family can express
        the model, or the record is damaged.
      TrainingFailed: every checkpoint is damaged, the folder can't be written, or this machine is out of memory.
    """
    console, begun = Console(), time.perf_counter()
    jax.config.update("jax_platforms", "cpu")  # nothing is computed
    saved = open_saved_run(command.workdir, setting="--workdir", step=command.step)
    for damaged in saved.checkpoint.damaged:
        console.warning(f"{damaged}; the one before it is taken")
    if command.output.exists():  # what `write_huggingface` refuses, before minutes of reading
        raise UserMistake(f"--output {command.output} exists already; name a folder that is to be made, or remove it")
    if command.adapters:
        _export_adapters(command, saved, console)
        return
    init_from = read_init_from(command.workdir)
    try:
        model_type, left = choose_family(saved.config.model, init_from.get("family"))
    except ValueError as refused:
        raise UserMistake(f"workdir {command.workdir} can't be exported: {refused}") from refused
    if left:
        console.warning(left)
    context_length = max(saved.config.sequence_length, init_from.get("context_length", 0))
    tokenizer = load_trained_tokenizer(saved, command.tokenizer, setting="--tokenizer")
    if tokenizer is not None:
        _check_tokenizer(tokenizer, saved.checkpoint)
    try:
        with running("exporting"), tokenizer_folder(tokenizer) as folder:
            special = {} if tokenizer is None else special_token_ids(tokenizer.delimiters)

            def write(params: Any) -> None:
                command.output.parent.mkdir(parents=True, exist_ok=True)
                write_huggingface(
                    command.output,
                    saved.config.model,
                    params,
                    dtype=command.dtype,
                    tokenizer_dir=folder,
                    # A folder's own tells more, and is copied.
                    generation_config=None if folder and (folder / GENERATION_NAME).is_file() else special,
                    model_type=model_type,
                    context_length=context_length,
                )

            if saved.config.lora.rank is None:
                stream_params(saved.checkpoint, parameter_shapes(saved.config.model), write)
            else:
                write(saved.restore_params(_on_host(saved, command.dtype)))
    except OutOfMemory as error:
        raise TrainingFailed(f"exporting: this machine is out of memory: {error.reason}; {describe_host()}") from error
    except OSError as error:
        raise TrainingFailed(
            f"--output {command.output} can't be written: {error.strerror}; nothing is left"
        ) from error
    except ValueError as refused:
        raise UserMistake(str(refused)) from refused
    num_bytes = sum(file.stat().st_size for file in command.output.iterdir())
    console.note(
        f"exported {saved.config.name} at step {saved.checkpoint.step} to {command.output} as {model_type}: "
        f"{format_count(saved.config.model.num_parameters)} parameters, {format_bytes(num_bytes)} in "
        f"{format_seconds(time.perf_counter() - begun)}"
    )
    if folder is None:
        console.note("without a tokenizer: the run's is no tokenizer.json")


def _export_adapters(command: ExportCommand, saved: SavedRun, console: Console) -> None:
    """Writes the folder of adapters of a command."""
    config = saved.config
    if config.lora.rank is None or config.init_from is None:
        raise UserMistake(f"--adapters True: {config.name} has no adapters, as its lora.rank is None; leave it out")
    if command.dtype is not None:
        raise UserMistake(f"--dtype {command.dtype}: adapters are written in float32, as they train; leave it out")
    base = model_folder(Path(config.init_from))
    trained = saved.restore_trained(_on_host(saved, None))
    try:
        command.output.parent.mkdir(parents=True, exist_ok=True)
        write_peft(command.output, config.model, config.lora, trained, base=base)
    except OSError as error:
        raise TrainingFailed(
            f"--output {command.output} can't be written: {error.strerror}; nothing is left"
        ) from error
    except ValueError as refused:
        raise UserMistake(f"--adapters True: {refused}") from refused
    console.note(
        f"exported the adapters of {config.name} at step {saved.checkpoint.step} to {command.output}, on top of {base}"
    )


def _on_host(saved: SavedRun, dtype: str | None) -> Any:
    """The abstract parameters of a run in the host's memory, in a dtype; None: each in its own."""
    shapes = abstract_params(saved.config.model, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    return shapes if dtype is None else jax.tree.map(lambda leaf: leaf.update(dtype=dtype), shapes)


def _check_tokenizer(tokenizer: Tokenizer, checkpoint: FoundCheckpoint) -> None:
    """Refuses a tokenizer that isn't training's. What `.bin` files were made with, nobody knows."""
    trained = checkpoint.tokenizer
    if trained != "pretokenized" and _digest(trained) != _digest(tokenizer.identity):
        raise UserMistake(
            f"the {tokenizer.name} tokenizer is not the one that the run was trained with: expected "
            f"{_digest(trained)!r}, got {_digest(tokenizer.identity)!r}; give the tokenizer.json of training with "
            "--tokenizer"
        )


def _digest(identity: str) -> str:
    """A tokenizer's identity without the version of the library, which no file depends on."""
    return identity.rpartition(" ")[2]
