"""Reading flags: a config page, and a flag for every field of a dataclass on top of it."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro

from layers import GPTConfig
from trainer.config import TrainConfig
from trainer.config.extension import extend_context, read_lengths
from trainer.config.file import flag_types, is_text, load_config
from trainer.config.init_from import read_initial_model
from trainer.config.page import find_page, list_pages
from trainer.config.suggestions import did_you_mean_field
from trainer.config.words import WordReader, value_types
from trainer.errors import UserMistake
from trainer.files.paths import refuse_url
from trainer.hardware import installed_versions

# Every field takes a value, as in the config file: --model.tie-embeddings True.
_TYRO = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)


class OptionParser(argparse.ArgumentParser):
    """Reads the options that come before there is a config: `parse_known_args` leaves the config's own fields.

    Args:
      takes_config: whether `--config` is one of them.
    """

    def __init__(self, *, takes_config: bool = False) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.register("action", None, _Once)
        self.add_argument("--version", action=_ShowVersion, nargs=0, dest=argparse.SUPPRESS)
        self._takes_config = takes_config
        if takes_config:
            self.add_argument("--config", type=_read_config)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._takes_config and list(args) == ["--config"]:
            print("\n".join(list_pages()))
            raise SystemExit(0)
        for argument in args:
            if not is_text(argument):  # surrogates are how Python shows bytes that aren't UTF-8
                raise UserMistake(f"{argument!r} is not UTF-8; see the terminal's encoding")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserMistake(message.removeprefix("argument "))


class _Once(argparse.Action):
    """Keeps an option's value. Of two, one would be lost."""

    _given: Any = None

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if self._given is not None:
            raise UserMistake(f"{option_string} is given twice, as {self._given} and as {values}; leave one out")
        self._given = values
        setattr(namespace, self.dest, values)


