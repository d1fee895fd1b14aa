"""Another's `kernels`, `layers` or `trainer` beside ours: told in one message, with the remedy, whoever came first.

An installation is a folder with a distribution's files and a `dist-info` that lists them, as pip makes it.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import flax_longcontext

ROOT = Path(__file__).parent.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def install(site: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Puts a distribution's files into an environment, over what is there."""
    dist_info = f"{name.replace('-', '_')}-{version}.dist-info"
    files = files | {f"{dist_info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    for path, text in (files | {f"{dist_info}/RECORD": "".join(f"{path},,\n" for path in files)}).items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)


def install_ours(site: Path) -> None:
    install(site, "flax-longcontext", VERSION, OUR_FILES)


def install_theirs(site: Path, package: str) -> None:
    """A distribution as is on PyPI: it imports a module of its own, of whose name we have a folder in `kernels`."""
    own = {"__init__.py": f"from {package}.backends import theirs\n", "backends.py": "theirs = 1\n", "own.py": ""}
    install(site, package, "4.5.6", {f"{package}/{path}": text for path, text in own.items()})


def uninstall(site: Path, package: str) -> None:
    """What `pip uninstall` does: removes the files that the distribution's record has, whoever wrote them last."""
    (dist_info,) = site.glob(f"{package}-*.dist-info")
    for line in (dist_info / "RECORD").read_text().splitlines():
        (site / line.partition(",")[0]).unlink()
    shutil.rmtree(dist_info)


def python(*arguments: str, path: list[Path], cwd: Path) -> subprocess.CompletedProcess:
    """Runs Python with these folders first on its path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


OUR_FILES = {"flax_longcontext.py": (ROOT / "flax_longcontext.py").read_text()} | {
    str(path.relative_to(ROOT)): path.read_text()
    for package in ("kernels", "layers", "trainer", "experiments")
    for path in (ROOT / package).rglob("*.py")
}

IMPORTS = [
    ("kernels", "import layers"),
    ("kernels", "from layers import Attention"),
    ("kernels", "from trainer.config import TrainConfig"),
    ("kernels", "from experiments import gpt_32k"),
    ("layers", "import trainer"),
    ("layers", "from experiments import gpt_32k"),
    ("trainer", "from experiments import gpt_32k"),
]
COMMANDS = [
    ("kernels", "trainer"),
    ("kernels", "trainer.compile"),
    ("kernels", "trainer.sample"),
    ("layers", "trainer"),
    ("trainer", "experiments.benchmarks.attention"),
]


@pytest.fixture
def site(tmp_path):
    """An environment's site-packages."""
    return tmp_path / "site"


@pytest.fixture
def elsewhere(tmp_path):
    """A folder to start Python in that holds nothing."""
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "elsewhere"


@pytest.mark.parametrize(("package", "statement"), IMPORTS)
def test_theirs_earlier_on_the_path_is_told_on_import(site, elsewhere, package, statement):
    """As with an editable installation of ours, which Python asks last, in either order."""
    install_theirs(site, package)
    result = python("-c", statement, path=[site, ROOT], cwd=elsewhere)
    assert result.returncode == 1
    message = result.stderr.splitlines()[-1]
    assert message == (
        f"flax_longcontext.ForeignPackage: expected the package `{package}` of flax-longcontext, got {site / package} "
        f"of the distribution {package} 4.5.6: Python looks there first. Put ours first (PYTHONPATH={ROOT}), or give "
        "flax-longcontext a virtual environment of its own; a process can import only one of the two"
    )


@pytest.mark.parametrize(("package", "module"), COMMANDS)
def test_a_command_tells_it_without_a_traceback(site, elsewhere, package, module):
    install_theirs(site, package)
    result = python("-m", module, "--help", path=[site, ROOT], cwd=elsewhere)
    assert result.returncode != 0
    assert len(result.stderr.splitlines()) == 1
    assert f"got {site / package} of the distribution {package} 4.5.6: Python looks there first" in result.stderr


def test_the_remedy_for_a_path_works(site, elsewhere):
    install_theirs(site, "kernels")
    result = python("-c", "import layers", path=[ROOT, site], cwd=elsewhere)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("kernels", ("-c", "import layers")),
        ("kernels", ("-c", "import kernels")),
        ("layers", ("-m", "trainer", "--help")),
        ("trainer", ("-c", "import experiments")),
        ("trainer", ("-m", "trainer", "--help")),
        ("trainer", ("-m", "trainer.compile", "--help")),
        ("trainer", ("-m", "trainer.sample", "--help")),
    ],
)
def test_theirs_installed_over_ours_is_told(site, elsewhere, package, arguments):
    install_ours(site)
    install_theirs(site, package)
    result = python(*arguments, path=[site], cwd=elsewhere)
    assert result.returncode != 0
    assert (
        f"expected the package `{package}` of flax-longcontext, got {site / package} of the distribution {package} "
        f"4.5.6: two distributions were installed into one folder. Keep one: pip uninstall {package}; pip install "
        "--force-reinstall --no-deps PATH_OF_THE_CLONE. Or keep both, each in a virtual environment of its own"
    ) in result.stderr
    assert ("Traceback" in result.stderr) == (arguments[0] == "-c")


