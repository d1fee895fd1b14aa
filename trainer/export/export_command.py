"""The command line: a workdir, and the folder to write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.cli.flags import OptionParser, apply_flags, read_path, refuse_unknown_flags, wants_help
from trainer.config.file import flag_types
from trainer.config.sections import check_path
from trainer.errors import UserMistake

PROGRAM = "python -m trainer.export"


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Writes the model of a run's newest checkpoint as a Hugging Face folder, with the tokenizer of training.

    `transformers.AutoModelForCausalLM.from_pretrained` loads it, and so does --init-from. A model that none of the
    families can express is refused with the reason.
    """

    workdir: Path
    """Folder of the run: what `python -m trainer` printed as its workdir. The run may be under way."""
    output: Path
    """Folder to write, which must not exist."""
    step: int | None = None
    """Step of the checkpoint, of those that the run keeps. None: the newest."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the tensors. None: that of the run's parameters, so that every bit is kept."""
    adapters: bool = False
    """Write the adapters alone, as a folder that `peft` loads on top of the base. False: merge them into it."""
    tokenizer: str | None = None
    """`byte`, or the path of a `tokenizer.json`. None: where the run found it."""

    def __post_init__(self):
        if self.tokenizer is not None:
            check_path("tokenizer", self.tokenizer)


def parse_command_line(arguments: Sequence[str]) -> ExportCommand:
    """Reads the flags.

    Args:
      arguments: what follows `python -m trainer.export`.

    Raises:
      UserMistake: unknown flag, or an ill-typed or missing value.
      SystemExit: with status 0, after `--help` was printed.
    """
    parser = OptionParser()
    parser.add_argument("--workdir", type=read_path)
    parser.add_argument("--output", type=read_path)
    options, flags = parser.parse_known_args(arguments)
    refuse_unknown_flags(flags, flag_types(ExportCommand), PROGRAM)
    if wants_help(flags):
        apply_flags(ExportCommand, flags, None, program=PROGRAM)
    for name, given in vars(options).items():
        if given is None:
            raise UserMistake(
                f"--{name} DIR is missing; for example: {PROGRAM} --workdir runs/smoke --output models/smoke"
            )
    return apply_flags(ExportCommand, flags, ExportCommand(**vars(options)), program=PROGRAM)