class _ShowVersion(argparse.Action):
    def __call__(self, *_: object) -> NoReturn:
        versions = installed_versions(("flax-longcontext", "jax", "flax"))
        print(", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items()))
        raise SystemExit(0)


def read_path(text: str) -> Path:
    """A path from the command line; the empty one would mean the current folder, which nobody asks for that way."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got the empty text")
    try:
        refuse_url(text)
    except ValueError as refused:
        raise argparse.ArgumentTypeError(str(refused)) from None
    if len(os.fsencode(text)) >= 4096:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}… is too long for a path; use up to 4,095 bytes")
    return Path(text)


def read_bool(text: str) -> bool:
    """True or False from the command line."""
    if text not in ("True", "False"):
        raise argparse.ArgumentTypeError(f"expected True or False, or nothing, got {text!r}")
    return text == "True"


def require_writable(flag: str, path: Path) -> None:
    """Checks that a file can be written, before the work that fills it.

    Raises:
      UserMistake: it can't.
    """
    name_fits = len(os.fsencode(path.name)) <= 255
    if os.path.isdir(path) or not name_fits or not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserMistake(f"{flag} {path} can't be written; name a file in a folder that exists")


def check_phase(number: int, run: TrainConfig) -> None:
    """Checks that `--phase` names one of a run's phases, from 1.

    Raises:
      UserMistake: it doesn't.
    """
    num_phases = len(run.phases)
    if not num_phases:
        raise UserMistake(f"--phase {number} expects a run with phases, and {run.name} has none; leave it out")
    if not 1 <= number <= num_phases:
        raise UserMistake(f"--phase {number} is none of the phases of {run.name}; use a number from 1 to {num_phases}")


def _read_config(text: str) -> str:
    read_path(text)
    return text  # as a Path it would lose the slashes in a page's arguments


Command = TypeVar("Command")


def apply_overrides(
    command: type[Command], options: Mapping[str, Any], overrides: Sequence[str], *, program: str
) -> Command:
    """Loads the config file that a command names, and applies the flags of the config's fields to it.

    Args:
      command: a dataclass with a field `train` for the config, which is made here, and fields for the options.
      options: the values of all other fields; `config` is what `--config` names, or None where it wasn't given.
      overrides: what remains of the command line.
      program: for help and messages: `python -m …`.

    Raises:
      UserMistake, SystemExit: as `parse_command_line`.
    """
    refuse_unknown_flags(overrides, [*options, *flag_types()], program)
    if options["config"] is None and not wants_help(overrides):
        raise UserMistake(
            f"--config FILE is missing; for example: {program} --config experiments/smoke.py; "
            f"{program} --config lists the pages"
        )
    make_command: Callable[..., Command] = command
    if options["config"] is None:
        default = make_command(**{**options, "config": tyro.MISSING}, train=_any_config())
        return apply_flags(command, overrides, default, program=program)
    given = _split_into_flags(overrides)
    file = find_page(options["config"])
    if len(folder := given.get("--init-from", [])) == 1:
        file = dataclasses.replace(file, init_from=folder[0])
    page = load_config(file)
    lengths = _read_lengths(given.pop("--phases", []))
    if lengths:
        overrides = [word for flag, words in given.items() for word in (flag, *words)]
    values = read_flags(command, overrides, make_command(**options, train=page), program=program)
    flags = {name.removeprefix("train."): value for name, value in values.items()}
    init_from = flags.pop("init_from", page.init_from)
    if init_from is None:
        train = replace_fields(page, flags | {"init_from": None})
        return make_command(**options, train=_in_phases(train, lengths, None))
    initial = read_initial_model(init_from)
    train = replace_fields(initial.under(page, flags, is_saved=file.is_saved), flags)
    initial.check(train)
    return make_command(**options, train=_in_phases(train, lengths, initial.context_length))


def _read_lengths(words: Sequence[str]) -> tuple[int, ...]:
    """The lengths that `--phases` names; none where it isn't given."""
    try:
        return read_lengths(",".join(words)) if words else ()
    except ValueError as refused:
        raise UserMistake(str(refused)) from None


def _in_phases(train: TrainConfig, lengths: tuple[int, ...], context_length: int | None) -> TrainConfig:
    """A config with phases of these lengths, or as it is where there are none. Flags and model are in it already."""
    try:
        return extend_context(train, lengths, context_length=context_length) if lengths else train
    except ValueError as refused:
        raise UserMistake(str(refused)) from None


class _OfTheConfig(int):
    """Stands in the help for a number that only a config file can say."""

    def __str__(self) -> str:
        return "from-config"


def _any_config() -> TrainConfig:
    """The config of a help without a config file: no field is required on the command line, since every file has it."""
    number = _OfTheConfig(1000)
    return TrainConfig(name=str(number), model=GPTConfig(), num_steps=number)


def wants_help(arguments: Sequence[str]) -> bool:
    """True if the command line asks for nothing but its help."""
    return "-h" in arguments or "--help" in arguments


def refuse_unknown_flags(arguments: Sequence[str], fields: Iterable[str], program: str) -> None:
    """Checks that each flag names a field.

    Raises:
      UserMistake: an argument looks like a flag and names none of the fields; it tells the nearest.
    """
    known = {"--help", "--version", *(f"--{name.replace('_', '-')}" for name in fields)}
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag.startswith("--") and flag not in known:
            if (backend := flag.rpartition(".")[0]).endswith("implementation"):
                raise UserMistake(f"unknown option {flag}; {backend} takes a name, and a config file a tuning object")
            nearest = did_you_mean_field(flag, sorted(known))
            raise UserMistake(
                f"unknown option {argument.partition('=')[0]}" + (nearest or f"; `{program} --help` lists the options")
            )


def apply_flags(command: type[Command], overrides: Sequence[str], default: Command | None, *, program: str) -> Command:
    """Applies the flags of a command's fields.

    Args:
      command, overrides, default, program: as in `read_flags`; the flags are applied to the default.

    Raises:
      UserMistake: an ill-typed value, or what the dataclass refuses.
      SystemExit: with status 0, after `--help` was printed.
    """
    values = read_flags(command, overrides, default, program=program)
    assert default is not None, "without a default there is only help"
    return replace_fields(default, values)


def read_flags(
    command: type[Command], overrides: Sequence[str], default: Command | None, *, program: str
) -> dict[str, Any]:
    """Reads the flags of a command's fields, as `section.field` → value. tyro reads the values, and draws the help.

    Args:
      command: a dataclass.
      overrides: the flags, none of them unknown.
      default: what the help shows; None where nothing but help is asked for.
      program: for help and messages.

    Raises:
      UserMistake: an ill-typed value.
      SystemExit: with status 0, after `--help` was printed.
    """
    given = _split_into_flags(overrides)
    with value_types():
        fields = {_flag_of(name): (name, hint) for name, hint in flag_types(command).items()}
        readers = {flag: WordReader.of(fields[flag][1]) for flag in given if flag in fields}
        for flag, reader in readers.items():
            reader.check_count(flag, given[flag])
        if wants_help(overrides):
            options: dict[str, Any] = {} if default is None else {"default": default}
            tyro.cli(command, prog=program, args=["--help"], config=_TYRO, **options)
        return {fields[flag][0]: reader.read(flag, given[flag]) for flag, reader in readers.items()}


def replace_fields(default: Command, values: Mapping[str, Any]) -> Command:
    """A command with some fields replaced, by `section.field`.

    Raises:
      UserMistake: a dataclass refuses the values.
    """
    try:
        return _replace_fields(default, values)
    except ValueError as refused:
        raise UserMistake(str(refused)) from None


def _flag_of(field: str) -> str:
    """The flag of a field. The sections `train` and `choice` of a command aren't named on the command line."""
    return f"--{field.removeprefix('train.').removeprefix('choice.').replace('_', '-')}"


def _split_into_flags(overrides: Sequence[str]) -> dict[str, list[str]]:
    """Each flag with the words that follow it, or `--flag=word`. A flag that is given twice counts as the last says."""
    given: dict[str, list[str]] = {}
    words: list[str] | None = None
    for argument in overrides:
        if argument.startswith("--") or argument == "-h":
            flag, equals, value = argument.partition("=")
            words = given[flag.replace("_", "-")] = [value] if equals else []
        elif words is None:
            raise UserMistake(f"Unrecognized options: {argument}")
        else:
            words.append(argument)
    return given


def _replace_fields(config: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass with some fields replaced, by `section.field`; each section is made once, with all of its fields."""
    own = {name: value for name, value in values.items() if "." not in name}
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, dot, field = name.partition(".")
        if dot:
            sections.setdefault(section, {})[field] = value
    changed = {section: _replace_fields(getattr(config, section), of_it) for section, of_it in sections.items()}
    return dataclasses.replace(config, **own, **changed)
