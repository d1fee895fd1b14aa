"""Reading a config: from a Python file that defines `get_config()`, and as JSON, the form that a workdir keeps."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
import traceback
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import kernels
import layers
from kernels import Mask, Tuning, parse_mask
from kernels.masks.text import PARSABLE_MASKS
from trainer.config.old_names import with_new_names
from trainer.config.page import Page, find_page
from trainer.config.suggestions import did_you_mean, did_you_mean_field
from trainer.config.train_config import TrainConfig
from trainer.errors import UserMistake, shorten


def load_config(named: str | Path | Page) -> TrainConfig:
    """Runs a config page and returns what its `get_config()` makes, or reads a run's config.json.

    Args:
      named: a file, or all that `--config` takes (`trainer/config/page.py`).

    Raises:
      UserMistake: the file is missing, doesn't run, or makes something else; one readable message with file and line.
    """
    page = named if isinstance(named, Page) else find_page(str(named))
    path = page.path
    if page.is_saved:
        if page.arguments:
            raise UserMistake(f"config {path} takes no arguments: it is a run's config, not a page of Python")
        return load_saved_config(path)
    try:
        get_config = _run_file(path).get("get_config")
        if not callable(get_config):
            raise UserMistake(
                f"config {path} defines no get_config(); "
                "add `def get_config() -> TrainConfig` that returns the experiment"
            )
        config = page.call(get_config)
    except (UserMistake, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UserMistake(f"config {_place(path, error)}: {_describe(error)}") from error
    if not isinstance(config, TrainConfig):
        raise UserMistake(
            f"get_config() in {path} returned {type(config).__name__}; expected a trainer.config.TrainConfig"
        )
    check_types(config, f"config {path}: ")
    return config


def config_to_json(config: Any) -> Any:
    """A config as plain JSON values.

    Masks become the text that `kernels.parse_mask` reads, tuples become lists. A tuning object says which class it is
    of under "tuning".
    """
    if isinstance(config, Mask):
        return repr(config)
    if dataclasses.is_dataclass(config):
        fields = {field.name: config_to_json(getattr(config, field.name)) for field in dataclasses.fields(config)}
        return {"tuning": type(config).__name__, **fields} if isinstance(config, Tuning) else fields
    if isinstance(config, tuple | list):
        return [config_to_json(item) for item in config]
    return config


def load_saved_config(path: Path) -> TrainConfig:
    """Reads the config that a workdir keeps.

    Args:
      path: a `config.json`, as `config_to_json` makes it. Fields that it lacks get their defaults: they were added to
        the config after it was written.

    Raises:
      UserMistake: the file is missing, isn't a config, or holds what no longer is one.
    """
    try:
        return config_from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserMistake(f"config {path} can't be read: {error.strerror}") from error
    except UserMistake as mistake:
        raise UserMistake(f"config {path}: {mistake}") from mistake
    except (ValueError, RecursionError) as error:
        raise UserMistake(f"config {path} can't be read back: {error}") from error


def config_from_json(value: Any) -> TrainConfig:
    """Reads back what `config_to_json` made; fields that it lacks get their defaults.

    Raises:
      UserMistake: it isn't a config, or no longer one.
    """
    try:
        config = _from_json(with_new_names(value), TrainConfig)
    except Exception as error:  # values of any type come to the config classes here
        raise UserMistake(f"it can't be read back: {error}") from error
    check_types(config)
    return config


def check_types(config: TrainConfig, place: str = "") -> None:
    """Raises UserMistake, which begins with `place`, for a field whose value isn't of its type."""
    for name, problem in _ill_typed(config):
        raise UserMistake(f"{place}{name}{problem}")


def require_readable(config: TrainConfig) -> None:
    """Checks that a config is the same one after it was written to a workdir and read again.

    A run whose config isn't could train to its end, and then neither resume, nor be sampled or exported.

    Raises:
      UserMistake: a mask or another value isn't, such as a function or an object of the page's own class.
    """
    for name, hint in flag_types().items():
        value = functools.reduce(getattr, name.split("."), config)
        items = value if isinstance(value, tuple) else (value,)
        of_item = get_args(hint)[0] if isinstance(value, tuple) else hint
        for item in items:
            if not _is_readable(item, of_item):
                remedy = (
                    f"compose it of {', '.join(PARSABLE_MASKS)} with &, | and ~ (trainer.compile, the layers and the "
                    "kernels take any mask)"
                    if isinstance(item, Mask)
                    else "use the config's own classes, not ones derived from them"
                )
                raise UserMistake(
                    f"{name}: {_short(item)} can't be written to the run's config.json and read back, so that the run "
                    f"could neither resume, nor be sampled or exported; {remedy}"
                )
    if not _is_readable(config, TrainConfig):
        raise UserMistake(
            f"a {type(config).__name__} or one of its sections is of a class that config.json can't tell; use the "
            "config's own classes, not ones derived from them"
        )


def _is_readable(value: Any, hint: Any) -> bool:
    try:
        return bool(_from_json(json.loads(json.dumps(config_to_json(value))), hint) == value)
    except Exception:  # whatever a page's own class raises
        return False


def _short(value: Any) -> str:
    try:
        return shorten(repr(value), 200)
    except Exception:  # of a page's own class, or an integer of too many digits
        return f"an object of {type(value).__name__}"


