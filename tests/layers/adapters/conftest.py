"""Makes the recipes in docs/adapters importable, as they are to a reader who has copied them."""

from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[3] / "docs" / "adapters"


@pytest.fixture(autouse=True)
def recipes(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
