"""The compile-time benchmark: cases in processes of their own, their limit, and what the table, ratios and plot say."""

import functools
import importlib.util
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from experiments.benchmarks.compile_time.__main__ import Arguments, main
from experiments.benchmarks.compile_time.measure import CompileCase, read_mask
from experiments.benchmarks.compile_time.report import compare_tiles, describe_status, draw, ratios
from experiments.benchmarks.compile_time.sweep import Limits, run_case, sources_for, sweep
from experiments.benchmarks.compile_time.upstream import attention, describe, lazy_mask, make_kernel
from kernels import CausalMask, ChunkedCausalMask, LocalMask, MultiHeadMask, PrefixMask, dot_product_attention
from tests.kernels.integer_masks import specs
from trainer.hardware import peak_resident_bytes, reset_peak, resident_bytes

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: the `tpu` extra, on Linux x86-64"
)
LIMITS = Limits(seconds=120, resident_bytes=10**12)


def case_of(**changes):
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "num_repeats": 2}
    case = {"subject": "attention", "source": "ours", "mask": "causal", "length": 2048, "target": "v5e:1x1"}
    return CompileCase(**(case | {"config": "experiments/smoke.py"} | sizes | changes))


def row_of(source, length, trace_s, *, status="measured", gigabytes=1.0, **more):
    row = {"subject": "attention", "mask": "causal", "source": source, "length": length, "status": status}
    row |= {"target": "v5p:2x2x1", "limit_s": 100.0, "process_s": trace_s + 10, "visited_tiles": None}
    row |= {"cpu": "a CPU", "num_cores": 2, "jax": "0", "libtpu": "0", "date": "2026-01-01"}
    if status == "measured":
        row |= {"trace_s": trace_s, "first_trace_s": 2 * trace_s, "lower_s": 0.1, "compile_s": 1.0}
        row |= {"trace_peak_bytes": int(gigabytes * 1e9)}
    return row | more


ROWS = [
    row_of("ours", 4096, 0.1),
    row_of("ours", 131_072, 0.11, gigabytes=1.05),
    row_of("upstream_lazy", 4096, 0.2),
    row_of("upstream_lazy", 131_072, 66.0),
    row_of("dense", 4096, 1.0),
    row_of("dense", 131_072, 0, status="stopped", process_s=100, message="at 100 s"),
]


@pytest.mark.full
@needs_libtpu
def test_a_sweep_from_the_command_line_to_the_plot(tmp_path, capsys):
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "num_repeats": 2}
    output, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    sources, lengths = ("ours", "dense"), (1024, 2048)
    written = {"output": output, "plot": plot}
    assert main(Arguments(target="v5e:1x1", sources=sources, lengths=lengths, limit_s=120, **written, **sizes)) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["source"], row["length"]) for row in rows] == [(s, t) for s in sources for t in lengths]
    for row in rows:
        assert row["status"] == "measured"
        assert min(row["trace_s"], row["lower_s"], row["compile_s"]) > 0
        assert row["fastest_trace_s"] <= row["trace_s"] <= row["slowest_trace_s"]
        assert row["fastest_trace_s"] <= row["first_trace_s"] <= row["slowest_trace_s"]
        assert 50e6 < row["trace_peak_bytes"] <= row["peak_bytes"]
        assert 0 <= row["trace_rise_bytes"] < row["trace_peak_bytes"]
        assert row["visited_tiles"].keys() == {"forward", "d_key_value", "d_query"}
        assert all((row["libtpu"], row["cpu"], row["date"]))
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 20_000
    printed = " ".join(capsys.readouterr().out.split())
    assert "dense takes" in printed
    assert "as long to trace at 2,048 as at 1,024" in printed
    assert "dense visits as many tiles as ours in every pass at 1,024, 2,048" in printed


def test_the_training_step_on_this_machine():
    row = run_case(case_of(subject="train_step", target=None, length=256), LIMITS)
    assert row["status"] == "measured", row
    assert row["trace_s"] > 0


def test_a_case_that_takes_too_long_is_stopped_and_ends_its_series():
    cases = [case_of(target=None, length=length) for length in (1024, 2048)]
    started = []
    rows = list(sweep([cases], Limits(0.2, LIMITS.resident_bytes), started.append))
    assert [row["status"] for row in rows] == ["stopped", "not tried"]
    told = ["stopped at 0.2 s", "not tried: 1,024 was stopped or failed"]
    assert [describe_status(row) for row in rows] == told
    assert started == cases


@pytest.mark.skipif(resident_bytes() is None, reason="needs /proc, which tells what another process has resident")
def test_a_case_that_takes_too_much_memory_is_stopped():
    row = run_case(case_of(target=None), Limits(LIMITS.seconds, 50_000_000))
    assert describe_status(row) == "stopped at 50.0 MB"
    assert row["process_s"] < LIMITS.seconds


def test_a_case_that_fails_says_why_and_the_sweep_goes_on():
    failing, good = case_of(target=None, num_heads=3, num_kv_heads=2, length=128), case_of(target=None, length=128)
    rows = list(sweep([[failing], [good]], LIMITS))
    assert describe_status(rows[0]) == "failed: ValueError: num_heads=3 is not a multiple of num_kv_heads=2"
    assert rows[1]["status"] == "measured"


