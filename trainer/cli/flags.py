"""Reading flags: a config page, and a flag for every field of a dataclass on top of it."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

from kernels import Mask, parse_mask
from layers import GPTConfig
from trainer.config import TrainConfig
from trainer.config.file import flag_types, is_text, load_config
from trainer.config.suggestions import did_you_mean_field
from trainer.errors import UserMistake
from trainer.process.versions import installed_versions

# Every field takes a value, as in the config file: --model.qk-norm True.
_TYRO = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)


class OptionParser(argparse.ArgumentParser):
    """Reads the options that come before there is a config: `parse_known_args` leaves the config's own fields."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("--version", action=_ShowVersion, nargs=0, dest=argparse.SUPPRESS)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for argument in args:
            if not is_text(argument):  # surrogates are how Python shows bytes that aren't UTF-8
                raise UserMistake(f"{argument!r} is not UTF-8; see the terminal's encoding")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserMistake(message.removeprefix("argument "))


class _ShowVersion(argparse.Action):
    def __call__(self, *_: object) -> NoReturn:
        versions = installed_versions(("flax-longcontext", "jax", "flax"))
        print(", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items()))
        raise SystemExit(0)


def read_path(text: str) -> Path:
    """A path from the command line; the empty one would mean the current folder, which nobody asks for that way."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got the empty text")
    if len(os.fsencode(text)) >= 4096:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}… is too long for a path; use up to 4,095 bytes")
    return Path(text)


Command = TypeVar("Command")


def apply_overrides(
    command: type[Command], options: Mapping[str, Any], overrides: Sequence[str], *, program: str
) -> Command:
    """Loads the config file that a command names, and applies the flags of the config's fields to it.

    Args:
      command: a dataclass with a field `train` for the config, which is made here, and fields for the options.
      options: the values of all other fields; `config` is the file's path, or None where it wasn't given.
      overrides: what remains of the command line.
      program: for help and messages: `python -m …`.

    Raises:
      UserMistake, SystemExit: as `parse_command_line`.
    """
    refuse_unknown_flags(overrides, [*options, *flag_types()], program)
    if options["config"] is None and not wants_help(overrides):
        raise UserMistake(f"--config FILE is missing; for example: {program} --config experiments/smoke.py")
    make_command: Callable[..., Command] = command
    if options["config"] is None:
        default = make_command(**{**options, "config": tyro.MISSING}, train=_any_config())
    else:
        default = make_command(**options, train=load_config(options["config"]))
    return apply_flags(command, overrides, default, program=program)


class _OfTheConfig(int):
    """Stands in the help for a number that only a config file can say."""

    def __str__(self) -> str:
        return "from-config"


def _any_config() -> TrainConfig:
    """What the help shows without a config file: no field is required on the command line, since every file has it."""
    number = _OfTheConfig(1000)
    return TrainConfig(name=str(number), model=GPTConfig(), num_steps=number)


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether the command line asks for nothing but its help."""
    return "-h" in arguments or "--help" in arguments


def refuse_unknown_flags(arguments: Sequence[str], fields: Iterable[str], program: str) -> None:
    """tyro would name several flags, in a box; one sentence with the nearest one is easier to read.

    Raises:
      UserMistake: an argument looks like a flag and names none of the fields.
    """
    known = {"--help", "--version", *(f"--{name.replace('_', '-')}" for name in fields)}
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag.startswith("--") and flag not in known:
            nearest = did_you_mean_field(flag, sorted(known))
            raise UserMistake(
                f"unknown option {argument.partition('=')[0]}" + (nearest or f"; `{program} --help` lists the options")
            )


def apply_flags(command: type[Command], overrides: Sequence[str], default: Command | None, *, program: str) -> Command:
    """Applies the flags of a command's fields.

    Args:
      command: a dataclass.
      overrides: the flags.
      default: what they are applied to; None: the fields' own defaults.
      program: for help and messages.

    Raises:
      UserMistake: an ill-typed value, or what the dataclass refuses.
      SystemExit: with status 0, after `--help` was printed.
    """
    refusal = io.StringIO()
    mask_problems: list[str] = []
    registry = ConstructorRegistry()
    registry.primitive_rule(lambda info: _mask_spec(mask_problems) if info.type is Mask else None)
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        # Help goes to standard output as tyro draws it; a refusal is caught, to be said in one sentence.
        with registry, contextlib.redirect_stderr(refusal):
            return tyro.cli(command, prog=program, args=list(overrides), config=_TYRO, **options)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserMistake(
            f"--model.masks: {mask_problems[0]}" if mask_problems else _unboxed(refusal.getvalue())
        ) from None
    except ValueError as refused:  # by TrainConfig; tyro words only what the nested classes refuse
        raise UserMistake(str(refused)) from None


def _mask_spec(problems: list[str]) -> PrimitiveConstructorSpec[Mask]:
    """How tyro reads a mask. What is wrong with one goes to `problems`; tyro would only say that it can't be parsed."""

    def mask_from_words(words: list[str]) -> Mask:
        try:
            return parse_mask(words[0])
        except ValueError as error:
            problems.append(str(error))
            raise

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="MASK",
        instance_from_str=mask_from_words,
        is_instance=lambda value: isinstance(value, Mask),
        str_from_instance=lambda mask: [repr(mask)],
    )


def _unboxed(text: str) -> str:
    """The sentence inside the box that tyro draws around an error."""
    lines = [line.strip("│ ") for line in text.splitlines() if not line.startswith(("╭", "╰"))]
    message = re.split(r"─{3,}|Got errors:", " ".join(lines))[0].strip()
    # `Error parsing model: ...` wraps what a config class refused, which names the field itself.
    return re.sub(r"^Error parsing (?:(--\S+: )|\S+: )", lambda match: match.group(1) or "", message)
