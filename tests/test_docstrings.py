"""Runs the examples in the packages' docstrings."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES_WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for pattern in (
        "flax_longcontext.py",
        "kernels/**/*.py",
        "layers/**/*.py",
        "trainer/**/*.py",
        "experiments/**/*.py",
    )
    for path in ROOT.glob(pattern)
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES_WITH_EXAMPLES)
def test_examples_in_docstrings(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0, "the captured output shows the difference"
