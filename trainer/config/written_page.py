"""Writes a config as a page of Python, to be read and edited: every field that differs from its default."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kernels
import layers
import trainer.config
from kernels import Mask
from trainer.config.file import config_to_json, load_config
from trainer.config.init_from import with_initial_model
from trainer.config.page import Page
from trainer.config.train_config import TrainConfig
from trainer.errors import UserMistake
from trainer.files.atomic import write_atomically

_WIDTH = 120


def write_page(config: TrainConfig, path: Path, command: Sequence[str], about: Sequence[str] = ()) -> str:
    """Writes a config as a page.

    Args:
      config: with the model of its `init_from` in it.
      path: of a file that doesn't exist.
      command: the command line that made the config, for the page's docstring.
      about: lines about the config, for the docstring, too.

    Returns:
      A line that says where the page is, and how to run it.

    Raises:
      UserMistake: the file exists, or can't be written, or a page can't say what the config says.
    """
    if os.path.lexists(path):
        raise UserMistake(f"--write-page {path} exists; name another file, or move it away")
    try:
        write_atomically(path, page_text(config, command, about))
        written = with_initial_model(load_config(Page(path, {})))
    except OSError as error:
        raise UserMistake(f"--write-page {path} can't be written: {error.strerror}") from None
    except UserMistake as mistake:
        path.unlink()
        raise UserMistake(f"--write-page: a page can't say this config: {mistake}") from None
    if written != config:
        path.unlink()
        ours, theirs = config_to_json(config), config_to_json(written)
        differing = ", ".join(name for name in ours if ours[name] != theirs[name])
        raise UserMistake(
            f"--write-page: a page can't say this config's {differing}, as a field at its default is the folder's of "
            "init_from; leave out the flags that set them"
        )
    return f"wrote {path}; python -m trainer --config {shlex.quote(str(path))} runs it"


def page_text(config: TrainConfig, command: Sequence[str], about: Sequence[str] = ()) -> str:
    """The text of a page whose `get_config` returns a config.

    Args:
      config: of any kind that a run's config.json can hold.
      command: the command line that made it.
      about: lines about it.
    """
    names: set[str] = set()
    body = _source(config, names, indent=4, before=len("    return "))
    imports = []
    for module in (kernels, layers, trainer.config):
        own = sorted(names & set(module.__all__))
        names -= set(own)
        if own:
            imports.append(f"from {module.__name__} import {', '.join(own)}")
    assert not names, f"no package exports {names}"
    docstring = "\n".join([f"{shlex.join(command)}\n", *about]).rstrip().replace("\\", "\\\\").replace('"', '\\"')
    return (
        f'"""A page that this command wrote:\n\n{docstring}\n"""\n\n'
        + "\n".join(imports)
        + f"\n\n\ndef get_config() -> TrainConfig:\n    return {body}\n"
    )


def _source(value: Any, names: set[str], *, indent: int, before: int) -> str:
    """Python that makes a value.

    Args:
      names: the classes that it names are added.
      indent: of the line that it begins on.
      before: characters of that line before it.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Mask):
        names.add(type(value).__name__)
        start, end = f"{type(value).__name__}(", ")"
        parts = [(f"{name}=", item) for name, item in _set_fields(value)]
    elif isinstance(value, tuple):
        start, end, parts = "(", ",)" if len(value) == 1 else ")", [("", item) for item in value]
    else:
        if isinstance(value, Mask):
            names |= {name for name in kernels.__all__ if name in _words(repr(value))}
        if type(value) is int:
            return f"{value:_}" if abs(value) >= 10_000 else str(value)
        return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    flat = ", ".join(name + _source(item, names, indent=0, before=-(10**9)) for name, item in parts)
    if before + len(flat) + len(start) + len(end) + 1 <= _WIDTH and "\n" not in flat:
        return f"{start}{flat}{end}"
    inner = indent + 4
    lines = [
        " " * inner + name + _source(item, names, indent=inner, before=inner + len(name)) + ",\n"
        for name, item in parts
    ]
    return f"{start}\n{''.join(lines)}{' ' * indent}{end.removeprefix(',')}"


def _set_fields(value: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass that differ from their defaults."""
    fields = []
    for field in dataclasses.fields(value):
        default = field.default_factory() if callable(field.default_factory) else field.default
        if (item := getattr(value, field.name)) != default or type(item) is not type(default):
            fields.append((field.name, item))
    return fields


def _words(text: str) -> set[str]:
    return set("".join(character if character.isalnum() else " " for character in text).split())
