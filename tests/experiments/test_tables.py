"""The tables of docs/benchmarks.md: the page has those of the kept rows, and each says what its rows say."""

import json
import re

import pytest

from experiments.benchmarks import tables
from experiments.benchmarks.attention.speed_table import read_rows

KEPT = tables.TablesArguments()
ALONE = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1}


def trained(tokens_per_s, commit="a", date="2026-11-28", workload="small", exchange=None, **more):
    axes = {axis: more.pop(axis) for axis in ALONE if axis in more}
    row = {"workload": workload, "mesh": ALONE | axes, "tokens_per_s": tokens_per_s, "commit": commit, "date": date}
    row |= {"exchange": exchange, "device": "NVIDIA H200", "versions": {"jax": "0.11.2"}, "mfu_causal": 0.5}
    return row | more


def lines_of(table):
    """The cells of a table's lines, without its headings."""
    return [line.split(" | ") for line in table.splitlines()[4:]]


def test_the_page_has_the_tables_of_the_rows_that_are_kept():
    page = KEPT.page.read_text(encoding="utf-8")
    again = "make them again: python -m experiments.benchmarks.tables"
    assert tables.replace_tables(page, tables.make_tables(KEPT.results)) == page, again


@pytest.mark.parametrize(
    ("name", "field", "marker"),
    [
        ("train_meshes_h200.jsonl", "tokens_per_s", "two"),
        ("mixture_h200.jsonl", "over_dense", "mixtures"),
        ("attention_hopper_h200.jsonl", "tflops_per_s", "hopper"),
    ],
)
def test_other_rows_make_another_table(tmp_path, name, field, marker):
    for path in KEPT.results.glob("*.json*"):
        (tmp_path / path.name).write_text(path.read_text())
    rows = read_rows(tmp_path / name)
    rows = [row | {field: 3 * row[field]} if field in row else row for row in rows]
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept, other = tables.make_tables(KEPT.results), tables.make_tables(tmp_path)
    assert kept[marker] != other[marker]
    assert kept["decoding"] == other["decoding"]


def test_the_command_replaces_what_stands_behind_the_markers(tmp_path):
    kept = tables.make_tables(KEPT.results)
    page = tmp_path / "page.md"
    page.write_text("before\n\n" + "\n".join(f"<!-- table {name} -->\n\nafter {name}:\n" for name in kept))
    tables.main(tables.TablesArguments(page=page))
    written = page.read_text()
    for name, table in kept.items():
        assert f"<!-- table {name} -->\n{table}\nafter {name}:\n" in written
    tables.main(tables.TablesArguments(page=page))
    assert page.read_text() == written


def test_the_page_needs_one_marker_for_each_table():
    for page in ("", "<!-- table a -->\n" * 2, "<!-- table a -->\n<!-- table b -->\n"):
        with pytest.raises(ValueError, match=re.escape("expected a line <!-- table NAME --> for each of a, got ")):
            tables.replace_tables(page, {"a": "x | y\n"})


def test_a_table_says_on_what_with_what_and_when_it_was_measured():
    rows = [trained(1), trained(1, date="2026-11-25") | {"device": "NVIDIA H100 80GB HBM3"}]
    table = tables.markdown(rows, ["a", "b"], [["1", "2"], ["3", "4"]])
    assert table.splitlines()[:2] == ["H100, H200, JAX 0.11.2, 2026-11-25 to 2026-11-28:", ""]
    assert table.splitlines()[2:] == ["a | b", "---|---", "1 | 2", "3 | 4"]


def test_a_mesh_is_compared_with_one_gpu_of_the_same_day_and_commit():
    rows = [
        trained(100.0),
        trained(110.0),
        trained(90.0, commit="b"),
        trained(200.0, context=2, exchange=["all_to_all"], device_peak_bytes=2_000_000_000),
        trained(999.0, context=2, commit="c"),
        trained(300.0, data=2, date="2026-11-29"),
        trained(170.0, data=2, commit="b"),
        trained(888.0, data=2, commit="b", environment={"XLA_FLAGS": "--xla_x"}),
        trained(777.0, data=2, commit="b", remarks=["within CUDA graphs"]),
        trained(5.0, tensor=2, workload="large"),
        trained(400.0, fsdp=4),
    ]
    assert lines_of(tables.meshes(rows, 2)) == [
        ["large", "tensor=2", "–", "5", "–", "50.0", "–"],
        ["small", "context=2 all_to_all", "105", "200", "1.90", "50.0", "2.0"],
        ["small", "data=2", "90", "170", "1.89", "50.0", "–"],
    ]
    assert [line[1] for line in lines_of(tables.meshes(rows, 4))] == ["fsdp=4"]


