"""Runs the pages in docs/adapters as a reader would, where the package that a page is about is installed."""

import importlib.util

import pytest

from tests.test_readme import ROOT, execute, parse

PAGES = sorted((ROOT / "docs" / "adapters").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs(page, tmp_path):
    if importlib.util.find_spec(page.stem) is None:
        pytest.skip(f"{page.stem} isn't installed: docs/adapters/{page.name} says how")
    # Under the name of the page, the program would be found in the place of the package.
    program = [section for section in parse(page.read_text(), f"page_of_{page.name}") if section.snippets]
    assert program
    for section in program:
        execute(section, tmp_path)
