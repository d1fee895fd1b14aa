"""The command line: a workdir, prompts, and how to continue them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from kernels.backends import Task
from layers.checks import check_implementation, check_numbers
from trainer.cli.flags import OptionParser, apply_flags, read_path, refuse_unknown_flags, wants_help
from trainer.config import TokenChoice
from trainer.config.file import flag_types
from trainer.config.sections import check_path
from trainer.errors import UserMistake

PROGRAM = "python -m trainer.sample"
AS_TRAINED = "as-trained"


@dataclass(frozen=True, kw_only=True)
class SampleCommand:
    """Continues prompts with a trained model, from the newest checkpoint of a run.

    Each text is printed once it is whole. Prompts from files come last.
    """

    workdir: Path
    """Folder of the run: what `python -m trainer` printed as its workdir."""
    step: int | None = None
    """Step of the checkpoint, of those that the run keeps. None: the newest."""
    prompt: tuple[str, ...] = ()
    """Beginning of a document; several after one flag, or a flag for each. The empty text is one, too."""
    prompt_file: tuple[Path, ...] = ()
    """UTF-8 file that holds a prompt, as long as the context if need be; several like --prompt."""
    num_tokens: int | None = None
    """Tokens to add to each prompt at most. None: 256, or as many as the context has room for."""
    choice: Annotated[TokenChoice, tyro.conf.arg(name="")] = field(default_factory=TokenChoice)
    seed: tuple[int, ...] = (0,)
    """Prompt and seed make a text, whatever grows beside it. Several: each prompt is continued with each."""
    tokenizer: str | None = None
    """`byte`, or the path of a `tokenizer.json`. None: where the run found it."""
    implementation: str | None = AS_TRAINED
    """Attention backend for the prompts. as-trained: the one of the run's config; None: the fastest on this device."""
    decode_implementation: str | None = AS_TRAINED
    """The same for the tokens that are added."""

    def __post_init__(self):
        if self.tokenizer is not None:
            check_path("tokenizer", self.tokenizer)
        if self.num_tokens is not None and self.num_tokens < 1:
            raise ValueError(f"num_tokens={self.num_tokens} must be at least 1")
        if not self.seed:
            raise ValueError("seed needs one or more integers from 0 to 2^32 - 1; got none")
        for seed in self.seed:
            if not 0 <= seed < 2**32:
                raise ValueError(f"seed={seed} must be an integer from 0 to 2^32 - 1")
        check_numbers(self)
        check_numbers(self.choice)
        tasks: dict[str, Task] = {"implementation": "attention", "decode_implementation": "decoding"}
        for name, given in self.implementations.items():
            check_implementation(given, tasks[name], name)

    @property
    def implementations(self) -> dict[str, str | None]:
        """The attention backends that replace the run's own, by the field of `GPTConfig`."""
        given = {"implementation": self.implementation, "decode_implementation": self.decode_implementation}
        return {name: backend for name, backend in given.items() if backend != AS_TRAINED}


def parse_command_line(arguments: Sequence[str]) -> SampleCommand:
    """Reads the flags.

    Args:
      arguments: what follows `python -m trainer.sample`.

    Raises:
      UserMistake: unknown flag, ill-typed value, or nothing to continue.
      SystemExit: with status 0, after `--help` was printed.
    """
    # tyro would take the last of several --prompt.
    parser = OptionParser()
    parser.add_argument("--workdir", type=read_path)
    parser.add_argument("--prompt", nargs="+", action="extend", default=[])
    parser.add_argument("--prompt-file", nargs="+", action="extend", default=[], type=read_path)
    options, flags = parser.parse_known_args(arguments)
    refuse_unknown_flags(flags, [name.removeprefix("choice.") for name in flag_types(SampleCommand)], PROGRAM)
    if wants_help(flags):
        apply_flags(SampleCommand, flags, None, program=PROGRAM)
    if options.workdir is None:
        raise UserMistake(f'--workdir DIR is missing; for example: {PROGRAM} --workdir runs/smoke --prompt "def "')
    if not options.prompt and not options.prompt_file:
        raise UserMistake('--prompt TEXT is missing; --prompt "" begins a document')
    try:
        given = SampleCommand(
            workdir=options.workdir, prompt=tuple(options.prompt), prompt_file=tuple(options.prompt_file)
        )
    except ValueError as refused:
        raise UserMistake(str(refused)) from None
    return apply_flags(SampleCommand, flags, given, program=PROGRAM)
