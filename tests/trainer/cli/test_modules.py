"""A module of `trainer` that sounds like a command is one, or says that it is none."""

from __future__ import annotations

import importlib.util
import pkgutil
import runpy

import pytest

import trainer

# Named for what they hold. Nobody would run them.
THINGS = {"errors", "hardware", "saved_run", "workdir"}
COMMANDS = {"compare", "compile", "evaluate", "export", "sample", "show"}


def test_only_commands_can_be_run():
    """A package without `__main__` and a module that doesn't exist are refused by Python."""
    found = list(pkgutil.iter_modules(trainer.__path__))
    packages = {module.name for module in found if module.ispkg}
    assert {name for name in packages if importlib.util.find_spec(f"trainer.{name}.__main__")} == COMMANDS
    assert {module.name for module in found if not module.ispkg} == {*THINGS, "__main__", "train"}


def test_the_loop_is_no_command_and_says_which_one_trains():
    with pytest.raises(SystemExit, match=r"trainer\.train is no command; python -m trainer --config FILE trains"):
        runpy.run_module("trainer.train", run_name="__main__")
