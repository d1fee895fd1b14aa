"""`python -m trainer`'s command line: a config, a workdir, and a flag for every field of the config."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from trainer.cli.flags import OptionParser, apply_overrides, read_path
from trainer.config import TrainConfig
from trainer.errors import UserMistake

PROGRAM = "python -m trainer"


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Trains the experiment that a config file describes.

    The same command run again resumes from the newest checkpoint in its workdir. The config's fields can be
    overridden here, but for model.moe, model.layer_overrides and tuning objects. Most used:

      --config gpt_32k                             the experiment; --config alone lists them
      --workdir runs/books                         where the run's files go
      --resume runs/books                          a run to go on with, in place of both
      --init-from models/Llama-3.2-1B              a pretrained model, or a run's, to go on from
      --data.source text                           what to read: text, jsonl, parquet, bin, trees or chats
      --data.files "books/**/*.txt"                the files to train on
      --num-steps 1000                             optimizer steps
      --sequence-length 8192                       tokens in a sequence
      --batch-size 8                               sequences in a step
      --optimizer.learning-rate 3e-4               its peak
      --model.num-layers 6                         size of the model, with --model.width and others
      --phases 32k,128k                            lengths of phases, by a published recipe
      --model.masks "CausalMask()"                 who attends to whom, written as in Python:
                                                   "CausalMask() & LocalMask(1023, 0)" "CausalMask()"

    All follow, with the defaults of the config file beside --help, or without one those of the fields. --version shows
    the version.
    """

    config: str
    """A page: NAME for experiments/NAME.py, or a Python file that defines get_config() -> TrainConfig. Arguments of
    get_config follow a colon: window_sweep.py:left=511,right=0. Or a run's config.json."""
    resume: Path | None
    """Workdir of a run that goes on, with its config.json in place of --config. Flags change it."""
    workdir: Path
    """Where the run's files go."""
    distributed: str
    """One process or several: auto (several, where SLURM, Open MPI or a TPU slice has started several), on
    (where JAX finds them in another way, as in a Kubernetes Job), off, or HOST:PORT,PROCESSES,INDEX: process 0's
    address, the number of processes, and which one this is."""
    profile_steps: str | None
    """FIRST:LAST, steps to trace for xprof, in the workdir's profile/; 10:13 are the four steps from 10 to 13."""
    write_page: Path | None
    """Write the resulting config to this new file, as a page of Python to edit, and end."""
    train: Annotated[TrainConfig, tyro.conf.arg(name="")]

    @property
    def traced(self) -> range:
        """The steps of `profile_steps`.

        Raises:
          UserMistake: it is of another form, or isn't within the run.
        """
        if self.profile_steps is None:
            return range(0)
        given = re.fullmatch(r"([0-9]{1,10})(?::([0-9]{1,10}))?", self.profile_steps)
        first, last = (int(given[1]), int(given[2] or given[1])) if given else (0, 0)
        if not 1 <= first <= last <= self.train.num_steps:
            raise UserMistake(
                f"--profile-steps {self.profile_steps}: expected FIRST:LAST, two steps from 1 to "
                f"num_steps={self.train.num_steps}; 10:13 are the four steps from 10 to 13"
            )
        return range(first, last + 1)


def parse_command_line(arguments: Sequence[str]) -> TrainCommand:
    """Reads the config file and applies the flags to it.

    Args:
      arguments: what follows `python -m trainer`.

    Raises:
      UserMistake: unknown flag, ill-typed value, a config file that doesn't work, or settings that can't work together.
      SystemExit: with status 0, after `--help` was printed.
    """
    parser = OptionParser(takes_config=True)
    parser.add_argument("--resume", type=read_path)
    parser.add_argument("--workdir", type=read_path)
    parser.add_argument("--distributed", default="auto")
    parser.add_argument("--profile-steps")
    parser.add_argument("--write-page", type=read_path)
    options, overrides = parser.parse_known_args(arguments)
    is_named = options.workdir is not None
    if options.resume is not None:
        _take_from_run(options)
    elif not is_named:
        options.workdir = Path("runs/NAME")
    command = apply_overrides(TrainCommand, vars(options), overrides, program=PROGRAM)
    if options.resume is None and not is_named:
        command = dataclasses.replace(command, workdir=Path("runs") / command.train.name)
    # Absolute, as Orbax has it, in every message.
    return dataclasses.replace(command, workdir=command.workdir.absolute())


def _take_from_run(options: argparse.Namespace) -> None:
    """Sets config and workdir to those of the run that `--resume` names."""
    for name in ("config", "workdir"):
        if getattr(options, name) is not None:
            raise UserMistake(f"--resume takes config and workdir from {options.resume}; leave --{name} out")
    saved = options.resume / "config.json"
    if not os.path.isfile(saved):
        lacks = "holds no config.json" if os.path.isdir(options.resume) else "is no folder"
        raise UserMistake(
            f"--resume {options.resume} {lacks}; expected the workdir of a run: what {PROGRAM} printed as its workdir"
        )
    options.config, options.workdir = str(saved), options.resume
