"""Versions of the installed packages."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence


def installed_versions(distributions: Sequence[str]) -> dict[str, str | None]:
    """The version of each distribution; None if it isn't installed."""
    versions: dict[str, str | None] = {}
    for name in distributions:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions
