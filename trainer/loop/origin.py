"""The origin of the parameters that a run begins with, before they are read: whose they are, and their context."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from layers import GPTConfig
from layers.pretrained.folder import read_config
from layers.pretrained.peft import model_folder
from trainer.config import TrainConfig
from trainer.config.extension import SCALED, known_positions
from trainer.config.init_from import is_workdir, load_newest_phase, read_initial_model, trained_length
from trainer.launch.peers import Peers
from trainer.saved_run import read_init_from
from trainer.terminal.console import Console


def find_origin(config: TrainConfig, recorded: dict[str, Any] | None, console: Console, peers: Peers) -> dict[str, Any]:
    """Whose parameters a run begins with, or has begun with; a fresh run is warned of sequences too long for them.

    Args:
      config: of the run.
      recorded: what the run's record says of it already.
      console: of the run.
      peers: the processes of the run, of which the first has the record, and warns.

    Returns:
      `family` and `context_length`, as far as they are known.

    Raises:
      UserMistake: the folder describes no model.
    """
    if config.init_from is None or recorded is not None or not peers.is_first:
        return recorded or {}
    initial = read_initial_model(config.init_from)
    origin = read_origin(initial.folder)
    for phase in config.in_phases():
        if warning := longer_than_trained(phase.config, initial.model, origin.get("context_length")):
            console.warning(f"phases[{phase.index}]: {warning}" if config.phases else warning)
    return origin


def read_origin(folder: Path) -> dict[str, Any]:
    """The origin of a folder's parameters.

    Args:
      folder: as `TrainConfig.init_from`, absolute.

    Returns:
      `family`, as transformers calls it, and `context_length`, the tokens that they were trained on at most; either is
      left out where nothing tells it.

    Raises:
      UserMistake: a run's record is damaged.
    """
    if is_workdir(folder):
        began_as, held = read_init_from(folder), load_newest_phase(folder)
        return {**began_as, "context_length": max(held.sequence_length, began_as.get("context_length", 0))}
    folder = model_folder(folder)
    values = read_config(folder)
    length = trained_length(values, folder)
    return {"family": values["model_type"]} | ({} if length is None else {"context_length": length})


def longer_than_trained(config: TrainConfig, theirs: GPTConfig, context_length: int | None) -> str | None:
    """Says that sequences are longer than what a pretrained model's rotary embedding was trained on or is scaled to.

    Args:
      config: of the run, or of a phase of it.
      theirs: the folder's model.
      context_length: tokens that it was trained on at most; None: unknown.

    Returns:
      The warning, with a remedy. None: they aren't, or that isn't known, as of another base of the frequencies.
    """
    if context_length is None:
        return None
    length, model = config.sequence_length, config.model
    for index in range(model.num_layers):
        ours, before = model.layer(index), theirs.layer(index)
        reach = known_positions(ours, before, context_length)
        if reach is None:
            continue
        lookback = ours.mask.lookback
        if length > reach and (lookback is None or lookback >= reach):
            break
    else:
        return None
    scaling = ours.rope_scaling
    if scaling.kind == "longrope":
        remedy = "give model.rope_scaling other long_factors in the config file"
    elif scaling.kind in SCALED:
        remedy = f"set --model.rope-scaling.factor {math.ceil(length / scaling.original_context_length)}"
    else:
        remedy = (
            f"set --model.rope-scaling.kind yarn --model.rope-scaling.factor {math.ceil(length / context_length)} "
            f"--model.rope-scaling.original-context-length {context_length}"
        )
    return (
        f"sequence_length={length} is more than the {reach:,} tokens that the model of init_from={config.init_from!r} "
        f"was trained on or is scaled to, and it knows no positions past these; {remedy}, or a larger "
        "--model.rope-base"
    )
