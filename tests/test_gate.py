"""What `make test` and `.ci/run` rely on: the limit of time, the choice of guards, and the seed."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest

from tests.seeds import run_seed, seeded_rng

CI = Path(__file__).parents[1] / ".ci"
REPORT = '<testsuites><testsuite><testcase classname="tests.a" name="quick" time="0.5"/>{slow}</testsuite></testsuites>'


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, CI / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_that_took_too_long_fails_and_names_its_ten_slowest_tests(tmp_path, capsys):
    slow = "".join(f'<testcase classname="tests.b" name="slow{i}" time="{10 + i}"/>' for i in range(11))
    report = tmp_path / "report.xml"
    report.write_text(REPORT.format(slow=slow))
    arguments = ("MINUTES=60 allows more", str(report), str(tmp_path / "of_no_tests.xml"))
    assert load("within").main("14", str(time.time() - 15 * 60), *arguments) == 1
    error, *named = capsys.readouterr().err.splitlines()
    assert "MINUTES=60 allows more" in error
    assert [line.split("::")[1] for line in named] == [f"slow{i}" for i in range(10, 0, -1)]
    assert load("within").main("14", str(time.time() - 13 * 60), *arguments) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("changed", "guarded_by"),
    [
        ("kernels/masks/shapes.py", "tests/kernels"),
        ("layers/pretrained/load.py", "tests/round_trips"),
        ("trainer/step/loss.py", "tests/parity"),
        ("docs/masks.md", "tests/test_readme.py"),
        ("tests/layers/test_moe.py", "tests/layers/test_moe.py"),
    ],
)
def test_a_changed_file_has_tests_that_guard_it(changed, guarded_by):
    assert guarded_by in load("guards").guards_of(changed)


def test_all_that_guards_is_there():
    guards = load("guards").GUARDS
    assert [name for name in guards if not (CI.parent / name).exists()] == []
    assert [test for tests in guards.values() for test in tests if not (CI.parent / test).exists()] == []


def test_a_name_and_the_runs_seed_bring_the_same_draws_back(monkeypatch):
    monkeypatch.setenv("TESTS_RNG_SEED", "7")
    first, again, other = (seeded_rng(name).integers(2**60) for name in ("a", "a", "b"))
    assert first == again != other
    assert run_seed(8) == 8
    assert seeded_rng("a").integers(2**60) != first
