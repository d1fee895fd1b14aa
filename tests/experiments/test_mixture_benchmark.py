"""The benchmark of mixtures of experts: what it writes, and what it refuses."""

import json

import pytest

from experiments.benchmarks.mixture import MixtureArguments, main


def test_a_run_writes_a_row_with_both_sides(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    assert main(MixtureArguments(cases=("smoke",), num_rounds=2, sample_ms=1, output=output)) == 0
    (row,) = map(json.loads, output.read_text().splitlines())
    assert (row["case"], row["grouped_matmul"]) == ("smoke", "xla")
    assert row["busiest"] >= 1
    seconds = row["forward_s"] + row["backward_s"]
    assert seconds > 0
    assert row["dense_forward_s"] + row["dense_backward_s"] > 0
    # 256 tokens, 2 experts each, three matrices of 64 × 32: once forward, twice backward.
    assert row["tflops_per_s"] == pytest.approx(3 * 2 * 3 * 256 * 2 * 64 * 32 / seconds / 1e12)
    assert "smoke" in capsys.readouterr().out


def test_what_cannot_be_measured_is_refused(capsys):
    assert main(MixtureArguments(cases=("smoke",), implementation="mosaic_gpu")) == 2
    assert "implementation='mosaic_gpu' can't serve this grouped matmul: it " in capsys.readouterr().err
    with pytest.raises(ValueError, match="unknown cases smoek; expected some of qwen3_30b"):
        MixtureArguments(cases=("smoek",))
