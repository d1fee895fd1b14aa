"""Finding the config that `--config` names: a Python page with arguments for its `get_config`, or a run's config.json.

--config gpt_32k                             experiments/gpt_32k.py
--config pages/window_sweep.py:left=511      a page, called as get_config(left=511)
--config extend_context --init-from DIR      a page that takes init_from, called as get_config(init_from=DIR)
--config runs/gpt_32k/config.json            the config that a run was trained with
"""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from kernels import Mask
from trainer.config.suggestions import did_you_mean
from trainer.config.words import WordReader, split_at_commas, value_types
from trainer.errors import UserMistake

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_INSTALLED = Path(__file__).parents[2] / "experiments"
_TAKES = "; --config takes a page's name or file, or a run's config.json, and alone lists the pages"


@dataclass(frozen=True)
class Page:
    """A config's file, and what its `get_config` is called with."""

    path: Path
    arguments: Mapping[str, str]
    """As they were typed, by name."""
    init_from: str | None = None
    """As `--init-from` names it: an argument, too, where get_config takes one of this name."""

    @property
    def is_saved(self) -> bool:
        """True: it is a run's config.json, which has every field, and no Python page."""
        return self.path.suffix == ".json"

    def call(self, get_config: Callable[..., Any]) -> Any:
        """The config that the page's `get_config` returns for the arguments.

        Raises:
          UserMistake: it takes no such argument, or another type of value, or needs one that wasn't given.
          Exception: the page's own.
        """
        taken = {name: each for name, each in inspect.signature(get_config).parameters.items() if each.kind in _BY_NAME}
        arguments: dict[str, Any] = dict(self.arguments)
        takes_folder = self.init_from is not None and "init_from" in taken
        if takes_folder and arguments.setdefault("init_from", self.init_from) != self.init_from:
            raise self._mistake(f"--init-from {self.init_from} is given, too; leave init_from out of --config")
        for name in arguments:
            if name not in taken:
                known = f"it takes {', '.join(taken)}" if taken else "it takes no arguments"
                raise self._mistake(f"get_config() takes no {name!r}{did_you_mean(name, taken) or f'; {known}'}")
        needed = [name for name, each in taken.items() if each.default is each.empty and name not in arguments]
        if needed:
            example = ",".join(f"{name}=VALUE" for name in needed)
            raise self._mistake(f"get_config() needs {' and '.join(needed)}; say --config {self.path}:{example}")
        hints = get_type_hints(get_config) if arguments else {}
        values = {name: self._read(name, word, taken[name], hints.get(name)) for name, word in arguments.items()}
        return get_config(**values)

    def _read(self, name: str, word: str, parameter: inspect.Parameter, hint: Any) -> Any:
        """An argument's value, by its annotation, or else by its default."""
        default = parameter.default
        if hint is None and default is not parameter.empty and default is not None:
            hint = Mask if isinstance(default, Mask) else type(default)
        example = f"annotate it in the page, as in def get_config({name}: int = 3)"
        if hint is None:
            raise self._mistake(f"get_config() doesn't say of what type {name} is; {example}")
        with value_types():
            try:
                reader = WordReader.of(hint)
            except ValueError as error:
                raise self._mistake(f"{name}: {error}; {example}") from None
            if reader.is_tuple:
                raise self._mistake(f"{name}: --config can't tell several values; {example}")
            try:
                return reader.read(name, [word])
            except UserMistake as mistake:
                raise self._mistake(str(mistake)) from None

    def _mistake(self, reason: str) -> UserMistake:
        return UserMistake(f"config {self.path}: {reason}")


def find_page(named: str) -> Page:
    """Finds the file that `--config` names.

    Args:
      named: a file, or the name of a page in `experiments/`; arguments may follow a colon, `left=511,right=0`.

    Raises:
      UserMistake: there is no such file, or the arguments aren't of that form.
    """
    ends = [len(named), *(index for index, character in enumerate(named) if character == ":")]
    for end in ends:  # the whole text first: a file's own name may have a colon
        if (path := _find_file(named[:end])) is not None:
            return Page(path, _split_arguments(named, named[end + 1 :]) if end < len(named) else {})
    missing = named[: min(ends)]
    raise UserMistake(
        f"config {missing} {'is a folder, not a file' if os.path.isdir(missing) else 'does not exist'}{_near(missing)}"
    )


def list_pages() -> list[str]:
    """A line for each page of `experiments/`: its name, the arguments it takes, and the first line of its docstring."""
    described = {name: _describe(file) for name, file in sorted(_pages().items())}
    pages = [
        (f"{name}({takes})" if takes else name, about)
        for name, (takes, about) in described.items()
        if about is not None
    ]
    width = max((len(name) for name, _ in pages), default=0)
    return [f"{name:{width}}  {about}" for name, about in pages]


def _find_file(text: str) -> Path | None:
    if os.path.isfile(text):  # unlike Path's, it answers for any path, be it too long or not allowed to be read
        return Path(text)
    return None if os.sep in text else _pages().get(text.removesuffix(".py"))


def _pages() -> dict[str, Path]:
    """The pages of `experiments/` by name: of the one in this folder, and of the one beside these packages."""
    files = [file for folder in (_INSTALLED, Path("experiments")) for file in folder.glob("*.py")]
    return {file.stem: file for file in files if os.path.isfile(file) and not file.stem.startswith("_")}


def _describe(file: Path) -> tuple[str, str | None]:
    """The arguments that a page takes, and what it says about itself; None: it is no page."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return "", f"(can't be read: {type(error).__name__})"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "get_config":
            about = (ast.get_docstring(tree) or "").partition("\n")[0]
            return ast.unparse(node.args), about
    return "", None


def _split_arguments(named: str, text: str) -> dict[str, str]:
    arguments: dict[str, str] = {}
    for item in split_at_commas(text):
        name, equals, value = item.partition("=")
        if not (equals and name.isidentifier()):
            raise UserMistake(f"--config {named}: expected arguments as NAME=VALUE,NAME=VALUE, got {item!r}")
        if name in arguments:
            raise UserMistake(f"--config {named}: {name} is given twice")
        arguments[name] = value
    return arguments


def _near(missing: str) -> str:
    path = Path(missing)
    if os.path.isdir(path):
        inside = path / "config.json"
        return f"; did you mean {inside}?" if os.path.isfile(inside) else _TAKES
    siblings = [str(file) for file in path.parent.glob("*.py")] if os.path.isdir(path.parent) else []
    return did_you_mean(missing, siblings) or did_you_mean(missing, _pages()) or _TAKES
