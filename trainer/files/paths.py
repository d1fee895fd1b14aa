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


def refuse_other_encoding(path: str | os.PathLike[str]) -> None:
    """Refuses a path of bytes that aren't UTF-8, for folders that JAX and TensorStore read and write.

    Args:
      path: absolute, as the folder that a relative one begins in may be such a one.

    Raises:
      ValueError: it isn't UTF-8.

    >>> refuse_other_encoding("/data/caf\u00e9")
    """
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{os.fspath(path)!r} is not UTF-8, and libraries that read and write there take nothing else; rename the "
            "folder, or choose another"
        ) from None
