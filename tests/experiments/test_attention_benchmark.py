"""The attention benchmark: what its rows say, on shapes small enough for a CPU."""

import dataclasses
import statistics

import numpy as np
import pytest

from experiments.benchmarks.attention.__main__ import SUITES, Arguments, measure
from experiments.benchmarks.attention.cases import CASES, Case, known_cases, make_problem
from kernels import CausalMask, LocalMask, count_allowed_pairs

SMALL = Case(2, 256, 2, 1, 16, CausalMask(), "float32")
PACKED = dataclasses.replace(SMALL, document_length=60, document_spread=0.5)


def test_a_case_is_timed_by_every_backend_that_serves_it_and_the_others_say_why_not():
    arguments = Arguments(backends=("blockwise", "xla", "cudnn"), baseline="xla", num_rounds=3, sample_ms=1)
    rows = measure("small", SMALL, arguments)
    refused = [row for row in rows if "refused" in row]
    assert [row["backend"] for row in refused] == ["cudnn"]
    assert "runs on gpu, not on cpu" in refused[0]["refused"]
    timed = {(row["backend"], row["direction"]): row for row in rows if "refused" not in row}
    assert set(timed) == {(b, d) for b in ("blockwise", "xla") for d in ("forward", "backward", "forward_backward")}
    assert all(row["speed_ratio"] == 1 for (backend, _), row in timed.items() if backend == "xla")
    ours = timed["blockwise", "forward"]
    flops = 4 * 16 * 2 * 2 * count_allowed_pairs(CausalMask(), 256, 256)
    assert ours["tflops_per_s"] == pytest.approx(flops / ours["seconds"] / 1e12)
    assert ours["fastest_s"] <= ours["seconds"] <= ours["slowest_s"]
    assert {"jax", "date", "device"} <= ours.keys()


def test_packed_documents_count_their_own_pairs_and_xla_refuses_them():
    problem = make_problem(PACKED)
    ids, position = problem.segment_ids, np.arange(256)
    allowed = (ids[:, :, None] == ids[:, None, :]) & (position[:, None] >= position)
    assert problem.num_pairs == 2 * allowed.sum()
    assert statistics.mean(len(set(row)) for row in ids.tolist()) > 1
    rows = measure("packed", PACKED, Arguments(backends=("blockwise", "xla"), num_rounds=1))
    assert [row["backend"] for row in rows if "refused" in row] == ["xla"]


def test_a_backward_is_the_difference_of_its_round():
    rows = measure("small", SMALL, Arguments(backends=("blockwise",), num_rounds=1))
    seconds = {row["direction"]: row["seconds"] for row in rows}
    assert seconds["backward"] == pytest.approx(seconds["forward_backward"] - seconds["forward"])


def test_names():
    assert set(SUITES["hopper"]) <= set(CASES)
    assert CASES["1x16x32768x128_window_4096"].mask == LocalMask(4095, 0)
    with pytest.raises(ValueError, match=r"unknown cases \['no_such'\]; expected some of causal"):
        known_cases(("no_such",))
