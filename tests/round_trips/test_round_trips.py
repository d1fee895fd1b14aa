"""Pretrained models go into shards of eight devices and back without a changed bit, and a changed bit would be seen.

The cases of a run are drawn anew. CONTRIBUTING.md tells how to run all of them.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from layers.pretrained.families import MODULES
from tests.layers.pretrained import golden
from tests.round_trips.cases import DTYPES, MESHES, MODELS, PLACEMENTS, Case, whole_matrix
from tests.round_trips.faults import FAULTS
from tests.round_trips.folders import write_folder
from tests.round_trips.trips import judge

NUM_MODELS = 2


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


@pytest.mark.full
def test_no_bit_changes_on_the_way_into_shards_and_back(rng):
    arguments = ["--sample", str(NUM_MODELS), "--faults", "--seed", str(rng.integers(2**31))]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "tests.round_trips", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join(line for line in lines if line.startswith("FAILED"))
    # Two models in the dtypes that they have, a run, and a model's logits.
    assert sum(line.startswith("passed trip=") for line in lines) >= 2 + 2 + len(DTYPES)
    assert "passed no fault: 0 of 15 arrays differ" in lines
    # Each fault is found in arrays, and not because something was refused.
    found = dict(line.removeprefix("passed ").split(": ", 1) for line in lines if " arrays differ, " in line)
    assert found.keys() == set(FAULTS)


def test_a_case_that_fails_is_told(capsys):
    assert not judge(Case("folder", "llama", "float32", "float32", "trainer", (1, 16, 1, 1), seed=0)).passed
    assert "needs 16 device(s)" in capsys.readouterr().err
