"""`python -m trainer`'s command line: a config file, a workdir, and a flag for every field of the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from trainer.cli.flags import OptionParser, apply_overrides, read_path
from trainer.config import TrainConfig

PROGRAM = "python -m trainer"


@dataclass(frozen=True)
class TrainCommand:
    """Trains the experiment that a config file describes.

    The same command run again resumes from the newest checkpoint in its workdir. The config's fields can be
    overridden here, but for model.moe, model.layer_overrides and tuning objects. Most used:

      --config experiments/gpt_32k.py              the experiment
      --workdir runs/books                         where the run's files go
      --init-from models/Llama-3.2-1B              a pretrained model, or a run's, to go on from
      --data.source text                           what to read: text, jsonl, parquet or bin
      --data.files "books/**/*.txt"                the files to train on
      --num-steps 1000                             optimizer steps
      --sequence-length 8192                       tokens in a sequence
      --batch-size 8                               sequences in a step
      --optimizer.learning-rate 3e-4               its peak
      --model.num-layers 6                         size of the model, with --model.width and others
      --model.masks "CausalMask()"                 who attends to whom, written as in Python:
                                                   "CausalMask() & LocalMask(1023, 0)" "CausalMask()"

    All follow, with the defaults of the config file beside --help, or without one those of the fields. --version shows
    the version.
    """

    config: Path
    """Python file that defines get_config() -> TrainConfig."""
    workdir: Path
    """Where the run's files go."""
    distributed: str
    """Whether several processes train together: auto (where SLURM, Open MPI or a TPU slice has started several), on
    (where JAX finds them in another way, as in a Kubernetes Job), off, or HOST:PORT,PROCESSES,INDEX: process 0's
    address, the number of processes, and which one this is."""
    train: Annotated[TrainConfig, tyro.conf.arg(name="")]


def parse_command_line(arguments: Sequence[str]) -> TrainCommand:
    """Reads the config file and applies the flags to it.

    Args:
      arguments: what follows `python -m trainer`.

    Raises:
      UserMistake: unknown flag, ill-typed value, a config file that doesn't work, or settings that can't work together.
      SystemExit: with status 0, after `--help` was printed.
    """
    parser = OptionParser()
    parser.add_argument("--config", type=read_path)
    parser.add_argument("--workdir", type=read_path)
    parser.add_argument("--distributed", default="auto")
    files, overrides = parser.parse_known_args(arguments)
    workdir, distributed = files.workdir or Path("runs/NAME"), files.distributed
    options = {"config": files.config, "workdir": workdir, "distributed": distributed}
    command = apply_overrides(TrainCommand, options, overrides, program=PROGRAM)
    workdir = files.workdir or Path("runs") / command.train.name
    # Absolute, as Orbax has it, in every message.
    return TrainCommand(command.config, workdir.absolute(), distributed, command.train)
