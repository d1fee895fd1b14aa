"""XLA's persistent compilation cache: which folder, and how large ours may become."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from trainer.errors import UserMistake
from trainer.files.paths import refuse_unusual

OWN_FOLDER = "~/.cache/flax-longcontext/xla"
OWN_FOLDER_BYTES = 10 * 2**30
_JAX_VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def cache_folder(named: str | None) -> str:
    """The folder of the cache; the empty string: there is none.

    Args:
      named: as `CompilationConfig.cache_dir`.
    """
    return (os.environ.get(_JAX_VARIABLE) or OWN_FOLDER) if named is None else named


def use_compilation_cache(named: str | None) -> None:
    """Keep every compiled program in a folder and look there first, in this process from now on.

    Args:
      named: as `CompilationConfig.cache_dir`. It is made if absent, and `~` is expanded. The empty string turns the
        cache off. None: the folder of JAX's environment variable, which JAX looks after, or else ours. Ours is held to
        its size here.

    Raises:
      UserMistake: the folder can't be made or written to, or its path isn't UTF-8.
    """
    folder = cache_folder(named)
    path = Path(folder).expanduser().absolute()
    is_of_jax = named is None and folder != OWN_FOLDER
    try:
        refuse_unusual(folder if is_of_jax else path)
    except ValueError as refused:
        raise UserMistake(f"{_JAX_VARIABLE if is_of_jax else 'compilation.cache_dir'}={refused}") from None
    if folder and not is_of_jax:
        with contextlib.suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
        if not (path.is_dir() and os.access(path, os.W_OK | os.X_OK)):
            raise UserMistake(
                f"compilation.cache_dir={folder!r} is not a folder that can be written to; "
                "name another one, or '' to compile afresh each time"
            )
    if folder == OWN_FOLDER:
        hold_to_size(path, OWN_FOLDER_BYTES)
    # JAX takes URLs, too, and as they are.
    jax.config.update("jax_compilation_cache_dir", folder if is_of_jax else str(path) if folder else None)
    # By default JAX leaves out programs that are small or quick to compile. A run has dozens of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # a cache that is in use already keeps its folder


def hold_to_size(folder: Path, num_bytes: int) -> None:
    """Removes the programs that were unused for longest, until the others fit.

    `jax_compilation_cache_max_size` would do so at each write. It needs the `filelock` package, looks at every file
    each time, and in JAX 0.10.2 fails in a folder that was written without it.

    Args:
      folder: of JAX's cache.
      num_bytes: of its programs together.
    """
    found = []
    with contextlib.suppress(OSError):
        for file in folder.glob("*-cache"):
            with contextlib.suppress(OSError):  # another process has removed it
                status = file.stat()
                # A file system tells reading within a day, or not at all: then the oldest go first.
                found.append((max(status.st_atime, status.st_mtime), status.st_size, file))
    excess = sum(size for _, size, _ in found) - num_bytes
    for _, size, file in sorted(found):
        if excess <= 0:
            break
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)  # a process that is about to read it compiles instead
            file.with_name(f"{file.name.removesuffix('-cache')}-atime").unlink(missing_ok=True)
            excess -= size
