"""Pretrained models go into shards of eight devices and back without a changed bit, and a changed bit would be seen.

The cases of a run are drawn anew.
"""

from __future__ import annotations

import itertools

import pytest

from layers.pretrained.families import MODULES
from tests.layers.pretrained import golden
from tests.round_trips.cases import DTYPES, MESHES, MODELS, PLACEMENTS, sample, whole_matrix
from tests.round_trips.faults import FAULTS, FAULTY, injected
from tests.round_trips.folders import write_folder
from tests.round_trips.trips import judge


def test_the_matrix_has_every_family(rng, tmp_path):
    cells = list(whole_matrix(int(rng.integers(2**31))))
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
    for case in cases:
        assert judge(case) == [], case


@pytest.mark.usefixtures("eight_devices")
def test_each_fault_is_found_and_nothing_without_one():
    assert judge(FAULTY) == []
    for fault in FAULTS:
        with injected(fault):
            assert judge(FAULTY) != [], fault
