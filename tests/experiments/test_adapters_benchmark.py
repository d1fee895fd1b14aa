"""The benchmark of a step with adapters, on a model of one small layer."""

import json

import pytest

from experiments.benchmarks.adapters import main


def test_a_line_has_what_was_measured(tmp_path, capsys):
    sizes = {"length": 64, "num-rounds": 1, "rank": 2, "num-layers": 1, "width": 512, "vocab-size": 64}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    output = tmp_path / "rows.jsonl"
    assert main([*words, "--output", str(output)]) == 0
    row = json.loads(output.read_text())
    assert (row["length"], row["rank"]) == (64, 2)
    assert min(row["adapters_s"], row["norms_alone_s"]) > 0
    # A and B of rank 2 on seven matrices, in float32, with two moments each.
    sides = [(512, 512), (512, 128), (512, 128), (512, 512), (512, 1792), (512, 1792), (1792, 512)]
    adapters = sum(2 * (inputs + outputs) for inputs, outputs in sides) * 3 * 4
    assert row["adapters_bytes"] - row["norms_alone_bytes"] > 0.9 * adapters
    assert f"{row['norms_alone_s'] / row['adapters_s']:.3f} × those with norms alone" in capsys.readouterr().out


def test_an_unknown_flag_ends_with_status_2():
    with pytest.raises(SystemExit) as ended:
        main(["--num-round", "3"])
    assert ended.value.code == 2
