"""The parameters that a fresh run begins with: those of a Hugging Face folder, or of another run's newest checkpoint.

They are read once, straight into the shards that training keeps them in. A run that resumes has its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from layers.layer_stacks import restack
from layers.pretrained import read_params
from layers.pretrained.folder import open_tensors
from layers.pretrained.peft import base_of, model_folder, read_peft
from layers.pretrained.table import parameter_shapes
from trainer.checkpoints.base import read_base
from trainer.checkpoints.parameters import FoundCheckpoint, restore_state
from trainer.compile.out_of_memory import reason_of
from trainer.config import TrainConfig
from trainer.config.init_from import is_workdir
from trainer.data import TrainIterator
from trainer.errors import UserMistake
from trainer.launch.peers import Peers, require_same
from trainer.loop.carry import into_layout
from trainer.loop.origin import read_origin
from trainer.loop.setup import Setup
from trainer.saved_run import open_saved_run
from trainer.step.frozen import without_adapters
from trainer.step.functions import StepFunctions, make_step_functions
from trainer.step.sharding import parameter_shardings
from trainer.step.skipping import schedule_at
from trainer.step.train_step import TrainState
from trainer.terminal.console import Console
from trainer.terminal.units import format_bytes, format_count, format_seconds


def load_initial_state(setup: Setup, console: Console, peers: Peers) -> tuple[TrainState, dict[str, Any]]:
    """Reads the state of another run, for a fresh run with `init_optimizer="carry"`.

    Args:
      setup: of the run's first phase. Its data goes on at the other run's place, if it is the same data.
      console: prints what is carried.
      peers: the processes of the run.

    Returns:
      The state before the first step, and the record's entry about it.

    Raises:
      UserMistake: processes see different folders.
      TrainingFailed: every checkpoint is damaged, or can't be read.
    """
    config, functions = setup.config, setup.functions
    assert config.init_from is not None
    folder, begun = Path(config.init_from).expanduser().absolute(), time.perf_counter()
    saved = open_saved_run(folder, setting="init_from")
    for damaged in saved.checkpoint.damaged:
        console.warning(f"{damaged}; the one before it is taken")
    held = saved.config.model
    model = dataclasses.replace(config.model, masks=held.masks, layer_overrides=held.layer_overrides)
    layout = dataclasses.replace(config, model=model)
    abstract = make_step_functions(layout, functions.mesh).abstract_state
    checkpoint = saved.checkpoint
    state = restore_state(checkpoint, abstract)
    state = into_layout(state, layout, config, functions)
    state = state._replace(
        step=jnp.zeros_like(state.step),
        opt_state=schedule_at(state.opt_state, jnp.zeros_like(state.step)),
        skipping=state.skipping._replace(num_skipped=jnp.zeros_like(state.skipping.num_skipped)),
    )
    state = jax.device_put(state, functions.state_shardings)
    origin = _describe_checkpoint(folder, checkpoint, console) | {"optimizer": "carried"}
    require_same(peers, "init_from", origin)
    for line in take_up_data(setup.batches, checkpoint.data_state):
        console.note(line)
    console.note(f"loaded parameters and moments from {checkpoint.path}")
    return state, {"path": str(folder)} | origin | {"seconds": time.perf_counter() - begun}


def take_up_data(batches: TrainIterator, theirs: Any) -> list[str]:
    """Goes on at the place in another run's data, if it is the same data.

    Args:
      batches: the run's, at their beginning.
      theirs: the data state of the other run's checkpoint.

    Returns:
      Lines that tell what couldn't be continued exactly.

    Raises:
      DataError: as `TrainIterator.set_state`.
    """
    if is_same_data(theirs, batches.get_state()):
        return batches.set_state(theirs)
    return ["the data of init_from is another: this run's begins at its beginning"]


def is_same_data(theirs: Any, ours: dict[str, Any]) -> bool:
    """True if the place in another run's data is one in this run's: the same documents, in the same order."""
    stream = theirs.get("stream") if isinstance(theirs, dict) else None
    if not isinstance(stream, dict):
        return False
    return stream | {"sequence_length": None} == ours["stream"] | {"sequence_length": None}


class InitialParams(NamedTuple):
    """The parameters that a fresh run begins with."""

    params: Any
    """On the mesh, as in `TrainState`."""
    origin: dict[str, Any]
    """The record's entry about them."""


