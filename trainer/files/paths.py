"""Paths that can't serve: URLs, which nothing here reads or writes, and names that some libraries can't take."""

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


def refuse_unusual(path: str | os.PathLike[str], *, to_save: bool = False) -> None:
    """Refuses a path that JAX, Orbax or TensorStore take for another one, or not at all.

    Args:
      path: absolute, as the folder that a relative one begins in may be such a one.
      to_save: whether checkpoints are to be saved there. Orbax finds their parts by a pattern that the path is part of.

    Raises:
      ValueError: it isn't UTF-8, or has characters of another meaning.

    >>> refuse_unusual("/data/caf\u00e9[1]")
    """
    text = os.fspath(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        reason = "is not UTF-8, and libraries that read and write there take nothing else"
    else:
        found = [sign for sign in ("\\", *("[*?" if to_save else "")) if sign in text]
        if not found:
            return
        reason = f"has {found[0]}, which libraries that read and write there take for a separator or a pattern"
    raise ValueError(f"{text!r} {reason}; rename the folder, or choose another")
