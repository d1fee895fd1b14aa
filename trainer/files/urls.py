"""Paths that are URLs, which nothing here reads or writes."""

from __future__ import annotations

import os
import re

# `pathlib` makes one slash of two. A single letter before the colon may be a folder.
_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.:-]+:/")


def refuse_url(path: str | os.PathLike[str]) -> None:
    """Refuses a URL in the place of a path, of which Python would make a local folder `s3:`.

    Args:
      path: as the user gave it.

    Raises:
      ValueError: it is a URL.

    >>> refuse_url("runs/books")
    """
    if _URL.match(os.fspath(path)):
        raise ValueError(
            f"{os.fspath(path)!r} is a URL; expected a path in this machine's file systems: mount the storage there, "
            "or copy what it holds"
        )
