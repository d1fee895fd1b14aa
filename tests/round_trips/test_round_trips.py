"""Pretrained models go into shards of eight devices and back without a changed bit, and a changed bit would be seen.

The cases of a run are drawn anew.
"""

from __future__ import annotations

import pytest

from layers.pretrained.families import MODULES
from tests.round_trips.cases import MESHES, MODELS, sample
from tests.round_trips.faults import FAULTS, FAULTY, injected
from tests.round_trips.folders import write_folder
from tests.round_trips.trips import judge


def test_the_cases_have_every_family(rng, tmp_path):
    assert len(MESHES) == 20
    of_each = {case.model: case for case in sample(int(rng.integers(2**31)), len(MODELS)) if case.trip == "folder"}
    written = {write_folder(case, tmp_path / model, rng).model_type for model, case in of_each.items()}
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