@pytest.mark.parametrize("package", flax_longcontext.PACKAGES)
def test_ours_installed_over_theirs_works_and_warns_once(site, elsewhere, package):
    install_theirs(site, package)
    install_ours(site)
    result = python("-c", "import experiments, layers, trainer", path=[site], cwd=elsewhere)
    assert result.returncode == 0
    warning = [line for line in result.stderr.splitlines() if "Warning" in line]
    assert len(warning) == 1
    assert warning[0].endswith(
        f"UserWarning: {site / package} holds files of the distribution {package} 4.5.6, too, whose `{package}` "
        f"can't be imported any more: flax-longcontext was installed over it. Keep one: pip uninstall {package}; "
        "pip install --force-reinstall --no-deps PATH_OF_THE_CLONE. Or keep both, each in a virtual environment of "
        "its own"
    )


@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_the_remedy_for_a_shared_folder_works_and_half_of_it_is_told(site, elsewhere, order):
    steps = [lambda: install_ours(site), lambda: install_theirs(site, "kernels")]
    for step in steps if order == "ours first" else reversed(steps):
        step()
    uninstall(site, "kernels")
    half = python("-c", "import layers", path=[site], cwd=elsewhere)
    assert half.returncode == 1
    assert "--force-reinstall --no-deps PATH_OF_THE_CLONE" in half.stderr.splitlines()[-1]
    install_ours(site)
    whole = python("-c", "import layers", path=[site], cwd=elsewhere)
    assert (whole.returncode, whole.stderr) == (0, "")


def test_alone_it_says_nothing_of_files_that_no_distribution_owns(site, elsewhere):
    install_ours(site)
    (site / "kernels" / "notes.txt").write_text("a file of the user's")
    result = python("-c", "import trainer, layers", path=[site], cwd=elsewhere)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("form", ["layers.py", "layers/__init__.py", "layers/attention.py"])
def test_a_folder_or_module_of_the_project_at_hand_is_told(elsewhere, form):
    """A folder without `__init__.py` too, where ours is editable: Python takes it before it asks for ours."""
    (elsewhere / form).parent.mkdir(exist_ok=True)
    (elsewhere / form).write_text("")
    finder = """
import importlib.util, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "layers":
            return importlib.util.spec_from_file_location(name, ROOT + "/layers/__init__.py")
sys.meta_path.append(Finder)
"""
    ours = elsewhere.parent / "ours"
    for name in ("kernels", "trainer", "flax_longcontext.py"):
        ours.mkdir(exist_ok=True)
        (ours / name).symlink_to(ROOT / name)
    code = finder.replace("ROOT", repr(str(ROOT))) + "import trainer"
    result = python("-c", code, path=[ours], cwd=elsewhere)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].endswith(
        f"got {elsewhere / form.split('/')[0]}: Python looks there first. Rename it, or start Python in another folder"
    )


def test_missing_package_is_told(site, elsewhere):
    install_ours(site)
    shutil.rmtree(site / "layers")
    result = python("-S", "-c", "import trainer", path=[site], cwd=elsewhere)  # without the tests' own installation
    assert "expected the package `layers` of flax-longcontext, found none" in result.stderr.splitlines()[-1]


def test_the_command_tells_whose_each_package_is(site, elsewhere):
    ours = python("-m", "flax_longcontext", path=[ROOT], cwd=elsewhere)
    assert (ours.returncode, ours.stdout) == (0, "kernels: ours\nlayers: ours\ntrainer: ours\n")
    install_theirs(site, "kernels")
    result = python("-m", "flax_longcontext", path=[site, ROOT], cwd=elsewhere)
    assert result.returncode == 1
    first, *rest = result.stdout.splitlines()
    assert first.startswith(f"kernels: expected the package `kernels` of flax-longcontext, got {site / 'kernels'}")
    assert rest == ["layers: ours", "trainer: ours"]


def test_a_module_that_the_program_made_is_not_ours(monkeypatch):
    monkeypatch.setitem(sys.modules, "layers", type(sys)("layers"))
    with pytest.raises(flax_longcontext.ForeignPackage, match=r"`layers` of flax-longcontext, found none"):
        flax_longcontext.require_ours("layers", importer="trainer")