def load_initial_params(
    config: TrainConfig, functions: StepFunctions, console: Console, peers: Peers
) -> InitialParams | None:
    """Reads the parameters of the folder that a config names, and tells the console.

    Args:
      config: of the run.
      functions: of the run; they say where parameters lie.
      console: shows a bar.
      peers: the processes of the run; each reads what its devices hold.

    Returns:
      None if no folder is named.

    Raises:
      UserMistake: the folder doesn't hold this model's parameters, or processes see different folders.
      TrainingFailed: every checkpoint of a workdir is damaged, or can't be read.
    """
    if config.init_from is None:
        return None
    folder, begun = Path(config.init_from).expanduser().absolute(), time.perf_counter()
    console.note("loading parameters …")
    if is_workdir(folder):
        params, origin = _load_checkpoint(folder, config, functions, console)
    elif config.lora.rank is not None:
        params, origin = _load_adapted(folder, config, functions), _describe_huggingface(folder)
    else:
        params, origin = _load_huggingface(folder, config, functions)
    require_same(peers, "init_from", origin)
    seconds = time.perf_counter() - begun
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    console.note(
        f"loaded {format_count(functions.num_parameters)} parameters from {origin.get('checkpoint', folder)}: "
        f"{format_bytes(num_bytes)} in {format_seconds(seconds)}, {format_bytes(num_bytes / seconds)}/s"
    )
    return InitialParams(params, {"path": str(folder)} | origin | {"seconds": seconds})


def _load_huggingface(folder: Path, config: TrainConfig, functions: StepFunctions) -> tuple[Any, dict[str, Any]]:
    abstract = functions.abstract_state.params
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    try:
        origin = _describe_huggingface(folder)
        params = read_params(folder, config.model, shardings, dtype=config.model.param_dtype)
    except (ValueError, OSError) as refused:
        if reason_of(refused) is not None:  # as JAX tells that memory ran out
            raise
        raise UserMistake(f"init_from={str(folder)!r}: {refused}") from refused
    return params, origin


def _load_adapted(folder: Path, config: TrainConfig, functions: StepFunctions) -> Any:
    """The base's parameters, and adapters: those of the folder, if it holds some, or fresh ones."""
    shardings = functions.state_shardings.params
    params = flatten_dict(functions.init_trained()) | flatten_dict(read_base(config, without_adapters(shardings)))
    if base_of(folder) is not None:
        try:
            read = flatten_dict(read_peft(folder, config.model, config.lora))
        except (ValueError, OSError) as refused:
            raise UserMistake(f"init_from={str(folder)!r}: {refused}") from refused
        places = flatten_dict(shardings)
        dtype = config.model.param_dtype
        params |= {path: jax.device_put(array.astype(dtype), places[path]) for path, array in read.items()}
    return unflatten_dict(params)


def _describe_huggingface(folder: Path) -> dict[str, Any]:
    folder, named = model_folder(folder), folder
    with open_tensors(folder) as tensors:
        files = sorted({tensor.file.path for tensor in tensors.values()})
    return read_origin(named) | {
        "config_sha256": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(),
        "files": {Path(file).name: os.path.getsize(file) for file in files},
    }


def _load_checkpoint(
    folder: Path, config: TrainConfig, functions: StepFunctions, console: Console
) -> tuple[Any, dict[str, Any]]:
    saved = open_saved_run(folder, setting="init_from")
    for damaged in saved.checkpoint.damaged:
        console.warning(f"{damaged}; the one before it is taken")
    model, held = config.model, saved.config.model
    # What the parameters were trained with; their layers may be stacked in another pattern than this run's.
    layout = dataclasses.replace(model, masks=held.masks, layer_overrides=held.layer_overrides)
    restacked = layout.pattern_length != model.pattern_length
    wanted = abstract = functions.abstract_state.params
    if restacked:
        abstract = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            parameter_shapes(layout),
            parameter_shardings(parameter_shapes(layout), functions.mesh),
        )
    params = saved.restore_params(abstract)
    if restacked:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted["blocks"])
        stack = jax.jit(restack, static_argnums=(1, 2), out_shardings=shardings)
        params |= {"blocks": stack(params["blocks"], model.num_layers, model.pattern_length)}
    return params, _describe_checkpoint(folder, saved.checkpoint, console)


def _describe_checkpoint(folder: Path, checkpoint: FoundCheckpoint, console: Console) -> dict[str, Any]:
    began_as: dict[str, Any] = {}
    try:  # what the parameters began as, from run to run
        began_as |= read_origin(folder)
    except UserMistake as damaged:
        console.warning(f"{damaged}; an export won't know it")
    origin = {"checkpoint": str(checkpoint.path), "step": checkpoint.step, "sha256": checkpoint.digest}
    return origin | began_as