def _from_json(value: Any, hint: Any, name: str = "") -> Any:
    """Checks each value's type before a config class, which takes it for granted, looks at the value."""
    if isinstance(value, list) and get_origin(hint) in (typing.Union, types.UnionType):
        hint = next((option for option in get_args(hint) if get_origin(option) is tuple), hint)
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_from_json(item, get_args(hint)[0], name) for item in value)
    if hint is Mask and isinstance(value, str):
        return parse_mask(value)
    if isinstance(value, dict) and get_origin(hint) in (typing.Union, types.UnionType):
        value, hint = _class_of(value, hint)
    if dataclasses.is_dataclass(hint) and hint is not Mask:
        if not isinstance(value, dict):
            raise ValueError(f"expected the fields of a {typing.cast(type, hint).__name__}, got {value!r}")
        hints = _field_types(typing.cast(type, hint))
        for unknown in value.keys() - hints.keys():
            raise ValueError(f"this version knows no {unknown!r}{did_you_mean_field(unknown, hints)}")
        prefix = f"{name}." if name else ""
        fields = {field: _from_json(item, hints[field], f"{prefix}{field}") for field, item in value.items()}
        return typing.cast(type, hint)(**fields)
    if not _fits(value, hint):
        raise ValueError(f"{name}={value!r}{_describe_misfit(value, hint)}")
    return value


def _class_of(value: dict[str, Any], hint: Any) -> tuple[dict[str, Any], Any]:
    """An object's own fields, and which of the hint's classes it is of: the tuning that it names, or the only one."""
    options: tuple[type, ...] = get_args(hint)
    classes = {cls.__name__: cls for cls in options if dataclasses.is_dataclass(cls)}
    if len(classes) == 1:
        return value, next(iter(classes.values()))
    name = value.get("tuning")
    if name not in classes:
        near = did_you_mean(str(name), classes)
        raise ValueError(f"tuning={name!r} is not one of {', '.join(classes)}{near}")
    return {field: item for field, item in value.items() if field != "tuning"}, classes[name]


def _field_types(cls: type) -> dict[str, Any]:
    """The type of each field of a dataclass."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def flag_types(cls: type = TrainConfig, prefix: str = "") -> dict[str, Any]:
    """Every leaf of a config class, as `section.field` → its type, in the order of the fields."""
    flags: dict[str, Any] = {}
    for name, hint in get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint) and not issubclass(typing.cast(type, hint), Mask):
            flags |= flag_types(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            flags[f"{prefix}{name}"] = hint
    return flags


def _run_file(path: Path) -> dict[str, Any]:
    """The names that a page defines. No compiled page is kept: the next edit may fall into the same second."""
    module = ModuleType("config_page")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where dataclasses look for what their annotations name
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
    return vars(module)


def _place(path: Path, error: BaseException) -> str:
    """`file:line` of the innermost frame that lies in the config file: the user's own line, not the library's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return f"{path}:{own[-1]}" if own else str(path)


def _describe(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"ends Python (exit status {error.code}), before anything is trained; leave that out"
    try:
        message = error.msg if isinstance(error, SyntaxError) else str(error)
    except Exception:  # the page's own exception, too, may have a mistake in it
        message = "(without a message that can be shown)"
    if isinstance(error, ValueError):
        return message
    text = f"{type(error).__name__}: {message}"
    # TypeError: OptimizerConfig.__init__() got an unexpected keyword argument 'learning_rat'
    if unexpected := re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", text):
        owner, unknown = unexpected.groups()
        for cls in _config_classes(TrainConfig):
            if cls.__name__ == owner:
                own = did_you_mean_field(unknown, [field.name for field in dataclasses.fields(cls)])
                return f"{owner} has no field {unknown!r}{own or did_you_mean_field(unknown, flag_types())}"
    if isinstance(error, NameError | ImportError) and (unknown := re.search(r"name '(\w+)'", message)):
        sections = (cls.__name__ for cls in _config_classes(TrainConfig))
        return text + did_you_mean(unknown[1], [*kernels.__all__, *layers.__all__, *sections])
    return text


def _config_classes(cls: type) -> Iterator[type]:
    yield cls
    for hint in get_type_hints(cls).values():
        if dataclasses.is_dataclass(hint):
            yield from _config_classes(typing.cast(type, hint))


def _ill_typed(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, hint in _field_types(type(config)).items():
        value = getattr(config, name)
        if not _fits(value, hint):
            yield f"{prefix}{name}={_short(value)}", _describe_misfit(value, hint)
        elif _is_section(value):
            yield from _ill_typed(value, f"{prefix}{name}.")
        elif isinstance(value, tuple) and any(map(_is_section, value)):
            for index, item in enumerate(value):
                yield from _ill_typed(item, f"{prefix}{name}[{index}].")
        elif not all(is_text(item) for item in (value if isinstance(value, tuple) else (value,))):
            yield f"{prefix}{name}={_short(value)}", " holds a NUL character, or what UTF-8 can't write"


def _is_section(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, Mask)


def _describe_misfit(value: Any, hint: Any) -> str:
    if get_origin(hint) is Literal:
        choices = [str(choice) for choice in get_args(hint)]
        nearest = did_you_mean(value, choices) if isinstance(value, str) else ""
        return f" is not one of {', '.join(map(str, get_args(hint)))}{nearest}"
    expected = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")
    wrong_type = f" is of type {type(value).__name__}; expected {expected}"
    is_whole = isinstance(value, float) and value.is_integer() and int in (hint, *get_args(hint))
    return f"{wrong_type}; write {int(value)}" if is_whole else wrong_type  # 1e3 is a float in Python


def is_text(value: Any) -> bool:
    """True if a file name, a terminal and a tokenizer can take a string, and for all that is no string."""
    return not isinstance(value, str) or not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value)


def _fits(value: Any, hint: Any) -> bool:
    """True if a value has the annotated type; covers the annotations that configs use."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(isinstance(value, type(choice)) and value == choice for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, arguments[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
