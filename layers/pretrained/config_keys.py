"""The keys of a config.json, read with their types checked."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_INTEGER = 2**31 - 1
# Beyond these a model costs memory and time before its tensors are compared with it: no published one comes near them.
_MAX_PARTS = 4096
MAX_VOCABULARY = 2**24


class Keys:
    """A JSON object from a source that isn't trusted; `path` is the file's, for error messages."""

    def __init__(self, values: Mapping[str, Any], path: str):
        self.values = values
        self.path = path

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, at_most: int = _MAX_INTEGER) -> int:
        """An integer of at least 1; the default where the key is absent, which isn't the same as null."""
        value = self.values.get(name, default)
        if type(value) is not int or not 1 <= value <= _MAX_INTEGER:
            raise self.wrong(name, "an integer from 1 to 2^31 - 1")
        if value > at_most:
            raise self.wrong(name, f"at most {at_most:,}")
        return value

    def number_of_parts(self, name: str, default: int | None = None) -> int:
        """A number of layers, experts or heads: an integer from 1 to 4,096."""
        return self.integer(name, default, at_most=_MAX_PARTS)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.values.get(name, default)
        if not _is_number(value):
            raise self.wrong(name, "a finite number")
        return float(value)

    def number_or_null(self, name: str) -> float | None:
        """A finite number or null."""
        return self.number(name) if name in self else None

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self.values.get(name, default)
        if type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(map(_is_number, value)):
            raise self.wrong(name, "a list of finite numbers")
        return tuple(map(float, value))

    def choices(self, name: str, allowed: Sequence[Any], length: int) -> list[Any]:
        """The first `length` values of a list, each one of `allowed`."""
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) < length or not all(entry in allowed for entry in value[:length]):
            raise self.wrong(name, f"a list of {length} values, each one of {', '.join(map(repr, allowed))}")
        return value[:length]

    def inner(self, name: str) -> Keys | None:
        """An object within this one; None where the key is absent or null."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return None if value is None else Keys(value, f"{self.path}: {name}")

    def wrong(self, name: str, expected: str) -> ValueError:
        """The error of a key whose value can't be used."""
        return ValueError(f"{self.path} has {name}={self.values.get(name)!r:.200}; expected {expected}")


def _is_number(value: Any) -> bool:
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < 2**63)


Read = Callable[[Keys, str], Any]
Default = Any  # a value, or a function of the keys that makes one; None: the file must say it


@dataclass(frozen=True)
class Key:
    """One row of a family's table of settings.

    Args:
      name: the key in config.json.
      fields: the settings that it sets, of `GPTConfig` or, after "moe.", of its `MoEConfig`.
      read: the type that is expected.
      default: transformers' value where the key is absent.
      null: transformers' value where the key is null.
      into: makes our setting of the key's value; None: it is the same.
      back: the inverse of `into`.
    """

    name: str
    fields: tuple[str, ...]
    read: Read
    default: Default = None
    null: Default = None
    into: Callable[[Any], Any] | None = None
    back: Callable[[Any], Any] | None = None

    def value(self, keys: Keys) -> Any:
        """Our setting, as config.json has it."""
        unsaid = self.null if self.name in keys.values else self.default
        if self.name in keys or unsaid is None:
            value = self.read(keys, self.name)
        else:
            value = unsaid(keys) if callable(unsaid) else unsaid
        return value if self.into is None else self.into(value)


def integer(name: str, *fields: str, default: Default = None, at_most: int = _MAX_INTEGER) -> Key:
    """A row for a count or a size."""
    return Key(name, fields, functools.partial(Keys.integer, at_most=at_most), default)


def number_of_parts(name: str, *fields: str, default: Default = None, null: Default = None) -> Key:
    """A row for how many layers, experts or heads there are."""
    return Key(name, fields, Keys.number_of_parts, default, null)


def number(name: str, *fields: str, default: Default = None) -> Key:
    """A row for a real number."""
    return Key(name, fields, Keys.number, default)


def optional_number(name: str, *fields: str, default: float | None = None) -> Key:
    """A row for a real number or none at all."""
    return Key(name, fields, Keys.number_or_null, default)


def flag(name: str, *fields: str, default: bool | None = None) -> Key:
    """A row for a yes or no."""
    return Key(name, fields, Keys.flag, default)