def test_peak_of_resident_memory_can_begin_anew():
    reset_peak()
    before = peak_resident_bytes()
    block = bytearray(b"x" * 100_000_000)
    risen = peak_resident_bytes()
    assert risen - before > 90_000_000
    del block
    if resident_bytes() is not None:  # elsewhere the peak is that of the process's whole life
        assert peak_resident_bytes() == risen
        reset_peak()
        assert peak_resident_bytes() < risen - 50_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sources": ("ours", "dense")}, "dense masks are those of JAX's TPU kernel; give --target a TPU topology, or"),
        (
            {"subjects": ("train_step",), "sources": ("ours", "dense")},
            "a training step has our masks alone; give --subjects attention, or --sources",
        ),
        ({"target": "v9:2x2"}, "unknown topology 'v9:2x2'"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(capsys, arguments, message):
    assert main(Arguments(**arguments)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}")
    assert said.count("\n") == 1


def test_a_training_step_has_our_masks_alone():
    assert sources_for("v5e:1x1", "train_step") == ("ours",)


@pytest.mark.parametrize("mask", [CausalMask(), LocalMask(400, 0), ChunkedCausalMask(256)], ids=repr)
def test_jax_evaluates_its_lazy_masks_in_its_kernel(mask):
    array = jnp.ones((1, 1024, 2, 64), jnp.bfloat16)
    kernel = make_kernel("upstream_lazy", describe(array, array, array, mask))
    q_pos, kv_pos = np.arange(1024)[:, None], np.arange(1024)[None]
    np.testing.assert_array_equal(kernel.kwargs["mask_function"](q_pos, kv_pos), mask(q_pos, kv_pos))
    assert kernel.fwd_mask_info.partial_mask_blocks is None


@settings(max_examples=30)
@given(spec=specs)
def test_jaxs_lazy_masks_allow_what_ours_do(spec):
    lazy = lazy_mask(spec.mask(), (128, 128))
    np.testing.assert_array_equal(lazy[:, :], spec.dense(range(128), range(128)))


@pytest.mark.parametrize("source", ["upstream_lazy", "dense"])
@pytest.mark.parametrize(
    "mask",
    [CausalMask() & LocalMask(150, 0), PrefixMask(300), MultiHeadMask([CausalMask(), LocalMask(150, 40)])],
    ids=["window", "prefix", "two_masks"],
)
def test_the_baselines_compute_the_same(source, mask, rng):
    query, key, value = (
        jnp.asarray(rng.standard_normal((1, length, heads, 64)), jnp.float32)
        for length, heads in ((384, 2), (256, 1), (256, 1))
    )

    def run(function):
        return jax.value_and_grad(lambda *x: (function(*x) ** 2).sum(), argnums=(0, 1, 2))(query, key, value)

    actual = run(lambda *x: attention(source, *x, mask, interpret=True))
    expected = run(functools.partial(dot_product_attention, mask=mask, implementation="reference"))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), actual, expected)


def test_the_baselines_refuse_lengths_that_jax_does_not_take():
    array = jnp.ones((1, 1000, 2, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="multiples of 128, not 1000 and 1000"):
        make_kernel("dense", describe(array, array, array, CausalMask()))


def test_an_interrupted_sweep_keeps_what_was_measured(tmp_path, monkeypatch, capsys):
    def sweep_until_interrupted(*_):
        yield from ROWS[:2]
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.benchmarks.compile_time.__main__.sweep", sweep_until_interrupted)
    output, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    assert main(Arguments(output=output, plot=plot)) == 130
    assert [json.loads(line) for line in output.read_text().splitlines()] == ROWS[:2]
    assert plot.exists()
    assert "1.10× as long to trace at 131,072 as at 4,096" in capsys.readouterr().out


def test_ratios_of_equal_lengths_and_of_the_ends():
    assert ratios(ROWS) == [
        "attention, causal, 4,096: upstream_lazy takes 2.00× as long to trace as ours",
        "attention, causal, 131,072: upstream_lazy takes 600× as long to trace as ours",
        "attention, causal, 4,096: dense takes 10× as long to trace as ours",
        # 100 seconds, less the 10 that ours takes besides its trace, by the 0.22 of ours' first one
        "attention, causal, 131,072: dense takes more than 409× as long to trace as ours",
        "attention, causal: ours takes 1.10× as long to trace at 131,072 as at 4,096, and +50 MB",
    ]


def test_unequal_numbers_of_tiles_are_told():
    tiles = {"forward": 10, "d_key_value": 10, "d_query": 10}
    rows = [row_of("ours", 1024, 0.1, visited_tiles=tiles), row_of("ours", 2048, 0.1, visited_tiles=tiles)]
    rows += [row_of("dense", 1024, 1.0, visited_tiles=tiles)]
    rows += [row_of("dense", 2048, 1.0, visited_tiles=tiles | {"d_query": 11}), row_of("dense", 4096, 1.0)]
    assert compare_tiles(rows) == [
        "attention, causal: dense visits as many tiles as ours in every pass at 1,024",
        "attention, causal: dense visits OTHER NUMBERS OF TILES than ours in some pass at 2,048",
    ]


def test_the_plot_has_a_line_for_each_source(tmp_path):
    with_all, with_one = tmp_path / "all.png", tmp_path / "one.png"
    draw(ROWS, with_all)
    draw(ROWS[:2], with_one)
    assert with_all.stat().st_size > with_one.stat().st_size > 10_000


def test_masks_by_name_and_by_expression():
    window = CausalMask() & LocalMask(4095, 0)
    assert read_mask("window_4096", 4) == window == read_mask(repr(window), 4)
    assert read_mask("two_masks", 4).masks == (CausalMask(), CausalMask() & LocalMask(4095, 0)) * 2
    with pytest.raises(ValueError, match="cannot read"):
        Arguments(masks=("no_such_mask",))


def test_importing_the_benchmark_starts_no_device():
    code = "import experiments.benchmarks.compile_time.__main__, jax; assert not jax._src.xla_bridge._backends"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
