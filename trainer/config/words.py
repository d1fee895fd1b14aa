"""Reading a value from the word that stands for it on a command line, by the type that is expected."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, NoReturn, get_args, get_origin

from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    UnsupportedTypeAnnotationError,
)

from kernels import Mask, Tuning, parse_mask
from layers import LayerOverride, MoEConfig
from trainer.config.sources import SourceConfig
from trainer.config.suggestions import did_you_mean
from trainer.config.train_config import Phase
from trainer.errors import UserMistake, name_some


def value_types() -> ConstructorRegistry:
    """Inside this context, tyro reads and shows the types that it doesn't know, and integers as we do."""
    registry = ConstructorRegistry()
    registry.primitive_rule(lambda info: _MASK if info.type is Mask else None)
    registry.primitive_rule(lambda info: _IMPLEMENTATION if info.type == str | Tuning | None else None)
    in_a_file = (LayerOverride, SourceConfig, MoEConfig | None)
    registry.primitive_rule(lambda info: _OF_A_FILE if info.type in in_a_file else None)
    registry.primitive_rule(lambda info: _PHASES if info.type is Phase else None)
    registry.primitive_rule(lambda info: _INTEGER if info.type is int else None)
    registry.primitive_rule(lambda info: _INTEGER_OR_NONE if info.type == int | None else None)
    return registry


@dataclass(frozen=True)
class WordReader:
    """Reads words as tyro reads a value of some type. Made and used inside `value_types`."""

    constructor: PrimitiveConstructorSpec[Any]
    """Of the value, or of each of several."""
    is_tuple: bool

    @classmethod
    def of(cls, hint: Any) -> WordReader:
        """The reader of a type.

        Raises:
          ValueError: words can't tell a value of it.
        """
        is_tuple = get_origin(hint) is tuple
        try:
            constructor = ConstructorRegistry.get_primitive_spec(
                PrimitiveTypeInfo.make(get_args(hint)[0] if is_tuple else hint, set())
            )
        except (UnsupportedTypeAnnotationError, AssertionError, IndexError):
            constructor = None
        if not isinstance(constructor, PrimitiveConstructorSpec) or constructor.nargs != 1:
            raise ValueError(f"a value of type {hint} can't be given on the command line")
        return cls(constructor, is_tuple)

    def check_count(self, flag: str, words: Sequence[str]) -> None:
        """Raises UserMistake if there are too few words or too many."""
        if not self.is_tuple and not words:
            raise UserMistake(f"Missing value for argument '{flag}'; expected {self.constructor.metavar}")
        if not self.is_tuple and len(words) > 1:
            raise UserMistake(f"Unrecognized options: {name_some(words[1:])}; {flag} takes one value")

    def read(self, name: str, words: Sequence[str]) -> Any:
        """The value.

        Args:
          name: of the flag or argument, for messages.
          words: one, or those of a tuple.

        Raises:
          UserMistake: a word can't be read as this type.
        """
        values = tuple(self._read_word(name, word) for word in words)
        return values if self.is_tuple else values[0]

    def _read_word(self, name: str, word: str) -> Any:
        choices = self.constructor.choices
        if choices is not None and word not in choices:
            expected = f"; expected one of {', '.join(choices)}"
            raise UserMistake(f"invalid choice {word!r} for argument '{name}'{expected}{did_you_mean(word, choices)}")
        try:
            return self.constructor.instance_from_str([word])
        except ValueError as error:
            # Of several types, tyro lists on further lines why each doesn't fit.
            reason = str(error)
            message = f"expected {self.constructor.metavar}, got {word!r}" if "\n" in reason else reason
            raise UserMistake(f"{name}: {message}") from None


def split_at_commas(text: str) -> list[str]:
    """Splits at the commas that stand outside of parentheses and brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _read_integer(word: str) -> int:
    """An integer, also where it is written as 1e3 or 2.5e9.

    >>> _read_integer("1e3"), _read_integer("1_000")
    (1000, 1000)
    """
    try:
        return int(word)
    except ValueError:
        if re.fullmatch(r"[+-]?[0-9]{1,18}(\.[0-9]{1,18})?[eE]\+?[0-9]{1,2}", word):
            number = Decimal(word)
            if number == number.to_integral_value():
                return int(number)
        raise ValueError(f"expected INT, got {word!r}") from None


def _read_integer_or_none(word: str) -> int | None:
    try:
        return None if word == "None" else _read_integer(word)
    except ValueError:
        raise ValueError(f"expected INT or None, got {word!r}") from None


def _refuse_word(word: str) -> NoReturn:
    raise ValueError(f"got {word!r}, and only a config file can say it")


_INTEGER: PrimitiveConstructorSpec[int] = PrimitiveConstructorSpec(
    nargs=1,
    metavar="INT",
    instance_from_str=lambda words: _read_integer(words[0]),
    is_instance=lambda value: isinstance(value, int) and not isinstance(value, bool),
    str_from_instance=lambda value: [str(value)],
)
_INTEGER_OR_NONE: PrimitiveConstructorSpec[int | None] = PrimitiveConstructorSpec(
    nargs=1,
    metavar="{None}|INT",
    instance_from_str=lambda words: _read_integer_or_none(words[0]),
    is_instance=lambda value: value is None or (isinstance(value, int) and not isinstance(value, bool)),
    str_from_instance=lambda value: [str(value)],
)
_MASK: PrimitiveConstructorSpec[Mask] = PrimitiveConstructorSpec(
    nargs=1,
    metavar="MASK",
    instance_from_str=lambda words: parse_mask(words[0]),
    is_instance=lambda value: isinstance(value, Mask),
    str_from_instance=lambda mask: [repr(mask)],
)
_IMPLEMENTATION: PrimitiveConstructorSpec[str | Tuning | None] = PrimitiveConstructorSpec(
    nargs=1,
    metavar="NAME|None",
    instance_from_str=lambda words: None if words[0] == "None" else words[0],
    is_instance=lambda value: isinstance(value, str | Tuning | None),
    str_from_instance=lambda value: [value if isinstance(value, str) else repr(value)],
)
_OF_A_FILE: PrimitiveConstructorSpec[Any] = PrimitiveConstructorSpec(
    nargs=1,
    metavar="in-config",
    instance_from_str=lambda words: _refuse_word(words[0]),
    is_instance=lambda value: isinstance(value, LayerOverride | SourceConfig | MoEConfig | Phase | None),
    str_from_instance=lambda value: [repr(value)],
)
_PHASES = replace(_OF_A_FILE, metavar="LENGTH,LENGTH")
"""The lengths of phases come to the whole config: `trainer.cli.flags` reads them."""
