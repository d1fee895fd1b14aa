"""The distribution: what it declares, what its packages import, and what importing them does."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("kernels", "layers", "trainer", "experiments")
OURS = {*PACKAGES, "flax_longcontext"}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(*argv: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(argv, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=120)


def normalized(distribution: str) -> str:
    """A distribution's name, without version, extras and marker, as PEP 503 spells it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", distribution).group()).lower()


def test_installed_version_is_the_declared_one():
    assert importlib.metadata.version("flax-longcontext") == PYPROJECT["project"]["version"]


def test_changelog_has_the_declared_version():
    assert f"\n## [{PYPROJECT['project']['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_folder_of_code_is_a_package():
    """A folder without `__init__.py` works in an editable installation and is missing from the wheel."""
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert folders
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_every_import_is_a_declared_dependency():
    project = PYPROJECT["project"]
    declared = {normalized(requirement) for requirement in project["dependencies"]}
    for extra in ("cuda13", "tpu", "data", "plots", "wandb", "peers"):
        declared |= {normalized(requirement) for requirement in project["optional-dependencies"][extra]}
    # Of a module that isn't installed only the name is known, and this one's isn't its distribution's.
    providers = {"dew_flash_attn": ["dew-flash-attn-cu13"]} | importlib.metadata.packages_distributions()
    undeclared = {}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            else:
                continue
            for module in {module.partition(".")[0] for module in modules} - OURS - sys.stdlib_module_names:
                if not declared & {normalized(name) for name in providers.get(module, [module])}:
                    undeclared.setdefault(module, str(path.relative_to(ROOT)))
    assert undeclared == {}


def test_importing_every_module_starts_no_device():
    """The platform doesn't exist, so whatever asks JAX for a device fails."""
    code = f"""
import importlib, pkgutil
for package in {PACKAGES}:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            # Modules of Triton's kernels need it to be defined, and it is for Linux alone.
            if error.name != "triton":
                raise
print("imported")
import jax
jax.devices()
"""
    result = run(sys.executable, "-c", code, JAX_PLATFORMS="no_such_platform")
    assert result.stdout == "imported\n", result.stderr
    assert "no_such_platform" in result.stderr, "jax.devices() should have failed, so this test cannot tell"


def test_importing_the_kernels_imports_jax_and_nothing_optional():
    code = "import sys, kernels; print(*{name.partition('.')[0] for name in sys.modules})"
    result = run(sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr
    imported = set(result.stdout.split())
    assert {"jax", "kernels"} <= imported
    unwanted = {"flax", "jax_triton", "matplotlib", "optax", "orbax", "pyarrow", "tokenizers", "torch", "triton"}
    assert imported.isdisjoint(unwanted | set(PACKAGES) - {"kernels"})


@pytest.mark.parametrize(
    ("module", "statement"),
    [("kernels/upwards.py", "import trainer.config"), ("layers/outwards.py", "def later():\n    import optax")],
)
def test_import_contracts_catch_a_violation(tmp_path, module, statement):
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    lint = (str(Path(sys.executable).with_name("lint-imports")), "--no-cache")

    before = run(*lint, cwd=tmp_path)
    assert before.returncode == 0, before.stdout
    (tmp_path / module).write_text(statement + "\n")
    after = run(*lint, cwd=tmp_path)
    assert after.returncode == 1
    importer, imported = module.removesuffix(".py").replace("/", "."), statement.split()[-1]
    assert f"{importer} -> {imported}" in after.stdout
