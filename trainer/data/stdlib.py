"""The corpus that every machine has: the Python standard library's own sources.

In it is every non-empty `.py` file under `sysconfig.get_paths()["stdlib"]` but for

- installed packages: `site-packages`, `dist-packages`;
- caches: `__pycache__`;
- tests (`test`, `tests`, `idle_test`), which many distributions leave out, so that machines with the same
  Python mostly hold the same corpus;
- what a build of Python writes about itself: `_sysconfigdata*.py` and the folder `config-*`, full of one
  machine's paths;
- symbolic links, which lead out of the library.
"""

from __future__ import annotations

import contextlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


def find_stdlib_files(root: Path | None = None) -> Iterator[tuple[str, Path]]:
    """The corpus's files, as (path relative to the library with `/`, path), in an order free of the machine's.

    Args:
        root: the library's folder; None: the running Python's.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if name not in _EXCLUDED_FOLDERS and not name.startswith("config-")
        ]
        for name in names:
            path = Path(folder, name)
            if name.endswith(".py") and not name.startswith("_sysconfigdata") and not path.is_symlink():
                found.append((path.relative_to(root).as_posix(), path))
    return ((relative, path) for relative, path in sorted(found) if not _is_empty(path))


def _is_empty(path: Path) -> bool:
    with contextlib.suppress(OSError):  # Whoever reads the file says what is wrong with it.
        return path.stat().st_size == 0
    return False
