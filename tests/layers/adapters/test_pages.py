"""Runs the pages in docs/adapters as a reader would, where the package that a page is about is installed."""

import ast
import importlib.util
import re
import shutil

import pytest

from tests.test_readme import ROOT, execute, parse

PAGES = sorted((ROOT / "docs" / "adapters").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs(page, tmp_path):
    if importlib.util.find_spec(page.stem) is None:
        pytest.skip(f"{page.stem} isn't installed: docs/adapters/{page.name} says how")
    for recipe in page.parent.glob("*_recipe.py"):
        shutil.copy(recipe, tmp_path)
    # Under the name of the page, the program would be found in the place of the package.
    program = [section for section in parse(page.read_text(), f"page_of_{page.name}") if section.snippets]
    assert program
    for section in program:
        execute(section, tmp_path)


@pytest.mark.parametrize("name", ["bonsai", "gemma", "levanter", "maxtext"])
def test_a_recipe_names_the_version_that_it_was_tried_with(name):
    recipe, page = ((ROOT / "docs" / "adapters" / file).read_text() for file in (f"{name}_recipe.py", f"{name}.md"))
    tried_with = re.search(r'^TRIED_WITH = "(.+)"$', recipe, re.MULTILINE)[1]
    assert tried_with in ast.get_docstring(ast.parse(recipe))
    assert tried_with in page.partition("## Tried with")[2]
