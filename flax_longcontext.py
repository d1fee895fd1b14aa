"""Whose `kernels`, `layers` and `trainer` Python finds: ours, or a neighbour's of the same name.

Other distributions have packages of these names, and a process can import only one of each. Our packages ask here
before they import each other. This module has a name that nobody else uses, and it imports nothing of ours.

    python -m flax_longcontext     says whose packages Python finds, and what to do about a neighbour's
"""

from __future__ import annotations

import importlib.util
import io
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path

PACKAGES = ("kernels", "layers", "trainer")
ROOT = Path(__file__).absolute().parent
"""The folder that our packages lie in: a clone, or an environment's site-packages."""
_MODULE = "flax_longcontext"  # `__name__`, also where this module is the program
_DISTRIBUTION = "flax-longcontext"


class ForeignPackage(ImportError):
    """Under the name of a package of ours, Python finds another's or none."""


def require_ours(*packages: str, importer: str) -> None:
    """Checks, without importing them, that the packages that Python finds under these names are ours.

    Args:
      packages: names of top-level packages.
      importer: the package that is about to import them.

    Raises:
      ForeignPackage: one is another's, or isn't there. The message says where it lies, whose it is, and the remedy.

    >>> require_ours("kernels", "layers", importer="trainer")
    """
    for package in packages:
        spec = _find(package)
        if spec is None or not _is_ours(spec):
            # With its `name` set, `python -m IMPORTER` prints the error as one message, without a traceback.
            raise ForeignPackage(_complaint(package, spec), name=importer)


def warn_of_neighbours(package: str) -> None:
    """Warns if the folder of a package of ours holds files of another distribution, over which ours was installed.

    Args:
      package: the package, which calls this while it is being imported.
    """
    place = ROOT / package
    if _holds_strangers(package) and (owners := _owners(place)):
        named = _in_words(owners)
        warnings.warn(
            f"{place} holds files of {named}, too, whose `{package}` can't be imported any more: flax-longcontext was "
            f"installed over it. {_separate(owners)}",
            stacklevel=3,
        )


def _find(package: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except ValueError:  # a module that a program put into `sys.modules` may have no spec
        return None


def _is_ours(spec: ModuleSpec) -> bool:
    """Whether its source mentions this module, as each `__init__` of ours does and nobody else's.

    A package that comes without its source is taken for ours.
    """
    get_source = getattr(spec.loader, "get_source", None)
    if get_source is None:
        return False
    source = get_source(spec.name)
    return source is None or _MODULE in source


def _complaint(package: str, spec: ModuleSpec | None) -> str:
    expected = f"expected the package `{package}` of flax-longcontext"
    if spec is None:
        return f"{expected}, found none in its place. Install flax-longcontext again"
    folders = list(spec.submodule_search_locations or ())
    place = Path(folders[0] if folders else str(spec.origin)).absolute()
    owners = _owners(place)
    got = f"{expected}, got {place}" + (f" of {_in_words(owners)}" if owners else "")
    if _same(place.parent, ROOT):
        return f"{got}: two distributions were installed into one folder. {_separate(owners)}"
    if not sys.flags.safe_path and _same(place.parent, sys.path[0]):  # the script's folder, or the current one
        return f"{got}: Python looks there first. Rename it, or start Python in another folder"
    return (
        f"{got}: Python looks there first. Put ours first (PYTHONPATH={ROOT}), or give flax-longcontext a virtual "
        "environment of its own; a process can import only one of the two"
    )


def _separate(owners: list[tuple[str, str]]) -> str:
    """The remedy where two distributions lie in one folder. Uninstalling either takes away what the other needs."""
    commands = [f"pip uninstall {name}" for name, _ in owners]
    commands.append("pip install --force-reinstall --no-deps PATH_OF_THE_CLONE")
    return f"Keep one: {'; '.join(commands)}. Or keep both, each in a virtual environment of its own"


def _in_words(owners: list[tuple[str, str]]) -> str:
    return " and ".join(f"the distribution {name} {version}" for name, version in owners)


def _holds_strangers(package: str) -> bool:
    """Whether the package's folder has entries that our installation didn't make. A clone's folders aren't shared."""
    record = next(ROOT.glob(f"{_MODULE}-*.dist-info/RECORD"), None)
    if record is None:
        return False
    files = [line.partition(",")[0].split("/") for line in record.read_text(encoding="utf-8").splitlines()]
    own = {parts[1] for parts in files if parts[0] == package} | {"__pycache__"}
    return any(entry.name not in own for entry in (ROOT / package).iterdir())


def _owners(place: Path) -> list[tuple[str, str]]:
    """Name and version of the other distributions that have installed something into this place."""
    from importlib.metadata import distributions  # takes longer than all else here, and is seldom needed

    owners = [
        (distribution.name, distribution.version)
        for distribution in distributions()
        if distribution.name != _DISTRIBUTION
        and _same(place.parent, str(distribution.locate_file("")))
        and any(file.parts[0] == place.name for file in distribution.files or ())
    ]
    return list(dict.fromkeys(owners))


def _same(folder: Path, other: Path | str) -> bool:
    return folder.resolve() == Path(other).resolve()


def main() -> int:
    """Prints whose each package is; returns 1 if one isn't ours, else 0."""
    status = 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may be no UTF-8, or the output's encoding ASCII
    for package in PACKAGES:
        try:
            require_ours(package, importer=_MODULE)
            print(f"{package}: ours")
        except ForeignPackage as error:
            print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in f"{package}: {error}"))
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
