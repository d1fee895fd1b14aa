"""Training on a mesh of eight devices is training on one, and a comparison that says so would see a mistake.

The cases of a run are drawn anew. CONTRIBUTING.md tells how to run all of them.
"""

from __future__ import annotations

import itertools

import pytest

from tests.parity.cases import ATTENTION, EXCHANGES, LOSS_CHUNKS, MESHES, Case, sample, whole_matrix
from tests.parity.faults import FAULTS
from tests.parity.judging import run_faults, run_groups

pytestmark = pytest.mark.timeout(900)  # most of it compiling, on whatever else the machine does


def test_the_matrix_is_whole_and_its_cells_are_known_by_their_texts(rng):
    cells = list(whole_matrix(int(rng.integers(2**31))))
    assert [Case.parse(str(cell)) for cell in cells] == cells

    splits = [(mesh, exchange) for mesh in MESHES for exchange in (EXCHANGES if mesh[3] > 1 else (None,))]
    in_float64 = [(cell.problem, cell.placement) for cell in cells if cell.placement.dtype == "float64"]
    found = {(p.mlp, p.attention, (at.mesh, at.exchange), at.accumulation, at.loss_chunk) for p, at in in_float64}
    whole = set(itertools.product(["dense"], ATTENTION, splits, (1, 2), LOSS_CHUNKS))
    assert whole <= found
    assert len(whole) == (10 + 10 * 4) * 17 * 2 * 2
    mixtures = {tuple(split) for mlp, _, *split in found if mlp == "mixture"}
    assert mixtures == set(itertools.product(splits, (1, 2), LOSS_CHUNKS))
    assert not [cell for cell in cells if cell.problem.mlp == "mixture" and cell.expected_refusal]
    # Where masks bound the reach, no cell of the halo's is a refusal.
    assert not [cell for cell in cells if ATTENTION[cell.problem.attention].has_reach and cell.expected_refusal]


@pytest.mark.usefixtures("eight_devices", "float64")
@pytest.mark.parametrize("num_problems", [1, pytest.param(6, marks=pytest.mark.full)])
def test_loss_and_gradients_on_meshes_are_those_of_one_device(num_problems, rng, capsys):
    tallies = list(run_groups(sample(int(rng.integers(2**31)), num_problems), num_jobs=1))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("FAILED")] == []
    assert len(tallies) == num_problems
    # One device against the oracle, and meshes whose context axis is 1 and more.
    assert sum(tally.num_passed for tally in tallies) >= 4 * num_problems


@pytest.mark.full
@pytest.mark.usefixtures("eight_devices", "float64")
def test_each_fault_is_found_and_nothing_without_one(capsys):
    tally = run_faults()
    lines = capsys.readouterr().out.splitlines()
    assert tally.num_failed == 0, lines
    passed = dict(line.removeprefix("passed ").split(": ", 1) for line in lines)
    names = {f"no fault in {case.problem.attention}, {case.problem.mlp}" for case in FAULTS}
    names.update(*FAULTS.values())
    assert passed.keys() == names
    # Not because something was refused.
    assert all("differs by" in found for found in passed.values())
