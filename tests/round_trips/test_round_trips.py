"""Pretrained models go into shards of eight devices and back without a changed bit, and a changed bit would be seen.

The cases of a run are drawn anew. CONTRIBUTING.md tells how to run all of them.
"""

from __future__ import annotations

import itertools

import pytest

from layers.pretrained.families import MODULES
from tests.layers.pretrained import golden
from tests.round_trips.cases import DTYPES, MESHES, MODELS, PLACEMENTS, Case, sample, whole_matrix
from tests.round_trips.faults import FAULTS, FAULTY, injected
from tests.round_trips.folders import write_folder
from tests.round_trips.trips import Verdict, judge, judge_all


def test_the_matrix_has_every_family_and_its_cells_are_known_by_their_texts(rng, tmp_path):
    cells = list(whole_matrix(int(rng.integers(2**31))))
    assert [Case.parse(str(cell)) for cell in cells] == cells
    assert len(cells) == len(set(cells))
    assert len(MESHES) == 20

    folders = {(c.model, (c.stored, c.held), c.placement, c.mesh) for c in cells if c.trip == "folder"}
    in_all_dtypes = set(itertools.product((*golden.CASES, "gemma3_multimodal"), DTYPES, PLACEMENTS, MESHES))
    packed = itertools.product(["gpt_oss_mxfp4"], [d for d in DTYPES if d[0] == "bfloat16"], PLACEMENTS, MESHES)
    assert folders == in_all_dtypes | set(packed)
    assert {(c.model, c.mesh) for c in cells if c.trip == "logits"} == set(itertools.product(MODELS, MESHES))
    assert {(c.model, c.mesh) for c in cells if c.trip == "run"} == set(itertools.product(golden.CASES, MESHES))

    of_each = {cell.model: cell for cell in cells}.values()
    written = {write_folder(cell, tmp_path / cell.model, rng).model_type for cell in of_each}
    assert written == set(MODULES) - {"gemma3"}, "that one's language model is a gemma3_text"


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("num_models", [1, pytest.param(4, marks=pytest.mark.full)])
def test_no_bit_changes_on_the_way_into_shards_and_back(num_models, rng):
    cases = sample(int(rng.integers(2**31)), num_models)
    # Models in the dtypes that they have, a run, and a model's logits.
    assert len(cases) >= 2 + 2 * num_models
    for case, verdict in zip(cases, judge_all(cases, num_jobs=1), strict=True):
        assert verdict.passed, f"{case}: {verdict.text}"


@pytest.mark.usefixtures("eight_devices")
def test_each_fault_is_found_and_nothing_without_one():
    assert judge(FAULTY) == Verdict(True, "0 of 15 arrays differ")
    for fault in FAULTS:
        with injected(fault):
            verdict = judge(FAULTY)
        # In arrays, and not because something was refused.
        assert not verdict.passed
        assert " arrays differ, " in verdict.text, (fault, verdict.text)


def test_a_case_that_fails_is_told(capsys):
    assert not judge(Case("folder", "llama", "float32", "float32", "trainer", (1, 16, 1, 1), seed=0)).passed
    assert "needs 16 device(s)" in capsys.readouterr().err