def test_training_has_the_last_run_and_the_mfu_of_all_runs_of_its_day():
    size = {"num_parameters": 123_587_328, "device_peak_bytes": 12_663_000_000}
    rows = [
        trained(1.0, date="2026-11-22", **size),
        trained(2000.0, **size),
        trained(3000.0, **size) | {"mfu_causal": 0.4567},
        trained(9.0, workload="other", **size),
    ]
    assert lines_of(tables.training(rows, "small")) == [["small", "124M", "3,000", "50.0, 45.7", "12.7"]]


def test_an_exchange_has_the_sharding_that_is_best_for_it():
    row = {
        "case": "packed_131k",
        "num_devices": 4,
        "device": "NVIDIA H200",
        "date": "2026-11-26",
        "exchange": "all_gather",
    }
    untraced, row = row, row | {"traced": {"received_bytes": 5e6}, "exposed_s": 0.002}
    rows = [
        row | {"sequence_sharding": "balanced", "efficiency": 0.71},
        row | {"sequence_sharding": "contiguous", "efficiency": 0.9},
        row | {"sequence_sharding": "contiguous", "efficiency": 0.38},
        row | {"sequence_sharding": "balanced", "efficiency": 0.92, "exchange": "peer"},
        untraced | {"sequence_sharding": "balanced", "efficiency": 0.8, "exchange": "ring"},
        row | {"sequence_sharding": "balanced", "efficiency": 0.99, "num_devices": 2},
        row | {"refused": "can't"},
    ]
    assert lines_of(tables.exchanges(rows, 4)) == [
        ["packed", "peer", "balanced", "92", "–", "2.0"],
        ["packed", "ring", "balanced", "80", "–", "–"],
        ["packed", "all_gather", "balanced", "71", "5", "2.0"],
    ]


def test_errors_are_the_greatest_of_all_shapes():
    row = {"case": "a", "device": "NVIDIA H200", "date": "2026-11-27", "backend": "mosaic_gpu", "baseline": "fa3"}
    ratios = {"output": 1.02, "d_query": 0.9, "d_key": 1.0, "d_value": 0.95}
    rows = [
        row | {"error_ratios": ratios},
        row | {"case": "b", "error_ratios": ratios | {"output": 0.8, "d_value": 1.3, "d_sinks": 1.6}},
        row | {"error_ratios": ratios | {"output": 7.0}, "backend": "cudnn"},
        row | {"case": "c", "error_ratios": {}},
    ]
    assert lines_of(tables.errors(rows)) == [["FlashAttention-3", "H200", "2", "1.02", "1.30", "1.60"]]


def test_bursts_and_sustained_speeds_stand_in_lines_of_their_own():
    row = {"case": "c", "batch": 1, "num_heads": 2, "num_kv_heads": 2, "length": 64, "head_dim": 8, "value_dim": None}
    row |= {"kv_length": None, "mask": "CausalMask(offset=0)", "document_length": None, "document_spread": None}
    row |= {"has_sinks": False, "device": "NVIDIA H200", "date": "2026-11-29", "dtype": "bfloat16"}
    rows = [
        row | {"rest_ms": rest_ms, "direction": direction, "backend": backend, "tflops_per_s": 100 * i + 10 * j + k}
        for i, rest_ms in enumerate((0.0, 350.0), 1)
        for k, backend in enumerate(("torch_cudnn", "cudnn", "mosaic_gpu"))
        for j, direction in enumerate(("backward", "forward_backward", "forward"))
    ]
    assert lines_of(tables.regimes(rows)) == [
        ["1×2×64×8", "sustained", "122", "121", "120", "102", "101", "100"],
        ["1×2×64×8", "bursts", "222", "221", "220", "202", "201", "200"],
    ]
